//! Taking a guest in.

use super::{Control, LOOK_INTERVAL, State, keep};
use crate::failure::one_line;
use crate::guest::Incoming;
use crate::qmp::events::Event;
use crate::qmp::schema;
use martlet_engine::ReceiveStatus;
use martlet_machine::GuestStatus;
use martlet_transport::Address;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two lines about attempts that failed.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// Where a guest is waited for.
pub(super) enum Place {
    /// An address that is being opened: its name may take long to resolve.
    Opening(Address),
    /// A receiver.
    Open(Arc<dyn Incoming>),
}

impl State {
    /// The receiver, once there is one.
    pub(super) fn receiver(&self) -> Option<&Arc<dyn Incoming>> {
        match self.incoming.as_ref()? {
            Place::Opening(_) => None,
            Place::Open(incoming) => Some(incoming),
        }
    }

    fn refuse_to_receive(&self) -> Result<(), String> {
        self.quit.refuse_if_ending()?;
        if self.guest.is_some() {
            return Err("a guest is here already".into());
        }
        match &self.incoming {
            None => Ok(()),
            Some(Place::Opening(at)) => Err(format!("about to wait for a guest at {at}")),
            Some(Place::Open(incoming)) => {
                Err(format!("already waiting for a guest at {}", incoming.address()))
            }
        }
    }
}

impl Control {
    /// `migrate-incoming`: starts to wait for a guest at an address. May take as long as a name
    /// takes to resolve; everything else goes on meanwhile.
    pub(crate) fn receive(self: &Arc<Control>, at: &Address) -> Result<(), String> {
        let listen = self.listen.clone().ok_or("this process does not take guests in")?;
        let mut state = self.lock();
        state.refuse_to_receive()?;
        state.incoming = Some(Place::Opening(at.clone()));
        drop(state);

        let opened = listen.listen(at);

        let mut state = self.lock();
        state.incoming = None;
        let incoming = opened.map_err(|e| format!("cannot listen at {at}: {e}"))?;
        if let Err(ending) = state.quit.refuse_if_ending() {
            drop(state);
            incoming.stop();
            return Err(ending);
        }
        state.incoming = Some(Place::Open(Arc::clone(&incoming)));
        drop(state);
        self.events.send(&Event::Migration("setup"));
        let control = Arc::clone(self);
        keep("receiver watch", move || control.watch_incoming(incoming.as_ref()));
        Ok(())
    }

    /// Whether an address is being opened just now.
    #[cfg(test)]
    pub(crate) fn is_opening(&self) -> bool {
        matches!(self.lock().incoming, Some(Place::Opening(_)))
    }

    fn watch_incoming(self: &Arc<Control>, incoming: &dyn Incoming) {
        let mut before = ReceiveStatus::Listening { last_error: None };
        let mut failures = Failures::default();
        loop {
            let now = incoming.wait(LOOK_INTERVAL);
            if failures.look(incoming) {
                before = ReceiveStatus::Listening { last_error: None };
                self.events.send(&Event::Migration("failed"));
            }
            failures.say(Instant::now());
            let stands_as_before = match (&before, &now) {
                (ReceiveStatus::Listening { .. }, ReceiveStatus::Listening { .. }) => true,
                (before, now) => before == now,
            };
            if stands_as_before {
                continue;
            }
            match &now {
                ReceiveStatus::Listening { .. } => {}
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
            crate::log::note(format_args!(
                "a guest arrived, but its machine is not here: a defect"
            ));
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
        self.lock().receiver().map(|incoming| incoming.address())
    }
}

/// Attempts that failed, and those of them that are not in the log yet. Each counts, however short
/// it was; but a peer that fails as fast as it can gets a line a second.
#[derive(Default)]
struct Failures {
    count: u64,
    unsaid: u64,
    reason: Option<String>,
    said: Option<Instant>,
}

impl Failures {
    /// Whether there are new ones.
    fn look(&mut self, incoming: &dyn Incoming) -> bool {
        let (count, reason) = incoming.failures();
        let new = count - self.count;
        if new > 0 {
            (self.count, self.reason) = (count, reason);
            self.unsaid += new;
        }
        new > 0
    }

    fn say(&mut self, now: Instant) {
        let is_due = self.said.is_none_or(|said| now.duration_since(said) >= LINE_INTERVAL);
        if self.unsaid == 0 || !is_due {
            return;
        }
        self.said = Some(now);
        crate::log::note(format_args!("{}", self.line()));
        self.unsaid = 0;
    }

    fn line(&self) -> String {
        let reason = one_line(self.reason.as_deref().unwrap_or("the source went away"));
        match self.unsaid {
            1 => format!("a migration to here failed: {reason}; listening on"),
            many => {
                format!("{many} migrations to here failed, the last one: {reason}; listening on")
            }
        }
    }
}

/// `query-migrate` at a destination.
pub(super) fn incoming_info(incoming: &dyn Incoming, guest_is_here: bool) -> Value {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_that_come_fast_share_a_line_that_counts_them() {
        let start = Instant::now();
        let mut failures = Failures { reason: Some("no\nhello".to_owned()), ..Failures::default() };
        failures.unsaid = 1;
        assert_eq!(failures.line(), "a migration to here failed: no hello; listening on");
        failures.say(start);
        assert_eq!(failures.unsaid, 0, "the first is said at once");
        failures.unsaid = 65;
        failures.say(start + LINE_INTERVAL / 2);
        assert_eq!(failures.unsaid, 65);
        assert!(
            failures.line().starts_with("65 migrations to here failed, the last one: no hello")
        );
        failures.say(start + LINE_INTERVAL);
        assert_eq!(failures.unsaid, 0);
    }
}
