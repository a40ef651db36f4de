//! What is told of a guest that has arrived: its devices, and what its observer saw.

use super::io::{DestinationIo, HostNow};
use crate::vmm::observed;
use crate::{DestinationVmm, Error, Fault, RunState};
use core::task::Poll;
use core::time::Duration;
use martlet_units::Instant;
use martlet_wire::control::{Alive, DevicesAlive, Unused};
use tracing::warn;

/// How long the observer may take before the source is told that the guest lives.
const OBSERVING_MAX: Duration = Duration::from_secs(1);

/// How often it is asked: what it saw is only reported, nobody waits for it.
const OBSERVING_INTERVAL: Duration = Duration::from_millis(1);

/// How long devices may take to go on before they are said not to work: the source waits 2 s.
const RESUME_MAX: Duration = Duration::from_millis(1500);

/// What is measured of a guest's arrival.
#[derive(Debug)]
pub(super) struct Life {
    cpu_before: Duration,
    /// When the last loading of a state began and ended.
    loading: Option<(Instant, Instant)>,
    /// Set from the start until the source was told.
    observed_until: Option<Instant>,
    resume: Resume,
}

#[derive(Debug)]
enum Resume {
    /// The guest was not started, or just now.
    Due,
    Begun(Instant),
    Done(DevicesAlive),
}

impl Life {
    pub(super) fn new(host: HostNow) -> Life {
        Life { cpu_before: host.cpu, loading: None, observed_until: None, resume: Resume::Due }
    }

    pub(super) fn note_load(&mut self, begin: Instant, end: Instant) {
        self.loading = Some((begin, end));
    }

    /// The vCPUs run, or stay paused.
    pub(super) fn begin(&mut self, now: Instant, state: RunState) {
        self.observed_until = Some(match state {
            RunState::Running => now.after(OBSERVING_MAX),
            RunState::Paused => now,
        });
    }

    /// Tells the devices to go on, once the guest does.
    pub(super) fn resume_devices(&mut self, io: &impl DestinationIo, vmm: &dyn DestinationVmm) {
        if self.observed_until.is_some() {
            self.resume_started(io, vmm);
        }
    }

    /// As [`Life::resume_devices`], for a guest that is known to have been started. A call that
    /// panicked is not repeated.
    pub(super) fn resume_started(&mut self, io: &impl DestinationIo, vmm: &dyn DestinationVmm) {
        if matches!(self.resume, Resume::Due) {
            self.resume = Resume::Begun(io.now());
            vmm.begin_resume(&io.waker());
        }
    }

    fn await_devices(&mut self, io: &impl DestinationIo, vmm: &dyn DestinationVmm) {
        let Resume::Begun(begin) = self.resume else { return };
        let resumed = match vmm.poll_resumed() {
            Poll::Ready(resumed) => resumed,
            Poll::Pending if io.now() < begin.after(RESUME_MAX) => return,
            Poll::Pending => {
                let reason = format!("it took longer than {RESUME_MAX:?}");
                Err(Error::new(Fault::Device, "resume the devices", reason))
            }
        };
        let trouble = resumed.err().map(|error| error.to_line());
        if let Some(trouble) = &trouble {
            warn!(%trouble, "a device does not work here");
        }
        self.resume = Resume::Done(DevicesAlive {
            resume_begin_ns: begin.0,
            resume_end_ns: io.now().0,
            unused: Unused,
            trouble,
        });
    }

    /// When to look again at the latest.
    pub(super) fn look_at(&self, now: Instant) -> Option<Instant> {
        self.observed_until.map(|_| now.after(OBSERVING_INTERVAL))
    }

    /// What the source is to be told, once all of it is known or it takes too long.
    pub(super) fn look(
        &mut self,
        io: &impl DestinationIo,
        vmm: &dyn DestinationVmm,
    ) -> Option<Alive> {
        let until = self.observed_until?;
        self.await_devices(io, vmm);
        let Resume::Done(devices) = &self.resume else { return None };
        let observer = vmm.observer();
        if io.now() < until && observer.is_some_and(|observer| !observer.has_seen_all()) {
            return None;
        }
        self.observed_until = None;
        let host = io.host();
        Some(Alive {
            cpu_ns: nanos(host.cpu.saturating_sub(self.cpu_before)),
            load_begin_ns: self.loading.map(|(begin, _)| begin.0),
            load_end_ns: self.loading.map(|(_, end)| end.0),
            devices: Some(devices.clone()),
            wall_clock_ns: Some(host.wall_clock_ns),
            observed: observed(observer),
        })
    }
}

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
