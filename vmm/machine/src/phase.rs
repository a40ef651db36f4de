//! Where a machine stands between its owner and the engine: one table.

use martlet_engine::RunState::{self, Paused, Running};

/// Who may run the guest, and whether it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A destination: its guest has not arrived.
    Waiting,
    /// The permit is here: with the vCPUs if it runs, with the machine if its owner paused it.
    Here(RunState),
    /// It is being booted again; what it will do then. The permit is with the machine.
    Resetting(RunState),
    /// Ordered to stop for a switchover; what it did before.
    Stopping(RunState),
    /// The engine has the permit; what it did before.
    Switchover(RunState),
    /// The guest has left for good, or the machine was quit.
    Gone,
}

/// What happens to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The owner pauses.
    Pause,
    /// The owner continues.
    Continue,
    /// It is booted again.
    BeginReset,
    /// That is done, or failed.
    EndReset,
    /// The engine orders the stop.
    BeginPause,
    /// All vCPUs are out and the permit goes to the engine.
    AllOut,
    /// They are, but the guest had ended: it stays as it was.
    CannotLeave,
    /// The engine gives the permit back.
    Resume(RunState),
    /// The engine committed.
    MovedAway,
    /// The engine hands over a guest that arrived.
    Start(RunState),
    /// The owner quits.
    Quit,
}

impl Phase {
    /// The phase after an event; `None` if it can't happen now. Nothing else decides this.
    pub(crate) fn next(self, event: Event) -> Option<Phase> {
        match (self, event) {
            (Phase::Here(_), Event::Pause) => Some(Phase::Here(Paused)),
            (Phase::Here(_), Event::Continue) => Some(Phase::Here(Running)),
            (Phase::Here(was), Event::BeginReset) => Some(Phase::Resetting(was)),
            (Phase::Resetting(_), Event::Pause) => Some(Phase::Resetting(Paused)),
            (Phase::Resetting(_), Event::Continue) => Some(Phase::Resetting(Running)),
            (Phase::Resetting(state), Event::EndReset) => Some(Phase::Here(state)),
            (Phase::Here(was), Event::BeginPause) => Some(Phase::Stopping(was)),
            (Phase::Stopping(was), Event::AllOut) => Some(Phase::Switchover(was)),
            (Phase::Stopping(was), Event::CannotLeave) => Some(Phase::Here(was)),
            (Phase::Switchover(_), Event::Resume(state)) => Some(Phase::Here(state)),
            (Phase::Switchover(_), Event::MovedAway) => Some(Phase::Gone),
            (Phase::Waiting, Event::Start(state)) => Some(Phase::Here(state)),
            (_, Event::Quit) => Some(Phase::Gone),
            (
                _,
                Event::Pause
                | Event::Continue
                | Event::BeginReset
                | Event::EndReset
                | Event::BeginPause
                | Event::AllOut
                | Event::CannotLeave
                | Event::Resume(_)
                | Event::MovedAway
                | Event::Start(_),
            ) => None,
        }
    }

    /// For people, after "the guest".
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Phase::Waiting => "has not arrived",
            Phase::Here(Running) => "runs",
            Phase::Here(Paused) => "is paused",
            Phase::Resetting(_) => "is being reset",
            Phase::Stopping(_) | Phase::Switchover(_) => "is being moved away",
            Phase::Gone => "is gone",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    /// The whole table: a change of it shows here.
    #[test]
    fn table() {
        let phases = [
            Phase::Waiting,
            Phase::Here(Running),
            Phase::Here(Paused),
            Phase::Resetting(Running),
            Phase::Stopping(Running),
            Phase::Switchover(Running),
            Phase::Gone,
        ];
        let events = [
            Event::Pause,
            Event::Continue,
            Event::BeginReset,
            Event::EndReset,
            Event::BeginPause,
            Event::AllOut,
            Event::CannotLeave,
            Event::Resume(Running),
            Event::MovedAway,
            Event::Start(Paused),
        ];
        let mut table = String::new();
        for phase in phases {
            for event in events {
                if let Some(next) = phase.next(event) {
                    writeln!(table, "{phase:?} + {event:?} -> {next:?}").unwrap();
                }
            }
            assert_eq!(phase.next(Event::Quit), Some(Phase::Gone));
        }
        let expected = "\
Waiting + Start(Paused) -> Here(Paused)
Here(Running) + Pause -> Here(Paused)
Here(Running) + Continue -> Here(Running)
Here(Running) + BeginReset -> Resetting(Running)
Here(Running) + BeginPause -> Stopping(Running)
Here(Paused) + Pause -> Here(Paused)
Here(Paused) + Continue -> Here(Running)
Here(Paused) + BeginReset -> Resetting(Paused)
Here(Paused) + BeginPause -> Stopping(Paused)
Resetting(Running) + Pause -> Resetting(Paused)
Resetting(Running) + Continue -> Resetting(Running)
Resetting(Running) + EndReset -> Here(Running)
Stopping(Running) + AllOut -> Switchover(Running)
Stopping(Running) + CannotLeave -> Here(Running)
Switchover(Running) + Resume(Running) -> Here(Running)
Switchover(Running) + MovedAway -> Gone
";
        assert_eq!(table, expected);
    }
}
