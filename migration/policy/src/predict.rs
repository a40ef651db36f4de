//! The predicted blackout: everything that will happen in it, from what this migration measured.

use core::time::Duration;
use martlet_units::{ByteCount, BytesPerSec, PageCount};

/// What was measured in this migration so far. A part not measured yet is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measurements {
    /// Kick to last vCPU out, from rehearsals.
    pub pause: Duration,
    /// Saving all state once stopped, from rehearsals.
    pub save: Duration,
    /// Reading the dirty log.
    pub sync: Duration,
    /// Pages that would be dirty at the stop.
    pub dirty: PageCount,
    /// What the channels carried to the destination's memory.
    pub bandwidth: BytesPerSec,
    /// Saved state, from rehearsals.
    pub state: ByteCount,
    /// A round trip on the control connection.
    pub round_trip: Duration,
    /// Loading the state at the destination, from rehearsals.
    pub load: Duration,
    /// Entering the vCPUs at the destination, from rehearsals.
    pub start: Duration,
}

/// The blackout to expect, part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Stopping the vCPUs.
    pub pause: Duration,
    /// The last dirty sync.
    pub final_sync: Duration,
    /// The last pages.
    pub final_pages: Duration,
    /// What saving and sending the state adds beyond the pages, which go at the same time.
    pub cpu_state: Duration,
    /// The way of the commit, and loading the state.
    pub commit: Duration,
    /// Entering the vCPUs.
    pub start: Duration,
}

impl Prediction {
    /// The whole blackout. Saturates: a prediction may be "for ever".
    pub fn total(&self) -> Duration {
        self.fixed().saturating_add(self.final_pages)
    }

    /// All but the last pages: what no further round can shorten.
    pub fn fixed(&self) -> Duration {
        self.pause
            .saturating_add(self.final_sync)
            .saturating_add(self.cpu_state)
            .saturating_add(self.commit)
            .saturating_add(self.start)
    }
}

/// Predicts the blackout if the guest were stopped now.
///
/// Part by part, from the source's view, each beginning where the one before ended:
///
/// - `pause` and `final_sync` as measured.
/// - `final_pages`: the dirty pages at the measured bandwidth. With dirty pages and no bandwidth
///   measured it is for ever, so that nobody stops a guest on a guess.
/// - `cpu_state`: the vCPUs save their state from the pause on, beside the sync and the pages; what
///   that takes longer than these two counts here. Then the state is sent, at the same bandwidth
///   as pages. With no bandwidth measured its sending counts as nothing: then this migration had
///   no page to send, and a rehearsed state's way is in the round trip.
/// - `commit`: one way to the destination, half of a round trip, and loading the state there. If
///   pages take long, the load overlaps with them and less is seen of it: the prediction then errs
///   on the long side by at most `load`.
/// - `start` as measured.
pub fn predict(measured: &Measurements) -> Prediction {
    let Measurements { pause, save, sync, dirty, bandwidth, state, round_trip, load, start } =
        *measured;
    let time_for = |bytes: ByteCount| match bytes {
        ByteCount(0) => Duration::ZERO,
        bytes => bandwidth.time_for(bytes),
    };
    let final_pages = time_for(dirty.to_bytes());
    let sending =
        if bandwidth == BytesPerSec(0) { Duration::ZERO } else { bandwidth.time_for(state) };
    let saving = save.saturating_sub(sync.saturating_add(final_pages));
    Prediction {
        pause,
        final_sync: sync,
        final_pages,
        cpu_state: saving.saturating_add(sending),
        commit: (round_trip / 2).saturating_add(load),
        start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    const MEASURED: Measurements = Measurements {
        pause: us(40),
        save: us(200),
        sync: us(10),
        dirty: PageCount(100),
        // 4.096 us a page.
        bandwidth: BytesPerSec(1_000_000_000),
        state: ByteCount(50_000),
        round_trip: us(30),
        load: us(120),
        start: us(25),
    };

    #[test]
    fn each_part_by_hand() {
        let got = predict(&MEASURED);
        let pages = Duration::from_nanos(409_600);
        let expected = Prediction {
            pause: us(40),
            final_sync: us(10),
            final_pages: pages,
            // The save is over before the pages are.
            cpu_state: us(50),
            commit: us(15 + 120),
            start: us(25),
        };
        assert_eq!(got, expected);
        assert_eq!(got.fixed(), us(40 + 10 + 50 + 135 + 25));
        assert_eq!(got.total(), got.fixed() + pages);
    }

    #[test]
    fn a_save_that_outlasts_the_pages_counts() {
        let few = Measurements { dirty: PageCount(0), ..MEASURED };
        assert_eq!(predict(&few).final_pages, Duration::ZERO);
        assert_eq!(predict(&few).cpu_state, us(200 - 10 + 50));
    }

    #[test]
    fn nothing_measured_is_nothing_and_pages_without_a_rate_are_for_ever() {
        assert_eq!(predict(&Measurements::default()), Prediction::default());
        let state_only = Measurements { state: ByteCount(1000), ..Measurements::default() };
        assert_eq!(predict(&state_only).total(), Duration::ZERO);
        let unknown = Measurements { bandwidth: BytesPerSec(0), ..MEASURED };
        assert_eq!(predict(&unknown).total(), Duration::MAX);
    }

    proptest! {
        #[test]
        fn more_of_anything_is_never_shorter(
            a in prop::array::uniform8(0..10_000u64), more in prop::array::uniform8(0..10_000u64),
            rate in 1..100_000_000_000u64, faster in 0..100_000_000_000u64,
        ) {
            let measured = |n: [u64; 8], rate| Measurements {
                pause: us(n[0]), save: us(n[1]), sync: us(n[2]), dirty: PageCount(n[3]),
                bandwidth: BytesPerSec(rate), state: ByteCount(n[4]), round_trip: us(n[5]),
                load: us(n[6]), start: us(n[7]),
            };
            let less = predict(&measured(a, rate));
            let mut b = a;
            b.iter_mut().zip(more).for_each(|(b, more)| *b += more);
            prop_assert!(less.total() <= predict(&measured(b, rate)).total());
            prop_assert!(predict(&measured(a, rate + faster)).total() <= less.total());
        }
    }
}
