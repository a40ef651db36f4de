//! The interface: what a provider of verbs can do.

use crate::error::{PostError, VerbsError};
use crate::work::{
    Access, Completion, Lkey, QueueNumber, RemoteAddress, Rkey, WorkId, WorkRequest,
};
use martlet_device_io::HostMemory;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Most bytes of private data that a connection request can carry: what is left of the 92 bytes
/// of an InfiniBand REQ after the connection manager's own 36 (IBA spec annex A11).
pub const CONNECT_DATA_BYTES_MAX: usize = 56;
/// Most bytes that an accepting answer can carry (IBA spec 12.6.8, REP).
pub const ACCEPT_DATA_BYTES_MAX: usize = 196;
/// Most bytes that a rejecting answer can carry (IBA spec 12.6.7, REJ).
pub const REJECT_DATA_BYTES_MAX: usize = 148;
/// Most bytes of one request (IBA spec 9.7.7: 2^31 for RC; devices agree on less).
pub const MESSAGE_BYTES_MAX: u32 = 1 << 30;

/// Where a listener is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// An address of the network; with `ibv`, of the RDMA device's network interface.
    Ip(SocketAddr),
    /// A socket in the file system; only `soft` knows it.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Ip(address) => address.fmt(f),
            Endpoint::Unix(path) => path.display().fmt(f),
        }
    }
}

/// How a queue pair is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Requests that may be posted and not yet completed.
    pub send_slots: u32,
    /// Receives that may be posted and not yet completed.
    pub receive_slots: u32,
    /// Completions of each queue that may wait to be polled. At least the queue's slots, or a
    /// burst of failures can run over it.
    pub completion_slots: u32,
    /// Reads of this side that may be on their way at once; the device may grant fewer.
    pub reads_in_flight: u8,
    /// How often a write with immediate is tried again while the peer has no receive posted: 0
    /// to 6, or 7 for ever. Say the same on both sides: connection managers tell it to the peer,
    /// for the peer's requests (IBA spec 12.6.7 and 12.6.8, "RNR Retry Count").
    pub rnr_retries: u8,
}

impl Setup {
    /// For ever: the value of [`Setup::rnr_retries`] that no peer can exhaust.
    pub const RNR_FOREVER: u8 = 7;
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            send_slots: 512,
            receive_slots: 16,
            completion_slots: 512,
            reads_in_flight: 16,
            rnr_retries: Setup::RNR_FOREVER,
        }
    }
}

/// What a device can do. All are upper bounds; less may be granted under pressure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest [`Setup::send_slots`] and [`Setup::receive_slots`].
    pub queue_slots_max: u32,
    /// Largest [`Setup::completion_slots`].
    pub completion_slots_max: u32,
    /// Regions at once.
    pub regions_max: u64,
    /// Bytes of one region.
    pub region_bytes_max: u64,
    /// Whether [`Access::ON_DEMAND`] works for writes of the peer.
    pub on_demand: bool,
}

/// One RDMA device, opened: what memory is registered with and connections are made by.
///
/// All queue pairs made by a fabric may use all its regions. Dropping it while regions or queue
/// pairs live is fine: they hold what they need.
pub trait Fabric: Send + Sync + 'static {
    /// Memory that the device may reach.
    type Region: Region;
    /// One end of a connection.
    type Pair: QueuePair;
    /// Waits for connections.
    type Listener: Listener<Pair = Self::Pair>;

    /// What to call it in a log: the provider, and the device where there is one.
    fn name(&self) -> String;

    /// What it can do.
    fn limits(&self) -> Limits;

    /// Makes memory available to the device. The region keeps the memory's owner. May take long
    /// (about 0.1 to 0.3 s a GiB where pages must be pinned) and may be called from several
    /// threads at once.
    fn register(&self, memory: &HostMemory, access: Access) -> Result<Self::Region, VerbsError>;

    /// Connects, within `limit`. `data` (at most [`CONNECT_DATA_BYTES_MAX`]) comes with the
    /// peer's request; what the peer answers comes back, perhaps with zeros behind.
    fn connect(
        &self,
        to: &Endpoint,
        setup: &Setup,
        data: &[u8],
        limit: Duration,
    ) -> Result<(Self::Pair, Vec<u8>), VerbsError>;

    /// Waits for connections at an address; port 0 takes any that is free.
    fn listen(&self, at: &Endpoint) -> Result<Self::Listener, VerbsError>;
}

/// Memory that the device may reach until it is deregistered or dropped.
///
/// From the moment that either returns, no request can use the keys, and nothing more is written
/// to the memory or read from it, whatever is in flight. Local requests in flight that name it
/// fail and take their queue pair down: drain first.
pub trait Region: Send + Sync + 'static {
    /// For requests of this process.
    fn local_key(&self) -> Lkey;
    /// For requests of the peer.
    fn remote_key(&self) -> Rkey;
    /// Its first byte, as both sides name it.
    fn address(&self) -> RemoteAddress;
    /// Its length.
    fn bytes(&self) -> u64;
    /// Takes the keys back. A drop does the same, but can't tell of a failure.
    fn deregister(self) -> Result<(), VerbsError>;
}

/// How a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing is known against it. An idle queue pair does not notice that its peer died, so
    /// this is no proof of life: use a heartbeat.
    Up,
    /// One of the sides asked for the end.
    Disconnected,
    /// It broke: a request of either side failed, or the peer is gone.
    Failed,
}

/// One end of a reliable connection (RC).
///
/// Promises:
///
/// 1. Requests of one queue pair are executed in the order of posting, and complete in it. There
///    is no order between queue pairs.
/// 2. A completion with success says that the peer's device has placed all bytes of that request
///    and of all that were posted before.
/// 3. **The bytes of a write are read when the device gets to it**, at any moment between the
///    post and its completion, and perhaps several times. A store meanwhile may travel, in whole
///    or in part.
/// 4. Nothing is promised of when, and in which order, bytes of writes appear in the peer's
///    memory before the completion.
/// 5. After the first failure nothing more is executed: that request completes with its cause,
///    all others, posted before or later, with [`Status::FLUSHED`](crate::Status::FLUSHED), in
///    the order of posting. Each of them leaves a completion, signalled or not. If the peer's
///    device refused the request, those before it have succeeded; if the local one did, those in
///    flight before it may be flushed too, executed or not, and rdma_rxe flushes even the one at
///    fault: then [`Link::Failed`] is all that is told.
/// 6. A read may take its bytes later than writes that were posted after it place theirs.
///
/// Dropping it ends the connection at once; requests in flight may or may not have been executed.
/// A thread can own it; calls don't block but for [`QueuePair::wait`].
pub trait QueuePair: Send + 'static {
    /// Its number.
    fn number(&self) -> QueueNumber;

    /// How many requests may be in flight: what [`Setup::send_slots`] asked for. Count them (see
    /// [`SendWindow`](crate::SendWindow)): a device may take more, and its completion queue then
    /// run over.
    fn send_slots(&self) -> u32;

    /// Hands a list of requests to the device, with one doorbell where the device can. One of
    /// many requests costs much less in a list than alone.
    fn post(&mut self, list: &[WorkRequest]) -> Result<(), PostError>;

    /// Posts receives, each good for one write with immediate of the peer.
    fn post_receives(&mut self, ids: &[WorkId]) -> Result<(), PostError>;

    /// Takes completions, those of each side in order; returns how many. 0 means that there are
    /// none now. Completions free the slots of the send queue: see
    /// [`Signal`](crate::Signal).
    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, VerbsError>;

    /// Asks that [`QueuePair::wait`] returns for the next completion that comes in. Those that
    /// came before are not told of: after arming poll once more, and wait only if that gave
    /// nothing.
    fn arm(&mut self) -> Result<(), VerbsError>;

    /// Waits for a completion after [`QueuePair::arm`] or for a change of the link; `false` if
    /// `limit` passed first. May also return early for nothing.
    fn wait(&mut self, limit: Duration) -> Result<bool, VerbsError>;

    /// How the connection stands now.
    fn link(&mut self) -> Link;

    /// Ends the connection; the peer is told. What is in flight is flushed.
    fn disconnect(&mut self);
}

/// Waits for connections.
pub trait Listener: Send + 'static {
    /// What a connection becomes.
    type Pair: QueuePair;
    /// One that came and was not answered.
    type Request: ConnectRequest<Pair = Self::Pair>;

    /// Where it waits; tells the port that was taken for port 0.
    fn local(&self) -> Endpoint;

    /// The next connection request; `None` if none came within `limit`. What fails is told, and
    /// the listener goes on.
    fn accept(&mut self, limit: Duration) -> Result<Option<Self::Request>, VerbsError>;
}

/// A connection request to be answered. Dropped, it is rejected.
pub trait ConnectRequest: Send + 'static {
    /// What it becomes.
    type Pair: QueuePair;

    /// What the peer sent along, perhaps with zeros behind: the connection manager does not keep
    /// the length. Foreign bytes.
    fn private_data(&self) -> &[u8];

    /// Takes it; the peer gets `data`, at most [`ACCEPT_DATA_BYTES_MAX`]. Post receives that the
    /// peer's first requests need right after; until then they are tried again.
    fn accept(self, setup: &Setup, data: &[u8], limit: Duration) -> Result<Self::Pair, VerbsError>;

    /// Refuses it; the peer gets `data`, at most [`REJECT_DATA_BYTES_MAX`].
    fn reject(self, data: &[u8]) -> Result<(), VerbsError>;
}

/// Fails if private data is longer than `limit`, the most in its message. For providers.
pub fn check_private_data(data: &[u8], limit: usize) -> Result<(), VerbsError> {
    check_limit("the private data's length", data.len() as u64, limit as u64)
}

/// Fails if `asked` is above `limit`.
fn check_limit(what: &'static str, asked: u64, limit: u64) -> Result<(), VerbsError> {
    if asked <= limit { Ok(()) } else { Err(VerbsError::Limit { what, asked, limit }) }
}

impl Limits {
    /// Fails if a queue pair like this can't be made. For providers.
    pub fn check(&self, setup: &Setup) -> Result<(), VerbsError> {
        let slots = u64::from(self.queue_slots_max);
        check_limit("send_slots", u64::from(setup.send_slots), slots)?;
        check_limit("receive_slots", u64::from(setup.receive_slots), slots)?;
        let completions = u64::from(self.completion_slots_max);
        check_limit("completion_slots", u64::from(setup.completion_slots), completions)?;
        check_limit("rnr_retries", u64::from(setup.rnr_retries), u64::from(Setup::RNR_FOREVER))
    }
}
