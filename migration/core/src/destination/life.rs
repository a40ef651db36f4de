//! What is told of a guest that has arrived: its first sign of life, and its devices.

use super::io::{DestinationIo, HostNow};
use crate::{DestinationVmm, RunState};
use core::mem;
use core::time::Duration;
use martlet_units::Instant;
use martlet_wire::control::{Alive, DEVICES_MAX, DevicesAlive};
use tracing::warn;

/// How long a guest may take to its first heartbeat before the source is told that it has none.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);

/// How long cards may take to their first frames behind that. A card with nothing to do has none.
const FRAMES_MAX: Duration = Duration::from_millis(100);

/// How often the first heartbeat is looked for: it is only reported, nobody waits for it.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(1);

/// What is measured of a guest's arrival.
#[derive(Debug)]
pub(super) struct Life {
    cpu_before: Duration,
    /// When the last loading of a state began and ended.
    loading: Option<(Instant, Instant)>,
    /// Set while the first heartbeat, and the first frame of each network card, are looked for.
    heartbeat_until: Option<Instant>,
    /// The guest was started and its devices were not.
    devices_wait: bool,
    devices: Option<DevicesAlive>,
}

impl Life {
    pub(super) fn new(host: HostNow) -> Life {
        Life {
            cpu_before: host.cpu,
            loading: None,
            heartbeat_until: None,
            devices_wait: false,
            devices: None,
        }
    }

    pub(super) fn note_load(&mut self, begin: Instant, end: Instant) {
        self.loading = Some((begin, end));
    }

    /// The vCPUs run, or stay paused.
    pub(super) fn begin(&mut self, now: Instant, state: RunState) {
        self.devices_wait = true;
        self.heartbeat_until = Some(match state {
            RunState::Running => now.after(HEARTBEAT_MAX),
            RunState::Paused => now,
        });
    }

    /// Whether [`Life::resume_devices`] will take its time.
    pub(super) fn waits_for_devices(&self, vmm: &dyn DestinationVmm) -> bool {
        self.devices_wait && vmm.devices() > 0
    }

    /// Blocks for some milliseconds: the cards of a running guest wait for nothing else.
    pub(super) fn resume_devices(&mut self, io: &impl DestinationIo, vmm: &dyn DestinationVmm) {
        if !mem::take(&mut self.devices_wait) {
            return;
        }
        let begin = io.now();
        let trouble = vmm.resume_devices().err().map(|error| error.to_line());
        if let Some(trouble) = &trouble {
            warn!(%trouble, "a device does not work here");
        }
        let cards = vmm.first_frames().len().min(DEVICES_MAX);
        if cards > 0 || trouble.is_some() {
            self.devices = Some(DevicesAlive {
                resume_begin_ns: begin.0,
                resume_end_ns: io.now().0,
                first_frames_ns: vec![None; cards],
                trouble,
            });
        }
    }

    /// When to look again at the latest.
    pub(super) fn look_at(&self, now: Instant) -> Option<Instant> {
        self.heartbeat_until.map(|_| now.after(HEARTBEAT_INTERVAL))
    }

    /// What the source is to be told, once all of it is known or it takes too long.
    pub(super) fn look(
        &mut self,
        io: &impl DestinationIo,
        vmm: &dyn DestinationVmm,
    ) -> Option<Alive> {
        let until = self.heartbeat_until.filter(|_| !self.devices_wait)?;
        let now = io.now();
        let first = vmm.first_heartbeat();
        let mut heard_all = first.is_some();
        // The heartbeat is worth a long wait, frames are not.
        let frames_until = self.devices.as_ref().map(|devices| devices.resume_end_ns);
        let late = frames_until.is_some_and(|end| now >= Instant(end).after(FRAMES_MAX));
        if let Some(devices) = &mut self.devices {
            for (known, frame) in devices.first_frames_ns.iter_mut().zip(vmm.first_frames()) {
                *known = frame.map(|moment| moment.0);
                heard_all &= frame.is_some();
            }
        }
        if !(heard_all || (first.is_some() && late) || now >= until) {
            return None;
        }
        self.heartbeat_until = None;
        let host = io.host();
        Some(Alive {
            first_heartbeat_ns: first.map(|moment| moment.0),
            cpu_ns: nanos(host.cpu.saturating_sub(self.cpu_before)),
            load_begin_ns: self.loading.map(|(begin, _)| begin.0),
            load_end_ns: self.loading.map(|(_, end)| end.0),
            devices: self.devices.take(),
            wall_clock_ns: Some(host.wall_clock_ns),
        })
    }
}

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
