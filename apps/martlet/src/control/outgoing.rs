//! Moving the guest away, and what became of that.

use super::incoming::incoming_info;
use super::{Control, LOOK_INTERVAL, State, keep};
use crate::failure::one_line;
use crate::guest::{Attempt, Guest};
use crate::qmp::events::Narrator;
use crate::qmp::schema;
use martlet_engine::{MigrateOptions, OperatorOverride, OperatorsWord, Status};
use martlet_machine::GuestStatus;
use martlet_transport::Address;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// A migration away from here, running or over.
pub(super) struct Outgoing {
    pub(super) attempt: Arc<dyn Attempt>,
    narrator: Narrator,
    /// When its rounds began, from its start.
    setup: Option<Duration>,
}

/// What an operator makes of an undecided migration whose destination is gone for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    RunHere,
    GiveUp,
}

impl Verdict {
    /// What follows, and what whoever wants it must know to be true.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Verdict::RunHere => {
                "the guest runs here again. That is right only if its destination does not run it \
                 and never will: that host is off, or cut off from all disks and networks of the \
                 guest. If it is wrong, two copies of the guest run and damage what they share"
            }
            Verdict::GiveUp => {
                "the guest never runs here again, and its memory here is dropped. That is right \
                 only if it runs at its destination, or if nobody needs it any more. If it is \
                 wrong, the guest is lost"
            }
        }
    }

    fn into_override(self) -> OperatorOverride {
        let word = OperatorsWord::given_by_a_person();
        match self {
            Verdict::RunHere => OperatorOverride::RunHere(word),
            Verdict::GiveUp => OperatorOverride::GiveUp(word),
        }
    }
}

impl State {
    /// The last migration away from here.
    pub(super) fn attempt(&self) -> Option<Arc<dyn Attempt>> {
        self.outgoing.as_ref().map(|outgoing| Arc::clone(&outgoing.attempt))
    }

    fn refuse_to_migrate(&self) -> Result<(), String> {
        self.quit.refuse_if_ending()?;
        match self.outgoing.as_ref().map(|o| o.attempt.progress().status) {
            Some(Status::Completed) => Err("the guest has moved away".into()),
            Some(Status::Undecided) => {
                Err("the last migration is undecided: settle it first (x-resolve)".into())
            }
            Some(Status::Setup | Status::Active | Status::Device | Status::Cancelling) => {
                Err("a migration is running already".into())
            }
            Some(Status::GivenUp) => Err("the guest was given up here".into()),
            Some(Status::Failed | Status::Cancelled) | None => Ok(()),
        }
    }
}

impl Control {
    /// How the last migration away from here stands.
    pub(super) fn outgoing_status(&self) -> Option<Status> {
        let attempt = self.lock().attempt();
        attempt.map(|attempt| attempt.progress().status)
    }

    /// `migrate`: changes the options, then starts with them and returns at once. If it is refused,
    /// nothing has changed.
    pub(crate) fn migrate(
        self: &Arc<Control>,
        to: &Address,
        change: impl FnOnce(&mut MigrateOptions),
    ) -> Result<(), String> {
        let guest = self.guest()?;
        // Before the lock: a machine in its switchover takes a moment to answer.
        let stands = guest.status();
        let mut state = self.lock();
        state.refuse_to_migrate()?;
        let running = runs_or_is_paused(&stands)?;
        let mut options = state.options.clone();
        change(&mut options);
        let attempt = guest.migrate(to, options.clone());
        let attempt = attempt.map_err(|error| format!("the migration can't begin: {error}"))?;
        let narrator = Narrator::new(running);
        state.options = options;
        state.quit.forget_refusal();
        state.outgoing = Some(Outgoing { attempt: Arc::clone(&attempt), narrator, setup: None });
        drop(state);
        let control = Arc::clone(self);
        keep("migration watch", move || {
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
            | Status::Undecided
            | Status::GivenUp => None,
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
            crate::log::note(format_args!("migration: {}", one_line(&error.to_line())));
        }
        progress.status.is_final()
    }

    /// `migrate_cancel`: fine without a migration, as in QEMU.
    pub(crate) fn cancel(&self) {
        let attempt = self.lock().attempt();
        if let Some(attempt) = attempt {
            attempt.cancel();
        }
    }

    /// `x-resolve`: what became of the last migration; if that is undecided, the destination is
    /// asked first, which may take as long as a connection takes to be refused. If it does not
    /// answer, the verdict counts.
    pub(crate) fn resolve(&self, verdict: Option<Verdict>) -> Result<Value, String> {
        let guest = self.guest()?;
        let attempt = self.lock().attempt();
        let Some(attempt) = attempt else { return Err("there was no migration".into()) };
        if !attempt.progress().status.is_final() {
            return Err("the migration is still under way".into());
        }
        let resolved = match verdict {
            None => attempt.resolve(),
            Some(verdict) => {
                if attempt.progress().status == Status::Undecided {
                    let meaning = verdict.meaning();
                    crate::log::note(format_args!("an operator decides: {meaning}"));
                }
                attempt.override_undecided(verdict.into_override())
            }
        };
        // Its end is told before this is answered.
        self.look(&attempt, &guest);
        let (status, reason) = match resolved {
            Ok(status) => (status, attempt.progress().error.map(|error| error.to_line())),
            Err(reason) => (Status::Undecided, Some(reason.to_line())),
        };
        Ok(schema::resolution(status, reason.as_deref()))
    }

    /// `migrate-set-parameters` and `migrate-set-capabilities`: what the next migration will be
    /// like; also changes one that runs, where it can be changed.
    pub(crate) fn set_options(&self, change: impl FnOnce(&mut MigrateOptions)) {
        let mut state = self.lock();
        let before = state.options.clone();
        change(&mut state.options);
        let after = &state.options;
        // Under the lock, so that of two clients the same one has the last word here and there.
        if let Some(attempt) = state.attempt().filter(|a| !a.progress().status.is_final()) {
            if before.downtime_limit != after.downtime_limit {
                attempt.set_downtime_limit(after.downtime_limit);
            }
            if before.bandwidth != after.bandwidth {
                attempt.set_bandwidth(after.bandwidth);
            }
        }
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
            let progress = attempt.progress();
            let over = progress.status.is_final();
            let report = over.then(|| attempt.wait(Duration::ZERO)).flatten();
            return schema::migration_info(&progress, setup, report.as_ref());
        }
        let incoming = state.receiver().cloned();
        let guest_is_here = state.guest.is_some();
        drop(state);
        incoming
            .map_or_else(|| json!({}), |incoming| incoming_info(incoming.as_ref(), guest_is_here))
    }
}

/// Whether a guest that is to be moved runs.
fn runs_or_is_paused(status: &GuestStatus) -> Result<bool, String> {
    match status {
        GuestStatus::Running => Ok(true),
        GuestStatus::Paused => Ok(false),
        GuestStatus::Ended(cause) => {
            Err(format!("the guest has ended: {}", one_line(&cause.to_string())))
        }
        GuestStatus::Waiting | GuestStatus::Switchover | GuestStatus::Gone => {
            Err("the guest is not here".into())
        }
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
