//! Suspend and resume, in steps.

use super::{Control, Mlx5Device};
use crate::batch::Batch;
use crate::command::{CommandError, Output, Request};
use crate::firmware::Firmware;
use crate::options::{LinkNotifier, UNREGISTER_WAIT};
use crate::queues::{DeviceEvent, DeviceState, Faults, Starting, Stopping, Target};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::setup::{QueryVportStateOut, VportIn};
use martlet_units::Instant;
use martlet_vdpa::VdpaError;

/// What is going on.
pub(super) enum Operation {
    /// The link's notifier is being unregistered, as it was done once.
    Unregister { until: Instant },
    /// Queues are being stopped.
    Stop(Box<Stopping>),
    /// Not all could be stopped: the others are started again.
    RollBack { starting: Box<Starting>, faults: Faults },
    /// Queues are being started, and the link is asked after meanwhile.
    Start { starting: Box<Starting>, link: Box<Batch>, faults: Option<Faults> },
}

/// Says what link there is: a query of the vport, which takes no permit from the queues.
fn link_request() -> Request {
    let opcode = Opcode::QUERY_VPORT_STATE;
    Request::new::<QueryVportStateOut>(opcode, &VportIn::own(opcode))
}

fn link_of(result: &Result<Output, CommandError>) -> Option<bool> {
    result.as_ref().ok()?.read::<QueryVportStateOut>().ok().map(|state| state.is_up())
}

/// Whether the link is up; `None` if the device does not say.
pub(super) fn query_link(firmware: &Firmware) -> Option<bool> {
    link_of(&firmware.call(firmware.options().deadlines.queues, link_request()))
}

impl Mlx5Device {
    pub(super) fn begin_suspending(&self, control: &mut Control) -> Result<(), VdpaError> {
        control.check(DeviceEvent::BeginSuspend, "suspend")?;
        self.check_there("suspend")?;
        control.check_stopped("suspend")?;
        // From here on events about the link are swallowed.
        control.change(DeviceEvent::BeginSuspend);
        control.operation = Some(match self.firmware.options().link_notifier {
            LinkNotifier::Kept => self.begin_stopping(control),
            LinkNotifier::Unregistered => {
                Operation::Unregister { until: self.firmware.now().after(UNREGISTER_WAIT) }
            }
        });
        // The first commands are on their way before this returns.
        control.outcome = self.step_suspend(control);
        Ok(())
    }

    fn begin_stopping(&self, control: &mut Control) -> Operation {
        let stopping = Stopping::of_device(&self.firmware, &control.queues, &self.guest);
        Operation::Stop(Box::new(stopping))
    }

    /// Moves a suspend on.
    fn step_suspend(&self, control: &mut Control) -> Option<Result<(), VdpaError>> {
        loop {
            match control.operation.take()? {
                Operation::Unregister { until } => {
                    self.firmware.service();
                    if self.firmware.now() < until {
                        control.operation = Some(Operation::Unregister { until });
                        return None;
                    }
                    control.operation = Some(self.begin_stopping(control));
                }
                Operation::Stop(mut stopping) => {
                    match stopping.poll(&self.firmware, &mut control.queues) {
                        None => {
                            control.operation = Some(Operation::Stop(stopping));
                            return None;
                        }
                        Some(faults) if faults.is_empty() => {
                            control.change(DeviceEvent::Stopped);
                            return Some(Ok(()));
                        }
                        Some(faults) => {
                            let active = control.queues.active();
                            let starting = Box::new(Starting::begin(&active, Target::Running));
                            control.operation = Some(Operation::RollBack { starting, faults });
                        }
                    }
                }
                Operation::RollBack { mut starting, mut faults } => {
                    let rolled = starting.poll(&self.firmware, &mut control.queues, &self.guest);
                    let Some(more) = rolled else {
                        control.operation = Some(Operation::RollBack { starting, faults });
                        return None;
                    };
                    if !more.is_empty() {
                        self.firmware.taint();
                    }
                    faults.extend(more);
                    control.change(DeviceEvent::RolledBack);
                    return Some(Err(faults.into_error("suspend")));
                }
                operation @ Operation::Start { .. } => {
                    control.operation = Some(operation);
                    return None;
                }
            }
        }
    }

    pub(super) fn poll_suspending(&self, control: &mut Control) -> Option<Result<(), VdpaError>> {
        if let Some(outcome) = control.outcome.take() {
            return Some(outcome);
        }
        match control.state {
            DeviceState::Suspending => self.step_suspend(control),
            _ => Some(Err(control.wrong_state("suspend"))),
        }
    }

    pub(super) fn begin_resuming(&self, control: &mut Control) -> Result<(), VdpaError> {
        control.check(DeviceEvent::BeginResume, "resume")?;
        self.check_there("resume")?;
        if control.queues.map.is_none() {
            let reason = "it has no memory map".to_owned();
            return Err(VdpaError::Invalid { action: "resume", reason });
        }
        control.change(DeviceEvent::BeginResume);
        self.guest.restart();
        // What the link did in between is in the state that is asked for now.
        control.link_seen = self.firmware.link_events();
        let starting = Box::new(Starting::begin(&control.queues.active(), Target::Running));
        let mut link = Box::new(Batch::new(1, self.firmware.options().deadlines.queues));
        link.push(link_request());
        control.operation = Some(Operation::Start { starting, link, faults: None });
        control.outcome = self.step_resume(control);
        Ok(())
    }

    /// Moves a resume on.
    fn step_resume(&self, control: &mut Control) -> Option<Result<(), VdpaError>> {
        let Some(Operation::Start { starting, link, faults }) = &mut control.operation else {
            return None;
        };
        // The queues first: their commands are what the guest waits for.
        if faults.is_none() {
            *faults = starting.poll(&self.firmware, &mut control.queues, &self.guest);
        }
        let is_known = self.firmware.poll(link);
        let faults = faults.take_if(|_| is_known)?;
        let is_up = link.result(0).and_then(link_of);
        control.operation = None;
        control.change(DeviceEvent::Resumed);
        if let Some(up) = is_up {
            self.guest.set_link(up);
        }
        // Once, always: whatever was swallowed is made up for.
        self.guest.config_has_changed();
        if faults.is_empty() {
            return Some(Ok(()));
        }
        self.firmware.taint();
        Some(Err(faults.into_error("resume")))
    }

    pub(super) fn poll_resuming(&self, control: &mut Control) -> Option<Result<(), VdpaError>> {
        if let Some(outcome) = control.outcome.take() {
            return Some(outcome);
        }
        match control.state {
            DeviceState::Resuming => self.step_resume(control),
            _ => Some(Err(control.wrong_state("resume"))),
        }
    }

    /// Waits until a suspend or a resume that was begun is over, however.
    pub(super) fn settle(&self, control: &mut Control) {
        control.outcome = None;
        loop {
            let over = match control.state {
                DeviceState::Suspending => self.step_suspend(control).is_some(),
                DeviceState::Resuming => self.step_resume(control).is_some(),
                DeviceState::Idle
                | DeviceState::Prepared
                | DeviceState::Running
                | DeviceState::Suspended => true,
            };
            if over {
                return;
            }
            self.firmware.wait_until(None);
        }
    }

    /// Publishes the link's state if it has changed, unless the device stands.
    pub(super) fn service_link(&self, control: &mut Control) {
        use DeviceState as S;
        if matches!(control.state, S::Suspending | S::Suspended | S::Resuming) {
            return;
        }
        let events = self.firmware.link_events();
        if events == control.link_seen {
            return;
        }
        control.link_seen = events;
        if let Some(up) = query_link(&self.firmware)
            && self.guest.set_link(up)
        {
            self.guest.config_has_changed();
        }
    }
}
