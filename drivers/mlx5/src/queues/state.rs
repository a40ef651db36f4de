//! The states of a virtqueue's object, and of the device.

/// A virtqueue's object, as far as the driver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectState {
    /// Made, never started.
    Init,
    /// It passes frames.
    Ready,
    /// It stands.
    Suspended,
    /// It has failed, and stands; only making it anew helps.
    Broken,
}

/// What happens to a virtqueue's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectEvent {
    /// A change to RDY has succeeded.
    Started,
    /// A change to SUSPEND has succeeded.
    Stopped,
    /// A query has found it in ERR.
    FoundBroken,
}

impl ObjectState {
    /// All states.
    #[cfg(test)]
    pub(crate) const ALL: [ObjectState; 4] =
        [ObjectState::Init, ObjectState::Ready, ObjectState::Suspended, ObjectState::Broken];

    /// What the state becomes; `None` if the event can't happen in it.
    pub(crate) const fn next(self, event: ObjectEvent) -> Option<ObjectState> {
        use ObjectEvent as E;
        use ObjectState as S;
        match (self, event) {
            (S::Init | S::Suspended, E::Started) => Some(S::Ready),
            (S::Ready, E::Stopped) => Some(S::Suspended),
            (_, E::FoundBroken) => Some(S::Broken),
            (S::Ready | S::Broken, E::Started)
            | (S::Init | S::Suspended | S::Broken, E::Stopped) => None,
        }
    }
}

impl ObjectEvent {
    /// All events.
    #[cfg(test)]
    pub(crate) const ALL: [ObjectEvent; 3] =
        [ObjectEvent::Started, ObjectEvent::Stopped, ObjectEvent::FoundBroken];
}

/// Where the device as a whole is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// As opened.
    Idle,
    /// Ready for a guest that arrives.
    Prepared,
    /// Frames flow.
    Running,
    /// A suspend has begun.
    Suspending,
    /// All queues stand, and their indices are known.
    Suspended,
    /// A resume has begun.
    Resuming,
}

/// What happens to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceEvent {
    /// `prepare` has succeeded.
    Prepare,
    /// `start` has succeeded.
    Start,
    /// A suspend begins.
    BeginSuspend,
    /// It has succeeded.
    Stopped,
    /// It has failed, and everything that can run runs again.
    RolledBack,
    /// A resume begins.
    BeginResume,
    /// It is over: everything that can run runs.
    Resumed,
    /// `reset`.
    Reset,
}

impl DeviceState {
    /// All states.
    #[cfg(test)]
    pub(crate) const ALL: [DeviceState; 6] = [
        DeviceState::Idle,
        DeviceState::Prepared,
        DeviceState::Running,
        DeviceState::Suspending,
        DeviceState::Suspended,
        DeviceState::Resuming,
    ];

    /// What the state becomes; `None` if the event is not allowed in it.
    pub(crate) const fn next(self, event: DeviceEvent) -> Option<DeviceState> {
        use DeviceEvent as E;
        use DeviceState as S;
        match (self, event) {
            (_, E::Reset) => Some(S::Idle),
            (S::Idle | S::Prepared, E::Prepare) => Some(S::Prepared),
            (S::Idle | S::Prepared, E::Start) => Some(S::Running),
            (S::Running, E::BeginSuspend) => Some(S::Suspending),
            (S::Suspending, E::Stopped) => Some(S::Suspended),
            (S::Suspending, E::RolledBack) => Some(S::Running),
            // From Running: for queues that an earlier resume could not start.
            (S::Prepared | S::Suspended | S::Running, E::BeginResume) => Some(S::Resuming),
            (S::Resuming, E::Resumed) => Some(S::Running),
            (
                S::Idle,
                E::BeginSuspend | E::Stopped | E::RolledBack | E::BeginResume | E::Resumed,
            )
            | (S::Prepared, E::BeginSuspend | E::Stopped | E::RolledBack | E::Resumed)
            | (S::Running, E::Prepare | E::Start | E::Stopped | E::RolledBack | E::Resumed)
            | (
                S::Suspending,
                E::Prepare | E::Start | E::BeginSuspend | E::BeginResume | E::Resumed,
            )
            | (
                S::Suspended,
                E::Prepare | E::Start | E::BeginSuspend | E::Stopped | E::RolledBack | E::Resumed,
            )
            | (
                S::Resuming,
                E::Prepare
                | E::Start
                | E::BeginSuspend
                | E::Stopped
                | E::RolledBack
                | E::BeginResume,
            ) => None,
        }
    }

    /// Its name in errors.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceState::Idle => "not set up",
            DeviceState::Prepared => "prepared",
            DeviceState::Running => "running",
            DeviceState::Suspending => "suspending",
            DeviceState::Suspended => "suspended",
            DeviceState::Resuming => "resuming",
        }
    }
}

impl DeviceEvent {
    /// All events.
    #[cfg(test)]
    pub(crate) const ALL: [DeviceEvent; 8] = [
        DeviceEvent::Prepare,
        DeviceEvent::Start,
        DeviceEvent::BeginSuspend,
        DeviceEvent::Stopped,
        DeviceEvent::RolledBack,
        DeviceEvent::BeginResume,
        DeviceEvent::Resumed,
        DeviceEvent::Reset,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    fn table<S: Debug + Copy, E: Debug + Copy>(
        states: &[S],
        events: &[E],
        next: impl Fn(S, E) -> Option<S>,
    ) -> String {
        let mut table = String::new();
        for state in states {
            for event in events {
                if let Some(next) = next(*state, *event) {
                    table.push_str(&format!("{state:?} + {event:?} => {next:?}\n"));
                }
            }
        }
        table
    }

    #[test]
    fn objects_change_as_the_table_says() {
        let table = table(&ObjectState::ALL, &ObjectEvent::ALL, ObjectState::next);
        insta::assert_snapshot!("objects", table);
    }

    #[test]
    fn devices_change_as_the_table_says() {
        let table = table(&DeviceState::ALL, &DeviceEvent::ALL, DeviceState::next);
        insta::assert_snapshot!("devices", table);
    }
}
