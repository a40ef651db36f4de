//! What can go wrong, and whose fault it is.

use super::layout::PageSpan;
use super::work::{QueueIndex, WorkSequence, WorkStatus};
use martlet_wire::rdma::{WireSpan, ZeroRange};

/// What a peer of ours would not say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerFault {
    /// A message that has no place now.
    #[error("RDMA message {kind} has no place in phase {phase}")]
    Place {
        /// Number of its kind.
        kind: u16,
        /// Where this side stands.
        phase: String,
    },
    /// Terms that were not offered.
    #[error("the destination changed {0}, which was not its to change")]
    Terms(&'static str),
    /// Chunks that are no unit of this guest.
    #[error("{0:?} is no unit of this guest")]
    Span(WireSpan),
    /// Pages outside of this guest.
    #[error("{0:?} is outside of this guest")]
    Range(ZeroRange),
    /// A key for memory that was not asked for, or asked for twice.
    #[error("{0:?}: {1}")]
    Key(WireSpan, &'static str),
    /// A granted address whose end can't be counted.
    #[error("{0:?} is granted at an address that can't be")]
    Address(WireSpan),
    /// More registered memory than was agreed.
    #[error("the source wants {wanted} bytes registered at once, {agreed} were agreed")]
    Budget {
        /// With the request.
        wanted: u64,
        /// By the terms.
        agreed: u64,
    },
    /// A counter that jumps or goes back.
    #[error("{what} {found}, expected {expected}")]
    Sequence {
        /// Which counter.
        what: &'static str,
        /// As received.
        found: u64,
        /// The only right value, or the largest.
        expected: u64,
    },
    /// More unacknowledged zero lists than a source sends.
    #[error("{0} zero lists at once")]
    ZeroLists(usize),
    /// A marker on a queue pair that does not exist.
    #[error("a marker on queue pair {0}")]
    Queue(u16),
}

/// Why RDMA ended. The first one is the cause; what follows from it is not reported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The other side broke the protocol.
    #[error("the peer broke the RDMA protocol")]
    Peer(#[source] PeerFault),
    /// The other side ended it.
    #[error("the peer ended RDMA: {0}")]
    Closed(String),
    /// The other side said nothing for too long.
    #[error("the peer has been silent for {0} ms")]
    Silent(u128),
    /// The destination can't register memory: most often its limit of locked memory.
    #[error("the destination can't register {0:?}")]
    Refused(WireSpan),
    /// A request failed on its own account.
    #[error("request {sequence:?} on queue pair {queue:?} failed with status {status:?}")]
    Work {
        /// Which queue pair.
        queue: QueueIndex,
        /// Which request.
        sequence: WorkSequence,
        /// How: `enum ibv_wc_status`.
        status: WorkStatus,
        /// What it wrote; `None` for a marker.
        pages: Option<PageSpan>,
    },
    /// A queue pair was taken down and no request says why.
    #[error("queue pair {0:?} was flushed without a cause")]
    Flushed(QueueIndex),
    /// A completion that belongs to nothing that was posted.
    #[error("queue pair {queue:?} completes request {sequence:?}, which is not in flight")]
    Completion {
        /// Which queue pair.
        queue: QueueIndex,
        /// Which request.
        sequence: WorkSequence,
    },
    /// Something is in flight or was asked for, and nothing has come back for too long.
    #[error("nothing was completed or answered for {0} ms")]
    Stalled(u128),
    /// This host failed.
    #[error("cannot {what}: {reason}")]
    Host {
        /// What was being done.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// Whoever drives this wanted the end.
    #[error("given up: {0}")]
    GivenUp(String),
}

impl From<PeerFault> for Failure {
    fn from(fault: PeerFault) -> Failure {
        Failure::Peer(fault)
    }
}
