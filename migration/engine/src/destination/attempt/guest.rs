//! What an attempt does with the machine that waits for the guest.

use super::super::events::Event;
use super::{AWAKE_MAX, Attempt};
use crate::{LoadFor, RunState, host};
use martlet_protocol::{DestinationEvent, RunPermit};
use martlet_transport::monotonic_now;
use martlet_units::Instant;
use martlet_wire::control::{Alive, DEVICES_MAX, DevicesAlive};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// How long a guest may take to its first heartbeat before the source is told that it has none.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);

/// How long cards may take to their first frames behind that. A card with nothing to do has none.
const FRAMES_MAX: Duration = Duration::from_millis(100);

/// How often the first heartbeat is looked for: it is only reported, nobody waits for it.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(1);

impl Attempt {
    pub(super) fn load_state(&mut self, bytes: &[u8], what_for: LoadFor) {
        let Some(vmm) = &self.vmm else { return };
        let begin = monotonic_now();
        let loaded = vmm.load_state(bytes, what_for);
        let end = monotonic_now();
        self.loading = Some((begin, end));
        let event = match loaded {
            Ok(start) => DestinationEvent::StateLoaded {
                load_ns: nanos(end.since(begin)),
                start_ns: nanos(start),
            },
            Err(error) => DestinationEvent::LoadFailed { reason: error.to_line() },
        };
        self.tell(event);
    }

    /// The blackout is near: this thread and the vCPUs' stay awake.
    pub(super) fn arm(&mut self) {
        if let Some(vmm) = &self.vmm {
            vmm.arm(AWAKE_MAX);
        }
        if let Some(intake) = &self.intake {
            intake.take_over();
            self.awake_bytes = intake.bytes();
            self.awake_until = Some(monotonic_now().after(AWAKE_MAX));
        }
    }

    pub(super) fn fall_asleep(&mut self) {
        if self.awake_until.take().is_some()
            && let Some(intake) = &self.intake
        {
            intake.give_back();
        }
    }

    /// On a thread of its own: this one has to answer meanwhile.
    pub(super) fn digest(&mut self) {
        let Some(vmm) = &self.vmm else { return };
        let (ram, events) = (vmm.ram(), Arc::clone(&self.events));
        let computing = host::spawn("martlet-digest", move || {
            let digest = host::guarded(|| ram.digest().map_err(|error| error.to_string()));
            events.post(Event::Digested(digest.and_then(|digest| digest)));
        });
        if let Err(error) = computing {
            self.digest_failed(&error.to_string());
        }
    }

    pub(super) fn digest_failed(&mut self, error: &str) {
        let reason = format!("cannot digest guest memory: {error}");
        self.tell(DestinationEvent::LoadFailed { reason });
    }

    pub(super) fn start(&mut self, permit: RunPermit, running: bool) {
        let vmm = self.vmm.as_ref().expect("a start follows a successful build");
        let state = if running { RunState::Running } else { RunState::Paused };
        // Whatever a peer still sends, it must not land in the memory of a guest that runs.
        if let Some(intake) = &self.intake {
            intake.close();
        }
        // Before the call: once the vCPUs run, this thread may have to wait for a core.
        let now = monotonic_now();
        vmm.start(permit, state);
        self.tell(DestinationEvent::Started { at: now });
        // The channels stay taken over: nothing comes by them any more, and their threads, woken now,
        // would keep the vCPUs from running.
        self.awake_until = None;
        self.devices_wait = true;
        self.heartbeat_until = Some(if running { now.after(HEARTBEAT_MAX) } else { now });
    }

    /// Once the source knows that the guest runs. Blocks for some milliseconds: the cards of a
    /// running guest wait for nothing else.
    pub(super) fn resume_devices(&mut self) {
        if !std::mem::take(&mut self.devices_wait) {
            return;
        }
        let Some(vmm) = &self.vmm else { return };
        if vmm.devices() > 0 {
            // Whoever waits for the guest does not wait for them.
            self.show_fate();
        }
        let Some(vmm) = &self.vmm else { return };
        let begin = monotonic_now();
        let trouble = vmm.resume_devices().err().map(|error| error.to_line());
        if let Some(trouble) = &trouble {
            warn!(%trouble, "a device does not work here");
        }
        let cards = vmm.first_frames().len().min(DEVICES_MAX);
        if cards > 0 || trouble.is_some() {
            self.devices = Some(DevicesAlive {
                resume_begin_ns: begin.0,
                resume_end_ns: monotonic_now().0,
                first_frames_ns: vec![None; cards],
                trouble,
            });
        }
    }

    pub(super) fn look_for_heartbeat(&mut self, now: Instant) {
        let Some(until) = self.heartbeat_until else { return };
        let Some(vmm) = &self.vmm else { return };
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
        if heard_all || (first.is_some() && late) || now >= until {
            self.report_alive(first);
        }
    }

    pub(super) fn report_alive(&mut self, first: Option<Instant>) {
        self.heartbeat_until = None;
        let cpu = host::process_cpu().saturating_sub(self.cpu_before);
        let devices = self.devices.take();
        self.tell(DestinationEvent::Alive(Alive {
            first_heartbeat_ns: first.map(|moment| moment.0),
            cpu_ns: nanos(cpu),
            load_begin_ns: self.loading.map(|(begin, _)| begin.0),
            load_end_ns: self.loading.map(|(_, end)| end.0),
            devices,
            wall_clock_ns: Some(host::wall_clock_ns()),
        }));
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
