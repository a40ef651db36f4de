//! Messages that go along with RDMA queue pairs, on a connection of their own.
//!
//! Guest memory is written by the NIC; everything else goes over a plain byte stream, which can be
//! encrypted and authenticated: terms, keys, zero ranges, the ends of rounds, signs of life. A key
//! is as good as the memory behind it, so it never travels in the clear beside the queue pairs.
//!
//! ```text
//! offset  size  field
//!      0     4  magic     "mRDM"
//!      4     2  kind      which message
//!      6     2  flags     0
//!      8     4  length    bytes that follow
//!     12     4  reserved  0
//! ```
//!
//! | kind | message | from | body |
//! |---|---|---|---|
//! | 1, 2 | `Offer`, `Accept` | source, destination | terms, 32 bytes |
//! | 3 | `KeyRequest` | source | spans, 16 bytes each |
//! | 4 | `KeyGrant` | destination | grants, 32 bytes each |
//! | 5 | `KeyRefusal` | destination | spans |
//! | 6, 7 | `KeyDrop`, `KeyDropped` | source, destination | spans |
//! | 8 | `ZeroList` | source | sequence (8), then ranges, 16 bytes each |
//! | 9 | `ZeroDone` | destination | sequence (8) |
//! | 10 | `RoundEnd` | source | round (4), last (4), zero lists so far (8) |
//! | 11 | `Heartbeat` | both | the sender's clock in ns (8) |
//! | 12 | `Close` | both | why, UTF-8 |
//! | 13 | `Revoked` | destination | rounds that arrived (4), reserved (4) |
//! | 14 | `QueueAddress` | destination | provider (2), port (2), reserved (4) |
//!
//! Whether a span or a range is inside the guest is checked by who knows the guest; everything
//! that can be checked without is checked here, before anything is allocated.

mod codec;

pub use codec::{RDMA_KIND_MAX, RdmaHeader};

use crate::hello::Role;
use core::fmt;

/// First bytes of every frame.
pub const RDMA_MAGIC: [u8; 4] = *b"mRDM";
/// Bytes of a frame's header.
pub const RDMA_HEADER_BYTES: usize = 16;
/// The version of these messages that this build speaks.
pub const RDMA_VERSION: u16 = 1;
/// Most spans, grants or refusals in a message.
pub const SPANS_MAX: usize = 256;
/// Most ranges in a [`ZeroList`].
pub const ZERO_RANGES_MAX: usize = 512;
/// Most queue pairs of a migration.
pub const QUEUES_MAX: u16 = 64;
/// Smallest chunk.
pub const CHUNK_BYTES_MIN: u64 = 1 << 20;
/// Largest chunk.
pub const CHUNK_BYTES_MAX: u64 = 1 << 30;
/// Most chunks that are registered together.
pub const UNIT_CHUNKS_MAX: u32 = 1024;

impl Role {
    /// The connection of this module's messages; `channel` is 0 and the token the attempt's.
    pub const RDMA: Role = Role(4);
}

/// When the peer's memory is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinning {
    /// On demand, within a budget.
    Dynamic,
    /// All of it, at the start.
    All,
}

/// What both sides work by. The destination answers an offer with what it grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// [`RDMA_VERSION`].
    pub version: u16,
    /// 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// When memory is registered.
    pub pinning: Pinning,
    /// Chunks that are registered together: a power of two, at most [`UNIT_CHUNKS_MAX`].
    pub unit_chunks: u32,
    /// A power of two from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`].
    pub chunk_bytes: u64,
    /// How much the destination may have registered at once.
    pub pinned_bytes_max: u64,
}

/// Chunks of one region, as the peer names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireSpan {
    /// Number of the region, as in `Setup`.
    pub region: u16,
    /// Number of the first chunk in the region.
    pub first_chunk: u64,
    /// How many; not zero.
    pub chunks: u32,
}

/// The right to write a span.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// What may be written.
    pub span: WireSpan,
    /// Where its first byte is, in the destination's words.
    pub address: u64,
    /// The remote key.
    pub key: u32,
}

impl fmt::Debug for Grant {
    /// Without the key: whoever reads a log must not get it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grant({:?} at {:#x})", self.span, self.address)
    }
}

/// Pages that hold only zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroRange {
    /// Number of the region.
    pub region: u16,
    /// First page, counted from the region's start.
    pub first_page: u64,
    /// How many; not zero.
    pub count: u32,
}

/// Ranges to be made zero, in any order among themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroList {
    /// Counts the lists of a connection, from 1 and without gaps.
    pub sequence: u64,
    /// 1 to [`ZERO_RANGES_MAX`].
    pub ranges: Vec<ZeroRange>,
}

/// Behind this comes nothing of the round: each queue pair carries a marker, a write with the
/// round's number as its immediate data, behind its last write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundEnd {
    /// Which round, from 0 and without gaps.
    pub round: u32,
    /// Whether it is the last: the keys are revoked behind it.
    pub last: bool,
    /// The sequence of the newest [`ZeroList`]; 0 if there was none.
    pub zero_lists: u64,
}

/// A message of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RdmaMessage {
    /// Source: let us work like this.
    Offer(Terms),
    /// Destination: agreed, like that.
    Accept(Terms),
    /// Source: register these, 1 to [`SPANS_MAX`].
    KeyRequest(Vec<WireSpan>),
    /// Destination: registered.
    KeyGrant(Vec<Grant>),
    /// Destination: these can't be registered.
    KeyRefusal(Vec<WireSpan>),
    /// Source: these keys are not used any more and nothing is in flight by them.
    KeyDrop(Vec<WireSpan>),
    /// Destination: deregistered.
    KeyDropped(Vec<WireSpan>),
    /// Source: make these pages zero.
    ZeroList(ZeroList),
    /// Destination: all lists up to this one are executed.
    ZeroDone {
        /// Of the newest executed list.
        sequence: u64,
    },
    /// Source: the round is over.
    RoundEnd(RoundEnd),
    /// A sign of life.
    Heartbeat {
        /// The sender's clock.
        sent_ns: u64,
    },
    /// No more by RDMA. The destination answers the source's with [`RdmaMessage::Revoked`].
    Close {
        /// One line for people, at most [`crate::control::REASON_BYTES_MAX`].
        reason: String,
    },
    /// Destination: no queue pair and no key is left; nothing that was posted can land any more.
    Revoked {
        /// How many rounds arrived in full.
        rounds: u32,
    },
    /// Destination, before anything else: where queue pairs are let in.
    QueueAddress(QueueAddress),
}

/// Where a destination lets queue pairs in: at the address of the connection of these messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueAddress {
    /// By which kind of device; both sides need the same.
    pub provider: WireProvider,
    /// The port of the connection manager; not 0.
    pub port: u16,
}

/// A kind of RDMA device. Open: a later version may have more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireProvider(pub u16);

impl WireProvider {
    /// The kernel's verbs.
    pub const IBV: WireProvider = WireProvider(1);
    /// In software, over TCP.
    pub const SOFT: WireProvider = WireProvider(2);
}

/// What a queue pair shows in the private data of its connection request, so that it belongs to
/// the attempt whose messages go over the other connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct QueueHello {
    /// Which queue pair, below [`Terms::queues`].
    pub queue: u16,
    /// The attempt's token, as data channels show it.
    pub token: [u8; 16],
}

/// Bytes of a [`QueueHello`]; a connection request carries at most 56.
pub const QUEUE_HELLO_BYTES: usize = 32;

/// Why bytes are not a message, or not one that a peer of ours would send. The peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The frame does not start with [`RDMA_MAGIC`].
    #[error("RDMA frame starts with \"{}\" instead of its magic", .0.escape_ascii())]
    Magic([u8; 4]),
    /// Neither zero nor known.
    #[error("RDMA frame has flags {flags:#06x} or a reserved field {reserved:#x}")]
    Reserved {
        /// As received; expected 0.
        flags: u16,
        /// As received; expected 0.
        reserved: u64,
    },
    /// A message that this version does not have.
    #[error("unknown RDMA message {0}")]
    Kind(u16),
    /// A body that its kind can't have.
    #[error("RDMA message {kind} of {length} bytes")]
    Length {
        /// Which message.
        kind: u16,
        /// Bytes announced or given.
        length: usize,
    },
    /// Terms that nobody can work by.
    #[error("RDMA terms: {what} is {value}")]
    Terms {
        /// Which term.
        what: &'static str,
        /// As received.
        value: u64,
    },
    /// A span, range, grant or counter that can't be.
    #[error("RDMA message {kind}: entry {index} is impossible")]
    Entry {
        /// Which message.
        kind: u16,
        /// Which of its entries.
        index: usize,
    },
    /// A reason that is no text.
    #[error("the reason of a close is no UTF-8")]
    Text,
}

impl fmt::Debug for QueueHello {
    /// Without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueHello({})", self.queue)
    }
}
