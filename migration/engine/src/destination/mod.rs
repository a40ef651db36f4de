//! Taking a guest in.

mod events;
mod intake;
mod listening;
mod places;
mod serving;
mod shared;

use crate::rdma::RdmaAccept;
use crate::{DestinationFactory, DestinationVmm, Peer, host};
use martlet_core::destination::Desk;
pub use martlet_core::destination::ReceiveStatus;
use martlet_transport::{Address, Listener, Stream};
use martlet_units::ByteCount;
use shared::Shared;
use std::sync::Arc;
use std::time::Duration;

/// Who is at the other end.
fn peer_of(stream: &Stream) -> Peer {
    let own = Some(rustix::process::geteuid());
    if stream.peer_user() == own {
        Peer::SameUser
    } else if stream.peer_user_by_tcp() == own {
        Peer::SameUserByTcp
    } else {
        Peer::Unknown
    }
}

/// What a destination takes.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveOptions {
    /// What may come by RDMA, at an address `rdma:`.
    pub rdma: RdmaAccept,
    /// Most memory that a guest may have. By default what this host, or this
    /// process's control group, may have; memory in huge pages is no matter of that group's limit.
    pub memory_max: ByteCount,
}

impl Default for ReceiveOptions {
    fn default() -> ReceiveOptions {
        ReceiveOptions { rdma: RdmaAccept::default(), memory_max: host::memory() }
    }
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
        options: ReceiveOptions,
    ) -> std::io::Result<Receiver> {
        let takes_rdma = matches!(listen, Address::Rdma { .. });
        let listener = Listener::bind(listen)?;
        let address = listener.address()?;
        let shared = Arc::new(Shared::new(factory, options, takes_rdma)?);
        let served = Arc::clone(&shared);
        host::spawn("martlet-listen", move || listening::run(&listener, &served))?;
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

    /// How many attempts have failed, and why the last one did. A look at the status misses those
    /// that begin and fail between two looks.
    pub fn failures(&self) -> (u64, Option<String>) {
        self.shared.failures()
    }

    /// Hands out the machine whose guest has arrived, if the factory made it as this type. Once: the
    /// receiver keeps nothing of it then, and when the guest has moved on, its memory is free as soon
    /// as the caller drops the machine, even while this still answers those who ask what became of it.
    pub fn machine<V: DestinationVmm>(&self) -> Option<Arc<V>> {
        self.shared.take_arrived()
    }

    /// Waits until the status is `Arrived` or `Stopped`, at most `timeout`; returns the status.
    pub fn wait(&self, timeout: Duration) -> ReceiveStatus {
        self.shared.wait(timeout)
    }

    /// Takes no guest any more. An attempt is abandoned, and a commit that is not complete refused,
    /// unless the guest is being started already. Then wait for the status: before it is final, this
    /// process owes its source an answer. A guest that has arrived all the same stays, and whoever
    /// asks what became of it is answered, until this is called once it is here.
    pub fn stop(&self) {
        self.shared.stop(Desk::stop);
    }

    /// As [`Receiver::stop`], unless a guest has arrived: then nothing changes. Both is one step, so
    /// a guest that arrives just then is answered for.
    pub fn stop_unless_arrived(&self) {
        self.shared.stop(Desk::stop_unless_arrived);
    }
}
