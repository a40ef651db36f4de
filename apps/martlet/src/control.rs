//! The state behind a control socket: a guest, or the wait for one; its migration; the wish to
//! end. Every command of the socket is a function here.

use crate::failure::one_line;
use crate::guest::{Attempt, Guest, Incoming, Listen};
use crate::qmp::events::{Event, EventBus, Narrator};
use crate::qmp::schema;
use martlet_engine::{MigrateOptions, Progress, ReceiveStatus, Status};
use martlet_guest_program::GuestCounters;
use martlet_machine::{EndCause, GuestStatus, MachineInfo};
use martlet_transport::Address;
use serde_json::{Map, Value, json};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often a migration is looked at for events. Its end is noticed at once. Longer than a
/// blackout, since a look during it takes a core from it.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How often a guest is looked at for having ended by itself.
const GUEST_LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long `quit` waits for a running migration to be cancelled.
const QUIT_CANCEL_MAX: Duration = Duration::from_secs(5);

/// Why a process ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QuitCause {
    /// `quit` on the control socket.
    Command,
    /// SIGINT or SIGTERM.
    Signal,
    /// The guest ended itself.
    Guest(EndCause),
}

impl QuitCause {
    fn event(&self) -> Event {
        let (guest, reason) = match self {
            QuitCause::Command => (false, "host-qmp-quit"),
            QuitCause::Signal => (false, "host-signal"),
            QuitCause::Guest(EndCause::Reset) => (true, "guest-reset"),
            QuitCause::Guest(EndCause::Shutdown) => (true, "guest-shutdown"),
            QuitCause::Guest(EndCause::Crash(_)) => (true, "guest-panic"),
        };
        Event::Shutdown { guest, reason }
    }
}

/// A migration away from here, running or over.
struct Outgoing {
    attempt: Arc<dyn Attempt>,
    narrator: Narrator,
    /// When its rounds began, from its start.
    setup: Option<Duration>,
}

#[derive(Default)]
struct State {
    guest: Option<Arc<dyn Guest>>,
    incoming: Option<Arc<dyn Incoming>>,
    outgoing: Option<Outgoing>,
    options: MigrateOptions,
    quit: Option<QuitCause>,
}

/// See the module.
pub(crate) struct Control {
    state: Mutex<State>,
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

    /// How the last migration away from here stands.
    fn outgoing_status(&self) -> Option<Status> {
        let attempt = self.lock().outgoing.as_ref().map(|o| Arc::clone(&o.attempt));
        attempt.map(|attempt| attempt.progress().status)
    }

    /// Whether the guest has left, or may have.
    fn refuse_if_gone(&self) -> Result<(), String> {
        match self.outgoing_status() {
            Some(Status::Completed) => Err("the guest has moved away".into()),
            Some(Status::Undecided) => {
                Err("it is undecided where the guest runs: settle that first (x-resolve)".into())
            }
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
            Some(Status::Completed) => return "postmigrate",
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
        let guest = self.guest()?;
        self.refuse_if_gone()?;
        let ran = guest.status() == GuestStatus::Running;
        guest.stop()?;
        if ran {
            self.events.send(&Event::Stop);
        }
        Ok(())
    }

    /// `cont`.
    pub(crate) fn cont(&self) -> Result<(), String> {
        let guest = self.guest()?;
        self.refuse_if_gone()?;
        let paused = guest.status() == GuestStatus::Paused;
        guest.cont()?;
        if paused {
            self.events.send(&Event::Resume);
        }
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
        spawn("guest watch", move || {
            loop {
                thread::sleep(GUEST_LOOK_INTERVAL);
                match guest.status() {
                    GuestStatus::Waiting
                    | GuestStatus::Running
                    | GuestStatus::Paused
                    | GuestStatus::Switchover => {}
                    GuestStatus::Ended(EndCause::Crash(reason)) => {
                        let reason = one_line(&reason);
                        crate::note(format_args!("the guest can't go on: {reason}"));
                        control.events.send(&Event::Stop);
                        return;
                    }
                    GuestStatus::Ended(cause) => {
                        crate::note(format_args!("the guest ended itself: {cause}"));
                        if cause == EndCause::Reset {
                            control.events.send(&Event::Reset);
                        }
                        control.request_quit(QuitCause::Guest(cause));
                        return;
                    }
                    GuestStatus::Gone => return,
                }
            }
        });
    }

    // --- moving it away ---

    /// `migrate`: returns at once.
    pub(crate) fn migrate(self: &Arc<Control>, to: &Address) -> Result<(), String> {
        let mut state = self.lock();
        let guest = state.guest.clone().ok_or("no guest has arrived here yet")?;
        match state.outgoing.as_ref().map(|o| o.attempt.progress().status) {
            Some(Status::Completed) => return Err("the guest has moved away".into()),
            Some(Status::Undecided) => {
                return Err("the last migration is undecided: settle it first (x-resolve)".into());
            }
            Some(Status::Setup | Status::Active | Status::Device | Status::Cancelling) => {
                return Err("a migration is running already".into());
            }
            Some(Status::Failed | Status::Cancelled) | None => {}
        }
        let running = match guest.status() {
            GuestStatus::Running => true,
            GuestStatus::Paused => false,
            GuestStatus::Ended(cause) => {
                return Err(format!("the guest has ended: {}", one_line(&cause.to_string())));
            }
            GuestStatus::Waiting | GuestStatus::Switchover | GuestStatus::Gone => {
                return Err("the guest is not here".into());
            }
        };
        let attempt = guest.migrate(to, state.options.clone());
        let attempt = attempt.map_err(|error| format!("the migration can't begin: {error}"))?;
        let narrator = Narrator::new(running);
        state.outgoing = Some(Outgoing { attempt: Arc::clone(&attempt), narrator, setup: None });
        drop(state);
        let control = Arc::clone(self);
        spawn("migration watch", move || {
            while !control.look(&attempt, &guest) {
                let _ = attempt.wait(LOOK_INTERVAL);
            }
        });
        Ok(())
    }

    /// Looks at a migration and tells clients what is new. Returns whether it is over.
    fn look(&self, attempt: &Arc<dyn Attempt>, guest: &Arc<dyn Guest>) -> bool {
        let progress = attempt.progress();
        let running = match progress.status {
            Status::Setup | Status::Active => paused_or_running(guest.as_ref()),
            // The machine is busy with the switchover: not to be asked.
            Status::Device
            | Status::Completed
            | Status::Failed
            | Status::Cancelling
            | Status::Cancelled
            | Status::Undecided => None,
        };
        let mut state = self.lock();
        if let Some(outgoing) = &mut state.outgoing
            && Arc::ptr_eq(&outgoing.attempt, attempt)
        {
            if outgoing.setup.is_none() && progress.status != Status::Setup {
                outgoing.setup = Some(progress.elapsed);
            }
            // Sent under the lock: two looks at once must not mix their events.
            for event in outgoing.narrator.look(&progress, running) {
                self.events.send(&event);
            }
        }
        drop(state);
        if let (true, Some(error)) = (progress.status.is_final(), &progress.error) {
            crate::note(format_args!("migration: {}", one_line(error)));
        }
        progress.status.is_final()
    }

    /// `migrate_cancel`: fine without a migration, as in QEMU.
    pub(crate) fn cancel(&self) {
        let attempt = self.lock().outgoing.as_ref().map(|o| Arc::clone(&o.attempt));
        if let Some(attempt) = attempt {
            attempt.cancel();
        }
    }

    /// `x-resolve`: what became of the last migration; if that is undecided, the destination is
    /// asked first, which may take as long as a connection takes to be refused.
    pub(crate) fn resolve(&self) -> Result<Value, String> {
        let guest = self.guest()?;
        let attempt = self.lock().outgoing.as_ref().map(|o| Arc::clone(&o.attempt));
        let Some(attempt) = attempt else { return Err("there was no migration".into()) };
        if !attempt.progress().status.is_final() {
            return Err("the migration is still under way".into());
        }
        let resolved = attempt.resolve();
        // Its end is told before this is answered.
        self.look(&attempt, &guest);
        let (status, reason) = match resolved {
            Ok(status) => (status, attempt.progress().error),
            Err(reason) => (Status::Undecided, Some(reason)),
        };
        Ok(schema::resolution(status, reason.as_deref()))
    }

    /// `migrate-set-parameters`: also changes a migration that runs, where it can be changed.
    pub(crate) fn set_parameters(&self, set: &schema::SetParameters) -> Result<(), String> {
        self.change_options(|options| set.apply(options))
    }

    /// `migrate-set-capabilities`.
    pub(crate) fn set_capabilities(&self, set: &schema::SetCapabilities) -> Result<(), String> {
        self.change_options(|options| set.apply(options))
    }

    fn change_options(
        &self,
        change: impl FnOnce(&mut MigrateOptions) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut state = self.lock();
        let before = state.options.clone();
        change(&mut state.options)?;
        let after = state.options.clone();
        let attempt = state.outgoing.as_ref().map(|o| Arc::clone(&o.attempt));
        drop(state);
        if let Some(attempt) = attempt.filter(|a| !a.progress().status.is_final()) {
            if before.downtime_limit != after.downtime_limit {
                attempt.set_downtime_limit(after.downtime_limit);
            }
            if before.bandwidth != after.bandwidth {
                attempt.set_bandwidth(after.bandwidth);
            }
        }
        Ok(())
    }

    /// What the next migration will be like.
    pub(crate) fn options(&self) -> MigrateOptions {
        self.lock().options.clone()
    }

    /// `query-migrate`: the way out if there was one, else the way in.
    pub(crate) fn migration_info(&self) -> Value {
        let state = self.lock();
        if let Some(outgoing) = &state.outgoing {
            let attempt = Arc::clone(&outgoing.attempt);
            let setup = outgoing.setup;
            drop(state);
            let progress: Progress = attempt.progress();
            let over = progress.status.is_final();
            let report = over.then(|| attempt.wait(Duration::ZERO)).flatten();
            return schema::migration_info(&progress, setup, report.as_ref());
        }
        let incoming = state.incoming.clone();
        let guest_is_here = state.guest.is_some();
        drop(state);
        incoming
            .map_or_else(|| json!({}), |incoming| incoming_info(incoming.as_ref(), guest_is_here))
    }

    // --- taking one in ---

    /// `migrate-incoming`: starts to wait for a guest at an address.
    pub(crate) fn receive(self: &Arc<Control>, at: &Address) -> Result<(), String> {
        let mut state = self.lock();
        if state.guest.is_some() {
            return Err("a guest is here already".into());
        }
        if let Some(incoming) = &state.incoming {
            return Err(format!("already waiting for a guest at {}", incoming.address()));
        }
        let listen = self.listen.clone().ok_or("this process does not take guests in")?;
        let incoming = listen.listen(at).map_err(|e| format!("cannot listen at {at}: {e}"))?;
        state.incoming = Some(Arc::clone(&incoming));
        drop(state);
        self.events.send(&Event::Migration("setup"));
        let control = Arc::clone(self);
        spawn("receiver watch", move || control.watch_incoming(incoming.as_ref()));
        Ok(())
    }

    fn watch_incoming(self: &Arc<Control>, incoming: &dyn Incoming) {
        let mut before = ReceiveStatus::Listening { last_error: None };
        loop {
            let now = incoming.wait(LOOK_INTERVAL);
            if now == before {
                continue;
            }
            match &now {
                ReceiveStatus::Listening { last_error } => {
                    let reason = last_error.as_deref().unwrap_or("the source went away");
                    let reason = one_line(reason);
                    crate::note(format_args!("a migration to here failed: {reason}; listening on"));
                    self.events.send(&Event::Migration("failed"));
                }
                ReceiveStatus::Active => self.events.send(&Event::Migration("active")),
                ReceiveStatus::Arrived => {
                    if before != ReceiveStatus::Active {
                        self.events.send(&Event::Migration("active"));
                    }
                    return self.welcome(incoming);
                }
                ReceiveStatus::Stopped => return,
            }
            before = now;
        }
    }

    fn welcome(self: &Arc<Control>, incoming: &dyn Incoming) {
        let Some(guest) = incoming.guest() else {
            crate::note(format_args!("a guest arrived, but its machine is not here: a defect"));
            return;
        };
        self.lock().guest = Some(Arc::clone(&guest));
        self.events.send(&Event::Migration("completed"));
        if guest.status() == GuestStatus::Running {
            self.events.send(&Event::Resume);
        }
        self.watch_guest(guest);
    }

    /// Where this process waits for a guest.
    pub(crate) fn incoming_address(&self) -> Option<Address> {
        self.lock().incoming.as_ref().map(|incoming| incoming.address())
    }

    // --- the end ---

    /// Asks the process to end. The first cause counts.
    pub(crate) fn request_quit(&self, cause: QuitCause) {
        self.lock().quit.get_or_insert(cause);
        self.quit.notify_all();
    }

    /// Waits until somebody wants the process to end, then ends what runs in it: a migration is
    /// cancelled if it can be, a receiver stops, the guest's vCPUs stop for good.
    pub(crate) fn wait_for_quit(&self) -> QuitCause {
        let mut state = self.lock();
        let cause = loop {
            if let Some(cause) = &state.quit {
                break cause.clone();
            }
            state = self.quit.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        let attempt = state.outgoing.as_ref().map(|o| Arc::clone(&o.attempt));
        let (incoming, guest) = (state.incoming.clone(), state.guest.clone());
        drop(state);
        if let Some(attempt) = attempt.filter(|a| !a.progress().status.is_final()) {
            attempt.cancel();
            let deadline = Instant::now() + QUIT_CANCEL_MAX;
            while attempt.wait(LOOK_INTERVAL).is_none() && Instant::now() < deadline {}
        }
        self.events.send(&cause.event());
        if let Some(incoming) = incoming {
            incoming.stop();
        }
        if let Some(guest) = guest {
            guest.quit();
        }
        cause
    }
}

/// Whether a guest runs, if that is up to its owner just now.
fn paused_or_running(guest: &dyn Guest) -> Option<bool> {
    match guest.status() {
        GuestStatus::Running => Some(true),
        GuestStatus::Paused => Some(false),
        GuestStatus::Waiting
        | GuestStatus::Switchover
        | GuestStatus::Ended(_)
        | GuestStatus::Gone => None,
    }
}

/// `query-migrate` at a destination.
fn incoming_info(incoming: &dyn Incoming, guest_is_here: bool) -> Value {
    let mut info = Map::new();
    let status = match incoming.status() {
        ReceiveStatus::Listening { last_error } => {
            if let Some(error) = last_error {
                info.insert("error-desc".to_owned(), one_line(&error).into());
            }
            "setup"
        }
        ReceiveStatus::Active => "active",
        // Whoever reads "completed" may ask for the guest next.
        ReceiveStatus::Arrived if !guest_is_here => "active",
        ReceiveStatus::Arrived => "completed",
        ReceiveStatus::Stopped => "cancelled",
    };
    info.insert("status".to_owned(), status.into());
    let address = schema::socket_address(&incoming.address());
    info.insert("socket-address".to_owned(), json!([address]));
    Value::Object(info)
}

/// A thread of the control socket's own. If the host has no more threads, that is logged: the
/// guest goes on, and clients miss events.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(body) {
        tracing::error!(name, %error, "cannot start a thread");
    }
}
