//! What the source does while the guest is stopped.

use super::{Driver, Kind, LAST_PAGES_INLINE_MAX, SETTLE};
use crate::report::Status;
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
                self.last_heartbeat = self.vmm.last_heartbeat();
                self.last_frames = self.vmm.last_frames();
                let running = paused.was == RunState::Running;
                self.tell(SourceEvent::Paused { permit: paused.permit, running });
            }
            Err(error) => self.host_failed("cannot stop the guest", &error),
        }
    }

    /// The final sync and the last pages, while the vCPUs save their state.
    pub(super) fn run_last_round(&mut self, number: u32) {
        let (Some(tracker), Some(lanes)) = (&mut self.tracker, &self.lanes) else { return };
        if let Err(error) = tracker.sync(&self.dirty) {
            return self.host_failed("cannot track dirty pages", &error);
        }
        let synced = monotonic_now();
        if let Some(moments) = &mut self.moments {
            moments.synced = synced;
        }
        let pages = self.dirty.count();
        if pages > LAST_PAGES_INLINE_MAX {
            self.pacer.set_rate(monotonic_now(), None);
            lanes.disarm();
            return self.open_round(number, Kind::Last);
        }
        self.rounds = number + 1;
        self.last_chunks.clear();
        while let Some(chunk) = self.scanner.next_last() {
            self.last_chunks.push(chunk);
        }
        match lanes.send_now(&mut self.batch, &self.last_chunks, number) {
            Ok(()) => self.end_last_round(number),
            Err(error) => self.on_own_event(Event::of_lane("a data channel broke", &error)),
        }
    }

    /// All of the last pages are in the channels, with the barriers behind them. The destination
    /// starts nothing before it has read those.
    pub(super) fn end_last_round(&mut self, number: u32) {
        if let Some(moments) = &mut self.moments {
            moments.pages_sent = monotonic_now();
        }
        self.tell(SourceEvent::LastRoundSent { round: number });
    }

    pub(super) fn save_state(&mut self) {
        match self.vmm.take_state() {
            Ok(bytes) => {
                if let Some(moments) = &mut self.moments {
                    moments.state_saved = monotonic_now();
                }
                // The commit comes next. A destination that is known to be gone must not get it:
                // nobody could say later that it had not.
                self.read_control();
                self.tell(SourceEvent::StateSaved { bytes });
            }
            Err(error) => self.host_failed("cannot save the state", &error),
        }
    }

    /// On a thread of its own: this one has to answer meanwhile.
    pub(super) fn compute_digest(&mut self) {
        let (ram, shared) = (Arc::clone(self.ram), Arc::clone(&self.shared));
        let computing = host::spawn("martlet-digest", move || {
            shared.events.post(Event::Digested(ram.digest()));
        });
        if let Err(error) = computing {
            self.host_failed("cannot digest guest memory", &error);
        }
    }

    /// The guest goes on here.
    pub(super) fn resume(&mut self, permit: RunPermit, running: bool) {
        self.vmm.set_throttle(0);
        let state = if running { RunState::Running } else { RunState::Paused };
        self.vmm.resume(permit, state);
        if let Some(lanes) = &self.lanes {
            lanes.disarm();
        }
        // Takes milliseconds, so the guest does not wait for it.
        self.tracker = None;
    }
}
