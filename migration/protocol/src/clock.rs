//! Pings: whether the peer lives, how far away it is, and what its clock says.

use crate::limits::{PING_INTERVAL, SILENCE_MAX};
use core::time::Duration;
use martlet_units::Instant;
use martlet_wire::control::{Ping, Pong};
use std::collections::VecDeque;

/// Answered pings that are remembered. The shortest round trip among them counts: the others
/// waited in some queue.
const SAMPLES_MAX: usize = 8;
/// Pings that may be unanswered: on a way that takes longer than their interval several are under
/// way at once, up to the silence that ends the attempt.
const UNANSWERED_MAX: usize = 32;

/// What pings told about the destination's clock and the way there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockEstimate {
    /// There and back on the control connection.
    pub round_trip: Duration,
    /// The destination's clock minus the source's, in nanoseconds.
    pub offset_ns: i64,
    /// What `offset_ns` may be off by: the way there may have taken from none to all of the
    /// round trip.
    pub error: Duration,
}

impl ClockEstimate {
    /// A moment of the destination's clock on the source's.
    pub fn to_source_clock(&self, destination_ns: u64) -> Instant {
        Instant(destination_ns.saturating_add_signed(self.offset_ns.saturating_neg()))
    }
}

/// The source's side: sends pings, measures, and tells when the peer is silent for too long.
#[derive(Debug)]
pub(crate) struct Pinger {
    next_ping: Instant,
    /// When the unanswered pings were sent, the oldest first.
    asked: VecDeque<Instant>,
    silence: Silence,
    samples: VecDeque<ClockEstimate>,
}

impl Pinger {
    pub(crate) fn new(now: Instant) -> Pinger {
        let (asked, samples) = (VecDeque::new(), VecDeque::with_capacity(SAMPLES_MAX));
        Pinger { next_ping: now, asked, silence: Silence::new(now), samples }
    }

    pub(crate) fn next_ping(&self) -> Instant {
        self.next_ping
    }

    pub(crate) fn silence(&mut self) -> &mut Silence {
        &mut self.silence
    }

    pub(crate) fn silent_at(&self) -> Instant {
        self.silence.at()
    }

    pub(crate) fn ping(&mut self, now: Instant) -> Ping {
        self.next_ping = now.after(PING_INTERVAL);
        if self.asked.len() == UNANSWERED_MAX {
            self.asked.pop_front();
        }
        self.asked.push_back(now);
        Ping { sent_ns: now.0 }
    }

    /// An answer to nothing that was asked measures nothing, and is no fault either.
    pub(crate) fn on_pong(&mut self, now: Instant, pong: Pong) {
        let Some(place) = self.asked.iter().position(|sent| sent.0 == pong.sent_ns) else {
            return;
        };
        // Answers come in order: older pings will not be answered any more.
        self.asked.drain(..=place);
        let round_trip = now.since(Instant(pong.sent_ns));
        let half = round_trip / 2;
        let midpoint = Instant(pong.sent_ns).after(half);
        let offset = i128::from(pong.answered_ns) - i128::from(midpoint.0);
        let limit = |value: i128| i64::try_from(value).ok();
        let Some(offset_ns) = limit(offset) else { return };
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(ClockEstimate { round_trip, offset_ns, error: half });
    }

    pub(crate) fn estimate(&self) -> Option<ClockEstimate> {
        self.samples.iter().copied().min_by_key(|sample| sample.round_trip)
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
        let estimate = pinger.estimate().unwrap();
        assert_eq!(estimate.round_trip, Duration::from_nanos(20));
        assert_eq!((estimate.offset_ns, estimate.error), (-1_000, Duration::from_nanos(10)));
        assert_eq!(estimate.to_source_clock(500), Instant(1_500));
    }

    /// Found by the simulated world: a way longer than the interval of pings was never measured.
    #[test]
    fn several_pings_may_be_under_way() {
        let mut pinger = Pinger::new(Instant(0));
        for sent in [1_000, 2_000, 3_000] {
            pinger.ping(Instant(sent));
        }
        pinger.on_pong(Instant(9_000), Pong { sent_ns: 2_000, answered_ns: 5_500 });
        assert_eq!(pinger.estimate().map(|e| e.round_trip), Some(Duration::from_nanos(7_000)));
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
        assert_eq!(pinger.estimate(), None);
    }
}
