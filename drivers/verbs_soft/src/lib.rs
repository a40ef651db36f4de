//! Verbs without a device: reliable connections between two processes over TCP or Unix sockets.
//!
//! A thread of each queue pair stands for the device. It reads requests' bytes from registered
//! memory when it sends them, which is after the post; it checks keys, bounds and access of the
//! peer's requests and places their bytes straight from the socket into registered memory; and
//! it completes a request when the peer's thread said that it is in place. The programs at both
//! ends see what they would see of a network card, but for two things: a peer that is gone is
//! noticed even while nothing is in flight, and the cost is a core's.
//!
//! The bytes travel in clear, as those of real RDMA do. Pages of registered memory that are not
//! there yet are faulted in as they are written; a fault must not wait for someone who registers
//! or deregisters memory.

mod engine;
mod frame;
mod handshake;
mod pieces;
mod queues;
mod receiving;
mod regions;
mod sending;
#[cfg(test)]
mod tests;

pub use handshake::{SoftListener, SoftRequest};
pub use regions::SoftRegion;

use engine::Engine;
use martlet_device_io::HostMemory;
use martlet_verbs::{Access, Completion, QueueNumber, Status, WorkId, WorkRequest};
use martlet_verbs::{
    CONNECT_DATA_BYTES_MAX, Endpoint, Fabric, Limits, Link, QueuePair, Setup, check_private_data,
};
use martlet_verbs::{PostError, VerbsError};
use queues::Shared;
use regions::Regions;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Reads of one side that may be in flight.
const READS_MAX: usize = 16;

/// How long a connection that is over may take to tell the peer so.
const LINGER: Duration = Duration::from_secs(1);

/// Limits of the soft provider: its own tables, nothing physical.
const LIMITS: Limits = Limits {
    queue_slots_max: 1 << 16,
    completion_slots_max: 1 << 17,
    regions_max: regions::REGIONS_MAX as u64,
    region_bytes_max: 1 << 48,
    on_demand: true,
};

/// Why a connection ends.
enum End {
    /// Our owner wants it.
    Left,
    /// The peer wanted it.
    Bye,
    /// The connection broke.
    Lost,
    /// A request of ours failed; all before it are done.
    Failed { request: u64, status: Status },
    /// A request of the peer can't be done; all before it are.
    Refuse { request: u64, status: Status },
    /// Memory was deregistered while it was being sent; perhaps that of one of our requests.
    Torn(Option<(u64, Status)>),
    /// The peer sent what makes no sense.
    Protocol(&'static str),
    /// Completions were lost.
    Overrun,
}

/// The soft provider. Clones share their regions.
#[derive(Clone)]
pub struct Soft {
    regions: Arc<Regions>,
}

impl Soft {
    /// A device without hardware.
    pub fn new() -> Soft {
        Soft { regions: Regions::new() }
    }
}

impl Default for Soft {
    fn default() -> Soft {
        Soft::new()
    }
}

impl Fabric for Soft {
    type Region = SoftRegion;
    type Pair = SoftPair;
    type Listener = SoftListener;

    fn name(&self) -> String {
        "soft".to_owned()
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn register(&self, memory: &HostMemory, access: Access) -> Result<SoftRegion, VerbsError> {
        self.regions.register(memory, access)
    }

    fn connect(
        &self,
        to: &Endpoint,
        setup: &Setup,
        data: &[u8],
        limit: Duration,
    ) -> Result<(SoftPair, Vec<u8>), VerbsError> {
        LIMITS.check(setup)?;
        check_private_data(data, CONNECT_DATA_BYTES_MAX)?;
        let (socket, answer) = handshake::connect(to, data, limit)?;
        Ok((SoftPair::start(socket, &self.regions, setup)?, answer))
    }

    fn listen(&self, at: &Endpoint) -> Result<SoftListener, VerbsError> {
        SoftListener::bind(at, &self.regions)
    }
}

/// One end of a soft connection.
pub struct SoftPair {
    number: QueueNumber,
    send_slots: u32,
    shared: Arc<Shared>,
}

impl SoftPair {
    fn start(
        socket: OwnedFd,
        regions: &Arc<Regions>,
        setup: &Setup,
    ) -> Result<SoftPair, VerbsError> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // Relaxed: only a number that differs.
        let number = QueueNumber(NEXT.fetch_add(1, Ordering::Relaxed) & 0xff_ffff);
        let reads_in_flight = setup.reads_in_flight.min(u8::try_from(READS_MAX).unwrap_or(u8::MAX));
        let shared = Arc::new(Shared::new(Setup { reads_in_flight, ..*setup })?);
        let engine = Engine::new(socket, Arc::clone(&shared), Arc::clone(regions));
        std::thread::Builder::new()
            .name(format!("soft-qp-{}", number.0))
            .spawn(move || engine.run())
            .map_err(VerbsError::host("start the progress thread"))?;
        Ok(SoftPair { number, send_slots: setup.send_slots, shared })
    }
}

impl QueuePair for SoftPair {
    fn number(&self) -> QueueNumber {
        self.number
    }

    fn send_slots(&self) -> u32 {
        self.send_slots
    }

    fn post(&mut self, list: &[WorkRequest]) -> Result<(), PostError> {
        self.shared.post(list)
    }

    fn post_receives(&mut self, ids: &[WorkId]) -> Result<(), PostError> {
        self.shared.post_receives(ids)
    }

    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        self.shared.poll(into)
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        self.shared.arm();
        Ok(())
    }

    fn wait(&mut self, limit: Duration) -> Result<bool, VerbsError> {
        self.shared.wait(limit)
    }

    fn link(&mut self) -> Link {
        self.shared.link()
    }

    fn disconnect(&mut self) {
        self.shared.leave();
        self.shared.wait_quiet();
    }
}

impl Drop for SoftPair {
    fn drop(&mut self) {
        self.disconnect();
    }
}

/// Takes any bytes as what a peer sends: the parser refuses them or they mean the same when
/// written again. For fuzzing.
pub fn fuzz_frames(data: &[u8]) {
    frame::fuzz(data);
    handshake::fuzz(data);
}
