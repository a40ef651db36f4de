//! What both sides' machines saw of a guest that moved: how long it and its cards were silent, and
//! what it says of itself.

use martlet_engine::{ClockOffset, Instant, Report, Side, Span, Switchover};
use martlet_machine::{GuestCheck, Observed};
use std::time::Duration;

/// How long a guest that moved stood still: by its own heartbeats, or by what the engine measured.
pub(crate) fn blackout(report: &Report) -> Option<Duration> {
    let switchover = report.switchover.as_ref()?;
    let engines = switchover.blackout?;
    Some(Seen::of(switchover).blackout().unwrap_or(engines))
}

/// What was seen of a guest around its switchover.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    source: Observed,
    destination: Observed,
    clock: Option<ClockOffset>,
}

impl Seen {
    pub(crate) fn of(switchover: &Switchover) -> Seen {
        let decode = |report: &Option<Vec<u8>>| {
            report.as_deref().and_then(Observed::decode).unwrap_or_default()
        };
        Seen {
            source: decode(&switchover.source_observed),
            destination: decode(&switchover.destination_observed),
            clock: switchover.clock,
        }
    }

    /// What the guest said of itself when it left.
    pub(crate) fn check(&self) -> Option<GuestCheck> {
        self.source.check
    }

    pub(crate) fn has_cards(&self) -> bool {
        !self.source.last_frames_ns.is_empty()
    }

    /// From the last heartbeat at the source to the first at the destination, on one clock: the
    /// error of two is larger than what is measured here.
    fn blackout(&self) -> Option<Duration> {
        self.between(self.source.last_heartbeat_ns?, self.destination.first_heartbeat_ns?)
    }

    /// For each card, from its last frame at the source to its first at the destination.
    pub(crate) fn cards(&self) -> Vec<Option<Duration>> {
        let first = self.destination.first_frames_ns.iter().copied().chain(std::iter::repeat(None));
        let pairs = self.source.last_frames_ns.iter().zip(first);
        pairs.map(|(last, first)| self.between((*last)?, first?)).collect()
    }

    fn between(&self, here_ns: u64, there_ns: u64) -> Option<Duration> {
        let clock = self.clock.filter(|clock| clock.error.is_zero())?;
        Some(clock.from_peer(Instant(there_ns)).since(Instant(here_ns)))
    }

    /// The engine's timeline from the last heartbeat to the first, and without devices where there
    /// are none.
    pub(crate) fn timeline(&self, switchover: &Switchover) -> Vec<Span> {
        let zero = switchover.stop;
        let mut spans = Vec::with_capacity(switchover.timeline.len() + 2);
        if let Some(last) = self.source.last_heartbeat_ns {
            let (name, side) = ("guest runs on", Side::Source);
            let start_us = micros_between(zero, Instant(last));
            spans.push(Span { name, side, start_us, end_us: start_us.max(0) });
        }
        for span in &switchover.timeline {
            if self.has_cards() || !span.name.ends_with("devices") {
                spans.push(span.clone());
            }
            if let ("start vCPUs", Some(first)) = (span.name, self.first_heartbeat()) {
                let (name, side, start_us) = ("first heartbeat", span.side, span.end_us);
                let end_us = micros_between(zero, first).max(start_us);
                spans.push(Span { name, side, start_us, end_us });
            }
        }
        spans
    }

    fn first_heartbeat(&self) -> Option<Instant> {
        Some(self.clock?.from_peer(Instant(self.destination.first_heartbeat_ns?)))
    }
}

fn micros_between(zero: Instant, moment: Instant) -> i64 {
    let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    if moment >= zero { micros(moment.since(zero)) } else { -micros(zero.since(moment)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(error: Duration) -> Seen {
        Seen {
            source: Observed {
                last_heartbeat_ns: Some(990_000),
                last_frames_ns: vec![Some(810_000), Some(900_000), Some(1)],
                ..Observed::default()
            },
            destination: Observed {
                first_heartbeat_ns: Some(1_400_000),
                first_frames_ns: vec![Some(1_300_000), None],
                ..Observed::default()
            },
            clock: Some(ClockOffset { ns: 0, error }),
        }
    }

    #[test]
    fn one_clock_measures_from_heartbeat_to_heartbeat_and_from_frame_to_frame() {
        let one = seen(Duration::ZERO);
        assert_eq!(one.blackout(), Some(Duration::from_micros(410)));
        assert_eq!(one.cards(), [Some(Duration::from_micros(490)), None, None]);
        let two = seen(Duration::from_micros(20));
        assert_eq!(two.blackout(), None);
        assert_eq!(two.cards(), [None, None, None]);
    }

    #[test]
    fn the_timeline_is_from_heartbeat_to_heartbeat() {
        let span = |name, side, start_us, end_us| Span { name, side, start_us, end_us };
        let mut switchover = Switchover::default();
        switchover.stop = Instant(1_000_000);
        switchover.timeline = vec![
            span("suspend devices", Side::Source, -200, 0),
            span("start vCPUs", Side::Destination, 200, 210),
        ];
        let mut seen = seen(Duration::from_micros(20));
        let names = |seen: &Seen| {
            let spans = seen.timeline(&switchover);
            spans
                .into_iter()
                .map(|span| (span.name, span.start_us, span.end_us))
                .collect::<Vec<_>>()
        };
        let all = names(&seen);
        assert_eq!(all[0], ("guest runs on", -10, 0));
        assert_eq!(all[3], ("first heartbeat", 210, 400));
        seen.source.last_frames_ns.clear();
        assert_eq!(names(&seen).len(), 3, "without devices");
    }
}
