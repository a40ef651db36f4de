//! How a process comes to its end: in order, and not while that could lose a guest that may live
//! nowhere else.

use super::{Control, LOOK_INTERVAL};
use crate::failure::Failure;
use crate::guest::{Attempt, Incoming};
use crate::log::note;
use crate::qmp::events::Event;
use martlet_engine::{ReceiveStatus, Status};
use martlet_machine::EndCause;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How long a refused signal makes the next one force: whoever sends a second one has read why.
const INSISTING_MAX: Duration = Duration::from_secs(60);

/// Why a process ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QuitCause {
    /// `quit` on the control socket.
    Command,
    /// SIGINT or SIGTERM.
    Signal,
    /// It was started to wait for a guest at an address where it can't.
    CannotListen(String),
    /// The guest ended itself.
    Guest(EndCause),
}

impl QuitCause {
    fn event(&self) -> Event {
        let (guest, reason) = match self {
            QuitCause::Command => (false, "host-qmp-quit"),
            QuitCause::Signal => (false, "host-signal"),
            QuitCause::CannotListen(_) => (false, "host-error"),
            QuitCause::Guest(EndCause::Reset) => (true, "guest-reset"),
            QuitCause::Guest(EndCause::Shutdown) => (true, "guest-shutdown"),
            QuitCause::Guest(EndCause::Crash(_)) => (true, "guest-panic"),
        };
        Event::Shutdown { guest, reason }
    }
}

/// What became of the wishes to end.
#[derive(Default)]
pub(super) struct State {
    wish: Option<Wish>,
    /// When a signal was refused, if nothing has begun since.
    refused_signal: Option<Instant>,
}

struct Wish {
    cause: QuitCause,
    force: bool,
    /// There was a guest when it came, so that it is meant for the guest, too.
    with_guest: bool,
}

impl State {
    /// Nothing new begins in a process that is about to end.
    pub(super) fn refuse_if_ending(&self) -> Result<(), String> {
        if self.wish.is_some() { Err("this process is ending".into()) } else { Ok(()) }
    }

    /// A migration begins: what was refused before it is no matter any more.
    pub(super) fn forget_refusal(&mut self) {
        self.refused_signal = None;
    }

    fn insists(&self, now: Instant) -> bool {
        self.refused_signal.is_some_and(|at| now.duration_since(at) < INSISTING_MAX)
    }
}

const UNDECIDED: &str = "it is undecided where the guest runs: `martlet resolve` asks the \
                         destination, and an end by force loses the guest if it is not there";
const ARRIVED: &str = "a guest has arrived here meanwhile, and runs nowhere else: ask again to end \
                       it with this process";

/// What keeps a process from its end.
enum Obstacle {
    /// Its guest would be lost, perhaps.
    Refused(&'static str),
    /// Nothing any more: who insists gets his way, and loses this.
    Forced(Failure),
}

impl Control {
    /// Asks the process to end. The first cause counts. Whoever uses force does not wait for a
    /// migration to be settled.
    ///
    /// # Errors
    /// Why the process does not end: it may hold the only copy of its guest, stopped.
    pub(crate) fn request_quit(&self, cause: QuitCause, force: bool) -> Result<(), String> {
        let undecided = self.outgoing_status() == Some(Status::Undecided);
        let mut state = self.lock();
        if undecided && !force {
            if cause == QuitCause::Signal {
                state.quit.refused_signal = Some(Instant::now());
            }
            return Err(UNDECIDED.into());
        }
        let arrived = state.receiver().is_some_and(|r| r.status() == ReceiveStatus::Arrived);
        let with_guest = state.guest.is_some() || arrived;
        let wish = state.quit.wish.get_or_insert(Wish { cause, force, with_guest });
        wish.force |= force;
        wish.with_guest |= with_guest;
        drop(state);
        self.quit.notify_all();
        Ok(())
    }

    /// A signal asks the process to end. The second one uses force. Returns `false` at the third:
    /// not even force has helped.
    pub(crate) fn quit_by_signal(&self) -> bool {
        let state = self.lock();
        let forced = state.quit.wish.as_ref().is_some_and(|wish| wish.force);
        let again = state.quit.wish.is_some() || state.quit.insists(Instant::now());
        drop(state);
        if !forced && let Err(reason) = self.request_quit(QuitCause::Signal, again) {
            note(format_args!("not ending: {reason}; a second signal is force"));
        }
        !forced
    }

    /// A guest that is over has nothing to lose.
    pub(super) fn guest_ended(&self, cause: EndCause) {
        // Never undecided: a guest ends itself only while it runs here.
        let _ = self.request_quit(QuitCause::Guest(cause), false);
    }

    /// The process can't do what it was started for.
    pub(crate) fn cannot_listen(&self, reason: String) {
        // Nothing was begun, so nothing is undecided.
        let _ = self.request_quit(QuitCause::CannotListen(reason), false);
    }

    /// Waits until somebody wants the process to end and nothing stands against it, then ends what
    /// runs in it: a migration is cancelled if it can be, a receiver stops, the guest's vCPUs stop
    /// for good.
    ///
    /// # Errors
    /// What was lost to force.
    pub(crate) fn wait_for_quit(&self) -> Result<QuitCause, Failure> {
        loop {
            let cause = self.wait_for_wish();
            let result = match self.settle() {
                Ok(()) => Ok(cause.clone()),
                Err(Obstacle::Forced(failure)) => Err(failure),
                Err(Obstacle::Refused(reason)) => {
                    self.refuse(reason);
                    continue;
                }
            };
            self.events.send(&cause.event());
            let state = self.lock();
            let (incoming, guest) = (state.receiver().cloned(), state.guest.clone());
            drop(state);
            if let Some(incoming) = incoming {
                incoming.stop();
            }
            if let Some(guest) = guest {
                guest.quit();
            }
            return result;
        }
    }

    fn wait_for_wish(&self) -> QuitCause {
        let mut state = self.lock();
        loop {
            if let Some(wish) = &state.quit.wish {
                return wish.cause.clone();
            }
            state = self.quit.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// How the guest ended by itself, if that is why the process is to end.
    fn guests_end(&self) -> Option<String> {
        match &self.lock().quit.wish.as_ref()?.cause {
            QuitCause::Guest(cause) => Some(cause.to_string()),
            _ => None,
        }
    }

    fn refuse(&self, reason: &str) {
        note(format_args!("not ending: {reason}"));
        let mut state = self.lock();
        if let Some(wish) = state.quit.wish.take() {
            let by_signal = wish.cause == QuitCause::Signal;
            state.quit.refused_signal = by_signal.then(Instant::now);
        }
    }

    fn is_forced(&self) -> bool {
        self.lock().quit.wish.as_ref().is_some_and(|wish| wish.force)
    }

    /// Whether the process may end with the guest that it has.
    fn ends_with_guest(&self) -> bool {
        self.lock().quit.wish.as_ref().is_some_and(|wish| wish.force || wish.with_guest)
    }

    /// Ends a migration that runs, and waits until it is known which side has the guest.
    fn settle(&self) -> Result<(), Obstacle> {
        let state = self.lock();
        let (attempt, incoming) = (state.attempt(), state.receiver().cloned());
        drop(state);
        if let Some(attempt) = attempt {
            self.settle_outgoing(attempt.as_ref())?;
        }
        incoming.map_or(Ok(()), |incoming| self.settle_incoming(incoming.as_ref()))
    }

    /// However long it takes: the engine has a bound for each of its waits, and an answer that
    /// comes late still gives the guest back.
    fn settle_outgoing(&self, attempt: &dyn Attempt) -> Result<(), Obstacle> {
        if !attempt.progress().status.is_final() {
            match self.guests_end() {
                Some(how) => attempt.guest_ended(&how),
                None => attempt.cancel(),
            }
        }
        loop {
            let forced = self.is_forced();
            match attempt.progress().status {
                Status::Completed | Status::Failed | Status::Cancelled | Status::GivenUp => {
                    return Ok(());
                }
                Status::Undecided if forced => {
                    let text = "ended by force while it was undecided where the guest runs";
                    return Err(Obstacle::Forced(Failure::Undecided(text.to_owned())));
                }
                Status::Undecided => return Err(Obstacle::Refused(UNDECIDED)),
                Status::Setup | Status::Active | Status::Device | Status::Cancelling if forced => {
                    let text = "ended by force before its migration was settled";
                    return Err(Obstacle::Forced(Failure::Undecided(text.to_owned())));
                }
                Status::Setup | Status::Active | Status::Device | Status::Cancelling => {
                    let _ = attempt.wait(LOOK_INTERVAL);
                }
            }
        }
    }

    /// An attempt before its commit is abandoned, one behind it refuses the commit if it still
    /// can. Otherwise the guest arrives, and stays if nobody has asked for an end with it.
    fn settle_incoming(&self, incoming: &dyn Incoming) -> Result<(), Obstacle> {
        // One with its guest here goes on to answer for it, if that guest is to stay.
        incoming.stop_unless_arrived();
        loop {
            match incoming.wait(LOOK_INTERVAL) {
                ReceiveStatus::Stopped | ReceiveStatus::Listening { .. } => return Ok(()),
                ReceiveStatus::Arrived if self.ends_with_guest() => return Ok(()),
                ReceiveStatus::Arrived => return Err(Obstacle::Refused(ARRIVED)),
                ReceiveStatus::Active if self.is_forced() => {
                    let text = "ended by force in the middle of a migration to here";
                    return Err(Obstacle::Forced(Failure::Undecided(text.to_owned())));
                }
                ReceiveStatus::Active => {}
            }
        }
    }
}

#[cfg(test)]
#[path = "quit_tests.rs"]
mod tests;
