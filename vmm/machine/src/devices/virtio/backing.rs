//! Where a card's vDPA device stands: one table.
//!
//! ```text
//!            DRIVER_OK            begin_suspend          answer
//! Idle ----------------> Running ---------------> Suspending ----> Suspended
//!  |   devices stand        ^  ^--------------------- error           |  ^
//!  +--------------> Due ----+  |                                      |  | indices
//!                   resume     +------ answer --- Resuming <----------+  Prepared <--- load
//! ```
//! A reset leads back to `Idle` from everywhere.

/// See the module's comment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Not set up.
    Idle,
    /// The guest has set it up while all devices stand: it begins after their resume.
    Due,
    /// It passes frames.
    Running,
    /// It was told to stop.
    Suspending,
    /// It stands where its indices say.
    Suspended,
    /// It knows what it is to be, and neither its indices nor that it may go: at a destination,
    /// and for a moment at every start.
    Prepared,
    /// It was told to go on.
    Resuming,
}

/// What happens to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The guest's driver is ready while devices stand.
    Postpone,
    /// It is told everything but its indices.
    Configure,
    /// It starts from the beginning.
    Start,
    /// It is told to stop.
    BeginSuspend,
    /// It has.
    Stopped,
    /// It could not and passes frames as before.
    NotStopped,
    /// It is told its indices.
    SetIndices,
    /// It is told to go on.
    BeginResume,
    /// It goes on, as far as it can.
    Going,
    /// It forgets everything.
    Forget,
}

impl Backing {
    /// What follows an event; `None` if it can't happen now. Nothing else decides this.
    pub(super) fn next(self, event: Event) -> Option<Backing> {
        match (self, event) {
            (Backing::Idle, Event::Postpone) => Some(Backing::Due),
            (Backing::Idle | Backing::Due, Event::Configure) => Some(Backing::Prepared),
            (Backing::Prepared, Event::Configure) => Some(Backing::Prepared),
            (Backing::Prepared, Event::Start) => Some(Backing::Running),
            (Backing::Running, Event::BeginSuspend) => Some(Backing::Suspending),
            (Backing::Suspending, Event::Stopped) => Some(Backing::Suspended),
            (Backing::Suspending, Event::NotStopped) => Some(Backing::Running),
            (Backing::Prepared | Backing::Suspended, Event::SetIndices) => Some(Backing::Suspended),
            (Backing::Suspended, Event::Configure) => Some(Backing::Prepared),
            (Backing::Suspended, Event::BeginResume) => Some(Backing::Resuming),
            (Backing::Resuming, Event::Going) => Some(Backing::Running),
            (_, Event::Forget) => Some(Backing::Idle),
            (
                _,
                Event::Postpone
                | Event::Configure
                | Event::Start
                | Event::BeginSuspend
                | Event::Stopped
                | Event::NotStopped
                | Event::SetIndices
                | Event::BeginResume
                | Event::Going,
            ) => None,
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
        let all = [
            Backing::Idle,
            Backing::Due,
            Backing::Running,
            Backing::Suspending,
            Backing::Suspended,
            Backing::Prepared,
            Backing::Resuming,
        ];
        let events = [
            Event::Postpone,
            Event::Configure,
            Event::Start,
            Event::BeginSuspend,
            Event::Stopped,
            Event::NotStopped,
            Event::SetIndices,
            Event::BeginResume,
            Event::Going,
        ];
        let mut table = String::new();
        for backing in all {
            for event in events {
                if let Some(next) = backing.next(event) {
                    writeln!(table, "{backing:?} + {event:?} -> {next:?}").unwrap();
                }
            }
            assert_eq!(backing.next(Event::Forget), Some(Backing::Idle));
        }
        let expected = "\
Idle + Postpone -> Due
Idle + Configure -> Prepared
Due + Configure -> Prepared
Running + BeginSuspend -> Suspending
Suspending + Stopped -> Suspended
Suspending + NotStopped -> Running
Suspended + Configure -> Prepared
Suspended + SetIndices -> Suspended
Suspended + BeginResume -> Resuming
Prepared + Configure -> Prepared
Prepared + Start -> Running
Prepared + SetIndices -> Suspended
Resuming + Going -> Running
";
        assert_eq!(table, expected);
    }
}
