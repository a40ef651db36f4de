//! A machine whose guest can be moved away.

use crate::clock;
use crate::devices::virtio::NicPages;
use crate::machine::{Control, Machine};
use crate::phase::{Event, Phase};
use crate::vcpu::lock;
use martlet_engine::{Error, Fault, GuestObserver, Paused, Rehearsal, RunState, SourceVmm};
use martlet_protocol::RunPermit;
use martlet_ram::{GuestRam, TrackError, Tracker};
use std::sync::Arc;
use std::task::{Poll, Waker};

fn failed(action: &'static str, reason: impl Into<String>) -> Error {
    Error::vmm(action, reason)
}

impl SourceVmm for Machine {
    fn machine_description(&self) -> Vec<u8> {
        self.description().encode()
    }

    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.memory.ram())
    }

    fn track(&self) -> Result<Tracker, TrackError> {
        let mut tracker = Tracker::lease(self.memory.ram())?;
        if !self.nics.is_empty() {
            self.nics.check_movable().map_err(|why| {
                TrackError::host("finding what devices write", std::io::Error::other(why))
            })?;
            // Logged before the vCPUs' writes are tracked.
            tracker = tracker.with(Box::new(NicPages::start(&self.nics, &self.memory)?));
        }
        let vcpus = self.vm.track()?;
        Ok(tracker.with(vcpus).with(Box::new(self.memory.written())))
    }

    fn rehearse(&self) -> Result<Option<Rehearsal>, Error> {
        const ACTION: &str = "rehearse the stop";
        let mut control = lock(&self.control);
        if !matches!(control.phase, Phase::Here(_) | Phase::Resetting(_)) {
            return Err(failed(ACTION, format!("the guest {}", control.phase.describe())));
        }
        // A wish to be reset that came since is carried out later: states are never run.
        if let Some(cause) = self.ended() {
            return Err(failed(ACTION, format!("the guest has ended ({cause})")));
        }
        let pause = self.group.begin_rehearsal();
        let begin = clock::now();
        control.is_saving = true;
        let state = self.collect(&mut control, true);
        let save = clock::now().since(begin);
        self.group.end_rehearsal();
        let state = state.map_err(|reason| failed(ACTION, reason))?;
        Ok(Some(Rehearsal { pause, save, state: state.encode() }))
    }

    fn set_throttle(&self, percent: u8) {
        if let Err(error) = self.group.set_throttle(percent) {
            tracing::warn!(%error, percent, "the guest could not be throttled");
        }
    }

    fn begin_suspend(&self, _: &Waker) {
        self.nics.begin_suspend();
    }

    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        let suspended = self.nics.poll_suspended();
        suspended.map_err(|why| Error::new(Fault::Device, "suspend the devices", why))
    }

    fn begin_pause(&self, wake: &Waker) {
        let mut control = lock(&self.control);
        control.stop_wanted = Some(wake.clone());
        self.begin_wanted_stop(&mut control);
        // Or there was no thread for the reset that it waits for, and there is none to come.
        if control.stop_wanted.is_some() && self.is_reset_asked() {
            self.group.ask_reset();
        }
    }

    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        const ACTION: &str = "stop the guest";
        let mut control = lock(&self.control);
        self.begin_wanted_stop(&mut control);
        if control.stop_wanted.is_some() {
            return Poll::Pending;
        }
        let Phase::Stopping(was) = control.phase else {
            self.let_devices_go();
            let error = failed(ACTION, format!("the guest {}", control.phase.describe()));
            return Poll::Ready(Err(error));
        };
        if control.is_withdrawn {
            self.let_devices_go();
            return Poll::Ready(Err(failed(ACTION, "an earlier stop is not over")));
        }
        if !self.group.are_out() {
            return Poll::Pending;
        }
        if let Some(cause) = self.ended() {
            self.go_on_here(&mut control, was);
            return Poll::Ready(Err(failed(ACTION, format!("the guest has ended ({cause})"))));
        }
        if self.is_reset_asked() {
            // Its wish would be lost on the way.
            control.stop_wanted = Some(self.group.waker());
            self.guest_goes_on_here(&mut control, was);
            return Poll::Pending;
        }
        let permit = self.permit_of_stopped(&mut control);
        control.step("stop it", Event::AllOut).expect("it was stopping");
        Poll::Ready(Ok(Paused { permit, was }))
    }

    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        const ACTION: &str = "save the guest's state";
        let mut control = lock(&self.control);
        if !matches!(control.phase, Phase::Switchover(_)) || !control.is_saving {
            let error = failed(ACTION, format!("the guest {}", control.phase.describe()));
            return Poll::Ready(Err(error));
        }
        if control.early.is_none() {
            control.early = Some(self.collect_early(false));
        }
        if !self.group.are_done() {
            return Poll::Pending;
        }
        let state = self.collect(&mut control, false);
        Poll::Ready(state.map(|it| it.encode()).map_err(|reason| failed(ACTION, reason)))
    }

    fn resume(&self, paused: Option<Paused>) {
        match paused {
            Some(Paused { permit, was }) => self.go_on_after(permit, was),
            None => self.withdraw_stop(),
        }
    }

    fn moved_away(&self) {
        let mut control = lock(&self.control);
        self.forget_saves(&mut control);
        match control.step("leave", Event::MovedAway) {
            Ok(_) => {
                self.endpoint.detach();
                self.group.end();
                // Takes a while, and nobody needs to wait for it.
                drop(control);
                self.nics.shut_down();
            }
            Err(error) => tracing::warn!(%error, "moved away out of order"),
        }
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        Some(self)
    }
}

impl Machine {
    /// Undoes a stop that was not answered yet, however late it is.
    fn withdraw_stop(&self) {
        let mut control = lock(&self.control);
        control.stop_wanted = None;
        if let Phase::Stopping(was) = control.phase {
            if self.group.are_out() {
                return self.go_on_here(&mut control, was);
            }
            control.is_withdrawn = true;
            drop(control);
            self.aside("late-stop", |machine| {
                machine.group.await_out();
                let mut control = lock(&machine.control);
                if let Phase::Stopping(was) = control.phase
                    && std::mem::take(&mut control.is_withdrawn)
                {
                    machine.go_on_here(&mut control, was);
                }
            });
        }
        self.let_devices_go();
    }

    fn go_on_after(&self, permit: RunPermit, state: RunState) {
        let mut control = lock(&self.control);
        self.forget_saves(&mut control);
        match control.step("resume it", Event::Resume(state)) {
            Ok(_) => {
                self.go_on(&mut control, permit, state);
                self.let_devices_go();
            }
            // The machine was quit meanwhile; the permit ends here.
            Err(error) => tracing::warn!(%error, "resumed too late"),
        }
    }

    /// Ends a switchover for the devices: they go on unless the owner's pause keeps them. Nobody
    /// waits for that.
    fn let_devices_go(&self) {
        self.nics.end_switchover();
        if self.nics.is_empty() {
            return;
        }
        self.aside("devices", |machine| {
            if let Err(error) = machine.nics.settle() {
                tracing::error!(%error, "a device does not work any more");
            }
        });
    }

    /// Begins a stop that is wanted, unless the guest is being reset or about to be.
    fn begin_wanted_stop(&self, control: &mut Control) {
        let is_reset = match control.phase {
            Phase::Resetting(_) => true,
            Phase::Here(_) => self.is_reset_asked() && self.can_reset(),
            Phase::Waiting | Phase::Stopping(_) | Phase::Switchover(_) | Phase::Gone => false,
        };
        if is_reset {
            return;
        }
        if let Some(wake) = control.stop_wanted.take()
            && control.step("stop it", Event::BeginPause).is_ok()
        {
            control.is_saving = true;
            self.group.begin_save(Some(wake));
        }
    }

    /// The guest was told to stop, all vCPUs are out, and it goes on here as it was.
    fn go_on_here(&self, control: &mut Control, was: RunState) {
        self.guest_goes_on_here(control, was);
        self.let_devices_go();
    }

    /// The same for all but its devices.
    fn guest_goes_on_here(&self, control: &mut Control, was: RunState) {
        self.forget_saves(control);
        let permit = self.permit_of_stopped(control);
        control.step("go on", Event::CannotLeave).expect("it was stopping");
        self.go_on(control, permit, was);
        if self.is_reset_asked() {
            self.group.ask_reset();
        }
    }

    fn permit_of_stopped(&self, control: &mut Control) -> RunPermit {
        let from_vcpus = self.group.wait_out();
        let permit = from_vcpus.or_else(|| control.permit.take());
        permit.expect("the permit of a guest that is here")
    }
}
