//! Taking a guest in.

mod attempt;
mod door;
mod events;
mod intake;
mod intake_pages;
mod intake_rdma;
mod shared;

use crate::{DestinationFactory, host};
use martlet_transport::{Address, Listener, RdmaAccept};
use shared::Shared;
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
/// the next one is taken. After the arrival it goes on to answer `resolve` queries, until
/// [`Receiver::stop`] or the process ends. All clones are the same receiver.
#[derive(Clone)]
pub struct Receiver {
    shared: Arc<Shared>,
    address: Address,
}

impl Receiver {
    /// Binds `listen` and starts listening. At an address `rdma:`, guest memory may come by RDMA,
    /// by whichever provider there is.
    pub fn start(
        listen: &Address,
        factory: Arc<dyn DestinationFactory>,
    ) -> std::io::Result<Receiver> {
        Receiver::start_with(listen, factory, RdmaAccept::default())
    }

    /// As [`Receiver::start`], with limits for RDMA.
    pub fn start_with(
        listen: &Address,
        factory: Arc<dyn DestinationFactory>,
        rdma: RdmaAccept,
    ) -> std::io::Result<Receiver> {
        let rdma = matches!(listen, Address::Rdma { .. }).then_some(rdma);
        let listener = Listener::bind(listen)?;
        let address = listener.address()?;
        let shared = Arc::new(Shared::new(factory, rdma)?);
        let door = Arc::clone(&shared);
        host::spawn("martlet-listen", move || door::run(&listener, &door))?;
        Ok(Receiver { shared, address })
    }

    /// Where it listens, with the port that was chosen.
    pub fn address(&self) -> Address {
        self.address.clone()
    }

    /// How it stands.
    pub fn status(&self) -> ReceiveStatus {
        self.shared.status()
    }

    /// Waits until the status is `Arrived` or `Stopped`, at most `timeout`; returns the status.
    pub fn wait(&self, timeout: Duration) -> ReceiveStatus {
        self.shared.wait(timeout)
    }

    /// Stops listening; an attempt before its commit is abandoned.
    pub fn stop(&self) {
        self.shared.stop();
    }
}
