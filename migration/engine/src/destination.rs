//! Taking a guest in.

use crate::DestinationFactory;
use martlet_transport::Address;
use std::sync::Arc;
use std::time::Duration;

/// How a destination stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiveStatus {
    /// Nobody migrates here now. After a failed attempt the reason stands here.
    Listening {
        /// Why the attempt before failed.
        last_error: Option<String>,
    },
    /// A source is connected.
    Active,
    /// The guest has arrived: it was started, or left paused as it came.
    Arrived,
    /// The receiver was stopped before a guest arrived.
    Stopped,
}

/// Listens for one guest on threads of its own. A failed attempt frees everything it built, and
/// the next one is taken. After the arrival it goes on to answer `resolve` queries.
#[derive(Clone)]
pub struct Receiver {}

impl Receiver {
    /// Binds `listen` and starts listening.
    pub fn start(
        listen: &Address,
        factory: Arc<dyn DestinationFactory>,
    ) -> std::io::Result<Receiver> {
        let _ = (listen, factory);
        unimplemented!()
    }

    /// Where it listens, with the port that was chosen.
    pub fn address(&self) -> Address {
        unimplemented!()
    }

    /// How it stands.
    pub fn status(&self) -> ReceiveStatus {
        unimplemented!()
    }

    /// Waits until the status is `Arrived` or `Stopped`, at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> ReceiveStatus {
        let _ = timeout;
        unimplemented!()
    }

    /// Stops listening; an attempt before its commit is abandoned.
    pub fn stop(&self) {
        unimplemented!()
    }
}
