//! Pings: whether the peer lives, how far away it is, and what its clock says.

use crate::limits::{PING_INTERVAL, SILENCE_MAX};
use core::time::Duration;
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{Ping, Pong};
use std::collections::VecDeque;

/// Answered pings that are remembered. The shortest round trip among them counts, if it is not too
/// long ago: the others waited in some queue.
const SAMPLES_MAX: usize = 8;
/// Pings that may be unanswered: on a way that takes longer than their interval several are under
/// way at once, up to the silence that ends the attempt.
const UNANSWERED_MAX: usize = 32;

/// How much two clocks that NTP leads may drift apart: each by 500 ppm (Linux, MAXFREQ), one ahead
/// and one back.
const DRIFT_PER_MILLION_MAX: u64 = 1000;

/// What one answered ping told.
#[derive(Clone, Copy, Debug)]
struct Sample {
    round_trip: Duration,
    /// The destination's clock minus the source's. The way there may have taken from none to all
    /// of the round trip, so the error is half of that.
    offset_ns: i64,
    at: Instant,
}

impl Sample {
    /// What it says of the clocks at `now`, when they have drifted since.
    fn offset(&self, now: Instant) -> ClockOffset {
        let age = u64::try_from(now.since(self.at).as_nanos()).unwrap_or(u64::MAX);
        let drift = Duration::from_nanos(age / (1_000_000 / DRIFT_PER_MILLION_MAX));
        // Half of an odd number of nanoseconds is rounded up.
        let half = self.round_trip - self.round_trip / 2;
        ClockOffset { ns: self.offset_ns, error: half + drift }
    }
}

/// The source's side: sends pings, measures, and tells when the peer is silent for too long.
#[derive(Debug)]
pub(crate) struct Pinger {
    next_ping: Instant,
    /// When the unanswered pings were sent, the oldest first.
    asked: VecDeque<Instant>,
    silence: Silence,
    samples: VecDeque<Sample>,
}

impl Pinger {
    pub(crate) fn new(now: Instant) -> Pinger {
        let (asked, samples) = (VecDeque::new(), VecDeque::with_capacity(SAMPLES_MAX));
        Pinger { next_ping: now, asked, silence: Silence::new(now), samples }
    }

    pub(crate) fn next_ping(&self) -> Instant {
        self.next_ping
    }

    /// The next ping comes no later than this.
    pub(crate) fn ping_again_after(&mut self, now: Instant, interval: Duration) {
        self.next_ping = now.after(interval);
    }

    /// Whether another ping may be unanswered.
    pub(crate) fn has_room(&self) -> bool {
        self.asked.len() < UNANSWERED_MAX
    }

    /// When the peer was last heard.
    pub(crate) fn heard_at(&self) -> Instant {
        self.silence.since
    }

    pub(crate) fn silence(&mut self) -> &mut Silence {
        &mut self.silence
    }

    pub(crate) fn silent_at(&self) -> Instant {
        self.silence.at()
    }

    pub(crate) fn ping(&mut self, now: Instant) -> Ping {
        self.ping_again_after(now, PING_INTERVAL);
        if self.asked.len() == UNANSWERED_MAX {
            self.asked.pop_front();
        }
        self.asked.push_back(now);
        Ping { sent_ns: now.0 }
    }

    /// Whether it was asked for. An answer to nothing that was asked measures nothing.
    pub(crate) fn on_pong(&mut self, now: Instant, pong: Pong) -> bool {
        let Some(place) = self.asked.iter().position(|sent| sent.0 == pong.sent_ns) else {
            return false;
        };
        // Answers come in order: older pings will not be answered any more.
        self.asked.drain(..=place);
        let round_trip = now.since(Instant(pong.sent_ns));
        let half = round_trip / 2;
        let midpoint = Instant(pong.sent_ns).after(half);
        let offset = i128::from(pong.answered_ns) - i128::from(midpoint.0);
        let limit = |value: i128| i64::try_from(value).ok();
        let Some(offset_ns) = limit(offset) else { return true };
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample { round_trip, offset_ns, at: now });
        true
    }

    /// The shortest round trip of the last few.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.samples.iter().map(|sample| sample.round_trip).min()
    }

    /// The destination's clock beside this one, as the best sample tells.
    pub(crate) fn offset(&self, now: Instant) -> Option<ClockOffset> {
        self.samples.iter().map(|sample| sample.offset(now)).min_by_key(|offset| offset.error)
    }
}

/// When the peer was last heard.
#[derive(Debug)]
pub(crate) struct Silence {
    since: Instant,
}

impl Silence {
    pub(crate) fn new(now: Instant) -> Silence {
        Silence { since: now }
    }

    pub(crate) fn heard(&mut self, now: Instant) {
        self.since = now;
    }

    /// When it will have lasted too long.
    pub(crate) fn at(&self) -> Instant {
        self.since.after(SILENCE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_round_trip_counts() {
        let mut pinger = Pinger::new(Instant(0));
        // The destination's clock is 1000 ns behind; ways of 100 ns and then 10 ns each.
        for (sent, way) in [(5_000, 100), (6_000, 10)] {
            let ping = pinger.ping(Instant(sent));
            let pong = Pong { sent_ns: ping.sent_ns, answered_ns: sent + way - 1_000 };
            pinger.on_pong(Instant(sent + 2 * way), pong);
        }
        assert_eq!(pinger.round_trip(), Some(Duration::from_nanos(20)));
        let offset = pinger.offset(Instant(6_020)).unwrap();
        assert_eq!(offset, ClockOffset { ns: -1_000, error: Duration::from_nanos(10) });
        assert_eq!(offset.from_peer(Instant(500)), Instant(1_500));
        assert_eq!(offset.seen_by_peer().from_peer(Instant(1_500)), Instant(500));
    }

    /// A sample of long ago says less than a fresh one, however short its way was.
    #[test]
    fn clocks_drift_apart() {
        const SECOND: u64 = 1_000_000_000;
        let mut pinger = Pinger::new(Instant(0));
        // A way of 1 us, then five seconds, then one of 1 ms; the clocks are a second apart, and
        // then half a millisecond more.
        for (sent, way, offset) in
            [(SECOND, 1_000, SECOND), (6 * SECOND, 1_000_000, SECOND + 500_000)]
        {
            let ping = pinger.ping(Instant(sent));
            let pong = Pong { sent_ns: ping.sent_ns, answered_ns: sent + way + offset };
            pinger.on_pong(Instant(sent + 2 * way), pong);
            let now = Instant(sent + 2 * way);
            let told = pinger.offset(now).unwrap();
            assert!(u128::from(told.ns.abs_diff(offset.cast_signed())) <= told.error.as_nanos());
            assert_eq!(told.error, Duration::from_nanos(way));
        }
        assert_eq!(pinger.round_trip(), Some(Duration::from_micros(2)));
        let later = pinger.offset(Instant(7 * SECOND)).unwrap();
        assert_eq!(later.error, Duration::from_nanos(1_000_000 + 998_000));
    }

    /// Found by the simulated world: a way longer than the interval of pings was never measured.
    #[test]
    fn several_pings_may_be_under_way() {
        let mut pinger = Pinger::new(Instant(0));
        for sent in [1_000, 2_000, 3_000] {
            pinger.ping(Instant(sent));
        }
        pinger.on_pong(Instant(9_000), Pong { sent_ns: 2_000, answered_ns: 5_500 });
        assert_eq!(pinger.round_trip(), Some(Duration::from_nanos(7_000)));
        pinger.on_pong(Instant(9_001), Pong { sent_ns: 1_000, answered_ns: 5_500 });
        assert_eq!(pinger.samples.len(), 1);
        pinger.on_pong(Instant(9_002), Pong { sent_ns: 3_000, answered_ns: 5_500 });
        assert_eq!(pinger.samples.len(), 2);
    }

    #[test]
    fn invented_pongs_measure_nothing() {
        let mut pinger = Pinger::new(Instant(0));
        pinger.on_pong(Instant(9), Pong { sent_ns: 0, answered_ns: 0 });
        let ping = pinger.ping(Instant(10));
        pinger.on_pong(Instant(20), Pong { sent_ns: 11, answered_ns: 0 });
        pinger.on_pong(Instant(20), Pong { sent_ns: ping.sent_ns, answered_ns: u64::MAX });
        pinger.on_pong(Instant(20), Pong { sent_ns: ping.sent_ns, answered_ns: 15 });
        assert_eq!(pinger.round_trip(), None);
    }
}
