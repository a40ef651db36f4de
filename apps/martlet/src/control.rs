//! The state behind a control socket: a guest, or the wait for one; its migration; the wish to
//! end. Every command of the socket is a function here. Nothing that can wait is done under the
//! state's lock, and what is refused changes nothing: check and act are one step under it.

mod incoming;
mod outgoing;
mod quit;

pub(crate) use quit::QuitCause;

use crate::failure::one_line;
use crate::guest::{Guest, Listen};
use crate::qmp::events::{Event, EventBus};
use incoming::Place;
use martlet_engine::{MigrateOptions, Status};
use martlet_guest_program::GuestCounters;
use martlet_machine::{EndCause, GuestStatus, MachineInfo};
use outgoing::Outgoing;
pub(crate) use outgoing::Verdict;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How often a migration is looked at for events. Its end is noticed at once. Longer than a
/// blackout, since a look during it takes a core from it.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How often a guest is looked at for having ended by itself.
const GUEST_LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// After a panic, so that one that comes again and again does not fill the log.
const PANIC_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    guest: Option<Arc<dyn Guest>>,
    incoming: Option<Place>,
    outgoing: Option<Outgoing>,
    options: MigrateOptions,
    quit: quit::State,
}

/// See the module.
pub(crate) struct Control {
    state: Mutex<State>,
    /// There is a wish to end.
    quit: Condvar,
    listen: Option<Arc<dyn Listen>>,
    events: EventBus,
}

impl Control {
    /// For a process that has its guest.
    pub(crate) fn with_guest(guest: Arc<dyn Guest>) -> Arc<Control> {
        let control = Control::new(None);
        control.lock().guest = Some(Arc::clone(&guest));
        control.watch_guest(guest);
        control
    }

    /// For a process that waits for a guest, once it was told where.
    pub(crate) fn waiting(listen: Arc<dyn Listen>) -> Arc<Control> {
        Control::new(Some(listen))
    }

    fn new(listen: Option<Arc<dyn Listen>>) -> Arc<Control> {
        Arc::new(Control {
            state: Mutex::default(),
            quit: Condvar::new(),
            listen,
            events: EventBus::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Fields are set whole, so a thread that panicked left nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where clients subscribe.
    pub(crate) fn events(&self) -> &EventBus {
        &self.events
    }

    fn guest(&self) -> Result<Arc<dyn Guest>, String> {
        self.lock().guest.clone().ok_or_else(|| "no guest has arrived here yet".to_owned())
    }

    /// Whether the guest has left, or may have.
    fn refuse_if_gone(&self) -> Result<(), String> {
        match self.outgoing_status() {
            Some(Status::Completed) => Err("the guest has moved away".into()),
            Some(Status::Undecided) => {
                Err("it is undecided where the guest runs: settle that first (x-resolve)".into())
            }
            Some(Status::GivenUp) => Err("the guest was given up here".into()),
            Some(Status::Device) => Err("the guest is in its switchover".into()),
            Some(
                Status::Setup
                | Status::Active
                | Status::Failed
                | Status::Cancelling
                | Status::Cancelled,
            )
            | None => Ok(()),
        }
    }

    // --- the guest ---

    /// `query-status`: QEMU's `RunState`.
    pub(crate) fn run_state(&self) -> &'static str {
        let Ok(guest) = self.guest() else { return "inmigrate" };
        match self.outgoing_status() {
            Some(Status::Completed | Status::GivenUp) => return "postmigrate",
            Some(Status::Device | Status::Undecided) => return "finish-migrate",
            Some(
                Status::Setup
                | Status::Active
                | Status::Failed
                | Status::Cancelling
                | Status::Cancelled,
            )
            | None => {}
        }
        match guest.status() {
            GuestStatus::Running => "running",
            GuestStatus::Paused => "paused",
            GuestStatus::Waiting => "inmigrate",
            GuestStatus::Switchover => "finish-migrate",
            GuestStatus::Ended(EndCause::Crash(_)) => "internal-error",
            GuestStatus::Ended(EndCause::Reset | EndCause::Shutdown) | GuestStatus::Gone => {
                "shutdown"
            }
        }
    }

    /// Why the guest can't go on, if it can't.
    pub(crate) fn crash_reason(&self) -> Option<String> {
        match self.guest().ok()?.status() {
            GuestStatus::Ended(EndCause::Crash(reason)) => Some(one_line(&reason)),
            GuestStatus::Ended(EndCause::Reset | EndCause::Shutdown)
            | GuestStatus::Waiting
            | GuestStatus::Running
            | GuestStatus::Paused
            | GuestStatus::Switchover
            | GuestStatus::Gone => None,
        }
    }

    /// `stop`.
    pub(crate) fn stop(&self) -> Result<(), String> {
        self.told_once(&GuestStatus::Running, |guest| guest.stop(), &Event::Stop)
    }

    /// `cont`.
    pub(crate) fn cont(&self) -> Result<(), String> {
        self.told_once(&GuestStatus::Paused, |guest| guest.cont(), &Event::Resume)
    }

    /// Does something to the guest; that is an event if it was so before.
    fn told_once(
        &self,
        before: &GuestStatus,
        act: impl FnOnce(&dyn Guest) -> Result<(), String>,
        event: &Event,
    ) -> Result<(), String> {
        let guest = self.guest()?;
        self.refuse_if_gone()?;
        let is_new = guest.status() == *before;
        act(guest.as_ref())?;
        if is_new {
            self.events.send(event);
        }
        Ok(())
    }

    /// `system_reset`.
    pub(crate) fn reset(&self) -> Result<(), String> {
        let guest = self.guest()?;
        self.refuse_if_gone()?;
        guest.reset()
    }

    /// `system_powerdown`.
    pub(crate) fn power_down(&self) -> Result<(), String> {
        let guest = self.guest()?;
        self.refuse_if_gone()?;
        guest.press_power_button()?;
        self.events.send(&Event::PowerDown);
        Ok(())
    }

    /// What the guest is made of.
    pub(crate) fn info(&self) -> Result<MachineInfo, String> {
        Ok(self.guest()?.info())
    }

    /// What the guest says of itself.
    pub(crate) fn check(&self) -> Result<Option<GuestCounters>, String> {
        Ok(self.guest()?.check())
    }

    fn watch_guest(self: &Arc<Control>, guest: Arc<dyn Guest>) {
        let control = Arc::clone(self);
        let mut told = guest.resets();
        keep("guest watch", move || {
            loop {
                thread::sleep(GUEST_LOOK_INTERVAL);
                let resets = guest.resets();
                if resets.0 > told.0 {
                    crate::log::note(format_args!("the guest was reset, as it asked"));
                    control.events.send(&Event::Reset { guest: true });
                }
                if resets.1 > told.1 {
                    control.events.send(&Event::Reset { guest: false });
                }
                told = resets;
                match guest.status() {
                    GuestStatus::Waiting
                    | GuestStatus::Running
                    | GuestStatus::Paused
                    | GuestStatus::Switchover => {}
                    GuestStatus::Ended(EndCause::Crash(reason)) => {
                        let reason = one_line(&reason);
                        crate::log::note(format_args!("the guest can't go on: {reason}"));
                        control.events.send(&Event::Stop);
                        return;
                    }
                    GuestStatus::Ended(cause) => {
                        crate::log::note(format_args!("the guest has ended: {cause}"));
                        if cause == EndCause::Reset {
                            control.events.send(&Event::Reset { guest: true });
                        }
                        control.guest_ended(cause);
                        return;
                    }
                    GuestStatus::Gone => return,
                }
            }
        });
    }
}

/// As [`spawn`], for a body that somebody relies on for as long as this process lives: one that
/// panics begins again.
pub(crate) fn keep(name: &'static str, mut body: impl FnMut() + Send + 'static) {
    spawn(name, move || {
        while guarded(name, &mut body).is_none() {
            thread::sleep(PANIC_PAUSE);
        }
    });
}

/// Runs what may panic; `None` if it did, which is said. What it works on is whole all the same:
/// it is behind locks, under which nothing is left half done.
pub(crate) fn guarded<T>(name: &str, body: impl FnOnce() -> T) -> Option<T> {
    let caught = catch_unwind(AssertUnwindSafe(body));
    if caught.is_err() {
        crate::log::note(format_args!("a defect: the thread \"{name}\" panicked, and goes on"));
    }
    caught.ok()
}

/// A thread of the control socket's own. If the host has no more threads, that is logged: the
/// guest goes on, and clients miss events.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(body) {
        tracing::error!(name, %error, "cannot start a thread");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeGuest;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_watch_that_panicked_still_sees_the_guests_end() {
        let guest = FakeGuest::new();
        guest.looks_that_panic.store(1, Ordering::Relaxed);
        *guest.state.lock().unwrap() = GuestStatus::Ended(EndCause::Shutdown);
        let control = Control::with_guest(guest);
        let end = control.wait_for_quit().unwrap();
        assert_eq!(end, QuitCause::Guest(EndCause::Shutdown));
    }
}
