//! The switchover's times, and what they say about the blackout.

use crate::{Devices, Phases, Side, Span};
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{Alive, Committed, DevicesAlive};
use std::time::Duration;

/// Moments of one switchover on the source's clock, in the order in which they come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moments {
    /// When the devices were told to stop. vCPUs run on.
    pub(super) suspend: Instant,
    /// When the vCPUs were told to stop: the devices had.
    pub(super) stop: Instant,
    pub(super) paused: Instant,
    pub(super) synced: Instant,
    pub(super) pages_sent: Instant,
    pub(super) state_saved: Instant,
    pub(super) commit_sent: Instant,
}

impl Moments {
    /// Devices are told to stop at `suspend`, vCPUs at `stop`; what comes later is set when it
    /// comes.
    pub(super) fn starting(suspend: Instant, stop: Instant) -> Moments {
        Moments {
            suspend,
            stop,
            paused: stop,
            synced: stop,
            pages_sent: stop,
            state_saved: stop,
            commit_sent: stop,
        }
    }
}

/// What the destination said, on its clock, and how to read that clock.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) committed: Committed,
    pub(super) alive: Option<Alive>,
    /// How the destination's clock differs.
    pub(super) clock: ClockOffset,
}

impl Remote {
    fn here(&self, there_ns: u64) -> Instant {
        self.clock.from_peer(Instant(there_ns))
    }

    /// The destination's wall clock minus this host's. Each is given by how much it is ahead of the
    /// monotonic clock beside it.
    pub(super) fn wall_clock_difference(&self, here_ns: i64) -> Option<i64> {
        let there_ns = self.alive.as_ref()?.wall_clock_ns?;
        let difference = i128::from(there_ns) + i128::from(self.clock.ns) - i128::from(here_ns);
        i64::try_from(difference).ok()
    }

    fn loading(&self) -> Option<(Instant, Instant)> {
        let alive = self.alive.as_ref()?;
        Some((self.here(alive.load_begin_ns?), self.here(alive.load_end_ns?)))
    }

    pub(super) fn devices(&self) -> Option<&DevicesAlive> {
        self.alive.as_ref()?.devices.as_ref()
    }
}

/// The blackout part by part, as the source can tell.
pub(super) fn phases(moments: &Moments, remote: Option<&Remote>) -> Phases {
    let ready = remote.map(|remote| remote.here(remote.committed.ready_ns));
    let started = remote.map(|remote| remote.here(remote.committed.started_ns));
    Phases {
        pause: moments.paused.since(moments.stop),
        final_sync: moments.synced.since(moments.paused),
        final_pages: moments.pages_sent.since(moments.synced),
        cpu_state: moments.commit_sent.since(moments.pages_sent),
        commit: ready.map_or(Duration::ZERO, |ready| ready.since(moments.commit_sent)),
        start: ready.zip(started).map_or(Duration::ZERO, |(ready, started)| started.since(ready)),
    }
}

/// From the last vCPU's way out to the first one's way in.
pub(super) fn blackout(moments: &Moments, remote: &Remote) -> Duration {
    remote.here(remote.committed.started_ns).since(moments.paused)
}

/// What became of the devices.
pub(super) fn devices(moments: &Moments, remote: Option<&Remote>) -> Devices {
    let there = remote.and_then(Remote::devices);
    let resume = there.map(|it| it.resume_end_ns.saturating_sub(it.resume_begin_ns));
    Devices {
        suspend: moments.stop.since(moments.suspend),
        resume: resume.map(Duration::from_nanos),
        trouble: there.and_then(|it| it.trouble.clone()),
    }
}

/// The picture: one bar for each thing that happened.
pub(super) fn timeline(moments: &Moments, remote: Option<&Remote>) -> Vec<Span> {
    let zero = moments.stop;
    let span = |name, side, start: Instant, end: Instant| Span {
        name,
        side,
        start_us: micros_between(zero, start),
        end_us: micros_between(zero, end.max(start)),
    };
    let mut spans = Vec::with_capacity(10);
    spans.push(span("suspend devices", Side::Source, moments.suspend, moments.stop));
    spans.push(span("stop vCPUs", Side::Source, moments.stop, moments.paused));
    spans.push(span("read dirty log", Side::Source, moments.paused, moments.synced));
    spans.push(span("send last pages", Side::Source, moments.synced, moments.pages_sent));
    spans.push(span("save state", Side::Source, moments.paused, moments.state_saved));
    spans.push(span("send state, commit", Side::Source, moments.state_saved, moments.commit_sent));
    if let Some(remote) = remote {
        let [commit, ready, started] =
            [remote.committed.commit_ns, remote.committed.ready_ns, remote.committed.started_ns]
                .map(|ns| remote.here(ns));
        // The state is read before the commit behind it, and loaded at once.
        if let Some((begin, end)) = remote.loading() {
            spans.push(span("state travels", Side::Destination, moments.state_saved, begin));
            spans.push(span("load state", Side::Destination, begin, end));
        } else {
            spans.push(span("commit travels", Side::Destination, moments.commit_sent, commit));
        }
        spans.push(span("await last pages", Side::Destination, commit, ready));
        spans.push(span("start vCPUs", Side::Destination, ready, started));
        if let Some(devices) = remote.devices() {
            let (begin, end) = (devices.resume_begin_ns, devices.resume_end_ns);
            let (begin, end) = (remote.here(begin), remote.here(end));
            spans.push(span("resume devices", Side::Destination, begin, end));
        }
    }
    spans
}

fn micros_between(zero: Instant, moment: Instant) -> i64 {
    let micros = |later: Instant, earlier: Instant| {
        i64::try_from(later.since(earlier).as_micros()).unwrap_or(i64::MAX)
    };
    if moment >= zero { micros(moment, zero) } else { -micros(zero, moment) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_wire::control::Unused;

    fn moments() -> Moments {
        Moments {
            suspend: Instant(800_000),
            stop: Instant(1_000_000),
            paused: Instant(1_040_000),
            synced: Instant(1_050_000),
            pages_sent: Instant(1_080_000),
            state_saved: Instant(1_070_000),
            commit_sent: Instant(1_100_000),
        }
    }

    fn remote(offset_ns: i64, error: Duration) -> Remote {
        let there = |ns: u64| ns.saturating_add_signed(offset_ns);
        Remote {
            committed: Committed {
                commit_ns: there(1_130_000),
                ready_ns: there(1_200_000),
                started_ns: there(1_210_000),
            },
            alive: Some(Alive {
                cpu_ns: 0,
                load_begin_ns: Some(there(1_105_000)),
                load_end_ns: Some(there(1_125_000)),
                devices: Some(DevicesAlive {
                    resume_begin_ns: there(1_210_000),
                    resume_end_ns: there(1_500_000),
                    unused: Unused,
                    trouble: None,
                }),
                wall_clock_ns: None,
                observed: None,
            }),
            clock: ClockOffset { ns: offset_ns, error },
        }
    }

    #[test]
    fn the_blackout_is_from_out_to_in_whatever_the_clocks_say() {
        for offset_ns in [0, -777_000] {
            let remote = remote(offset_ns, Duration::from_micros(20));
            assert_eq!(blackout(&moments(), &remote), Duration::from_micros(170));
            let spans = timeline(&moments(), Some(&remote));
            assert_eq!((spans[0].start_us, spans[0].end_us), (-200, 0));
            assert_eq!(spans.last().map(|span| (span.start_us, span.end_us)), Some((210, 500)));
        }
    }

    #[test]
    fn wall_clocks_are_compared_over_the_clocks_beside_them() {
        let later = 590 * 1_000_000_000;
        // The destination booted 5 s after the source; its wall clock is 590 s ahead.
        let mut remote = remote(-5_000_000_000, Duration::from_micros(20));
        assert_eq!(remote.wall_clock_difference(100), None);
        remote.alive.as_mut().unwrap().wall_clock_ns = Some(100 + 5_000_000_000 + later);
        assert_eq!(remote.wall_clock_difference(100), Some(later));
        assert_eq!(remote.wall_clock_difference(100 + 2 * later), Some(-later));
    }

    #[test]
    fn devices_are_measured_on_each_side() {
        let known = devices(&moments(), Some(&remote(5, Duration::from_micros(20))));
        assert_eq!(known.suspend, Duration::from_micros(200));
        assert_eq!(known.resume, Some(Duration::from_micros(290)));
        assert_eq!(devices(&moments(), None).resume, None);
    }
}
