//! What the source does while the guest is stopped.

use super::{Driver, SETTLE};
use crate::Status;
use crate::source::events::Event;
use crate::source::switchover::Moments;
use crate::{RunState, host};
use martlet_protocol::{RunPermit, SourceEvent};
use martlet_transport::monotonic_now;
use std::sync::Arc;

impl Driver<'_> {
    pub(super) fn pause(&mut self) {
        // What was announced must be on its way before the guest stops.
        self.flush_control();
        if let Some(lanes) = &self.lanes {
            lanes.arm();
        }
        std::thread::sleep(SETTLE);
        self.shared.set_status(Status::Device);
        let suspend = monotonic_now();
        self.vmm.begin_suspend();
        if let Err(error) = self.vmm.wait_suspended() {
            return self.host_failed("cannot suspend the devices", &error);
        }
        // The vCPUs ran until here: devices take longer to stop.
        let mut moments = Moments::starting(suspend, monotonic_now());
        self.vmm.begin_pause();
        match self.vmm.wait_paused() {
            Ok(paused) => {
                moments.paused = monotonic_now();
                self.moments = Some(moments);
                // First of all: whatever goes wrong from here on, the machine has the permit.
                let running = paused.was == RunState::Running;
                self.tell(SourceEvent::Paused { permit: paused.permit, running });
                self.last_heartbeat = self.vmm.last_heartbeat();
                self.last_frames = self.vmm.last_frames();
            }
            Err(error) => self.host_failed("cannot stop the guest", &error),
        }
    }

    /// On a thread of its own: this one has to answer meanwhile.
    pub(super) fn compute_digest(&mut self) {
        let (ram, shared) = (Arc::clone(self.ram), Arc::clone(&self.shared));
        let computing = host::spawn("martlet-digest", move || {
            let digest = host::guarded(|| ram.digest());
            let digest = digest.map_err(std::io::Error::other).and_then(|digest| digest);
            shared.events.post(Event::Digested(digest));
        });
        if let Err(error) = computing {
            self.host_failed("cannot digest guest memory", &error);
        }
    }

    /// The guest goes on here.
    pub(super) fn resume(&mut self, permit: RunPermit, running: bool) {
        let is_over = self.machine.phase().is_over();
        if is_over {
            self.vmm.set_throttle(0);
        }
        let state = if running { RunState::Running } else { RunState::Paused };
        self.vmm.resume(permit, state);
        if let Some(lanes) = &self.lanes {
            lanes.disarm();
        }
        if is_over {
            self.last_run = None;
            // Takes milliseconds, so the guest does not wait for it.
            self.tracker = None;
        }
    }
}
