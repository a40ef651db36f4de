//! Taking a guest in.

use super::{Control, LOOK_INTERVAL, State, spawn};
use crate::failure::one_line;
use crate::guest::Incoming;
use crate::qmp::events::Event;
use crate::qmp::schema;
use martlet_engine::ReceiveStatus;
use martlet_machine::GuestStatus;
use martlet_transport::Address;
use serde_json::{Map, Value, json};
use std::sync::Arc;

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
        spawn("receiver watch", move || control.watch_incoming(incoming.as_ref()));
        Ok(())
    }

    /// Whether an address is being opened just now.
    #[cfg(test)]
    pub(crate) fn is_opening(&self) -> bool {
        matches!(self.lock().incoming, Some(Place::Opening(_)))
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
                    crate::log::note(format_args!(
                        "a migration to here failed: {reason}; listening on"
                    ));
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
