//! What a source is made with, and what it says.

use super::super::layout::{PageSpan, UnitIndex};
use martlet_wire::rdma::{Pinning, RdmaMessage, Terms};

/// Longest write. Long enough that the NIC's and this side's cost for a request vanishes (167 µs
/// of a 100 Gbit/s link), short enough that several queue pairs share the link well.
pub const MESSAGE_BYTES_MAX: u64 = 2 << 20;

/// How a source works. What it offers is bounded by the wire's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceConfig {
    /// A power of two from 1 MiB to 1 GiB.
    pub chunk_bytes: u64,
    /// Chunks that are registered together; a power of two.
    pub unit_chunks: u32,
    /// Queue pairs.
    pub queues: u16,
    /// When memory is registered.
    pub pinning: Pinning,
    /// How much may be registered at once, with [`Pinning::Dynamic`]; at least two units.
    pub pinned_bytes_max: u64,
    /// Most slots of a send queue that are used.
    pub slots_max: u32,
    /// Units that may be on their way to be registered at once.
    pub registrations_max: usize,
    /// Units that are asked for ahead of the cursor; see [`super::Source::prefetch`].
    pub units_ahead: usize,
    /// Messages that may wait before no more runs are taken.
    pub messages_waiting_max: usize,
    /// Writes in flight in one unit. No limit makes sense but for comparison: RDMA migration had
    /// 1 for twelve years.
    pub unit_writes_max: u32,
}

impl SourceConfig {
    /// Good for a 100 Gbit/s link: 32 MiB chunks, 4 queue pairs, 4 GiB registered at once.
    pub const DEFAULT: SourceConfig = SourceConfig {
        chunk_bytes: 32 << 20,
        unit_chunks: 1,
        queues: 4,
        pinning: Pinning::Dynamic,
        pinned_bytes_max: 4 << 30,
        slots_max: 256,
        registrations_max: 16,
        units_ahead: 16,
        messages_waiting_max: 512,
        unit_writes_max: u32::MAX,
    };
}

/// Which epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// A round.
    Round {
        /// Which, from 0.
        round: u32,
        /// Nothing follows.
        last: bool,
    },
    /// A part of one: the cursor may go anywhere now.
    Jump,
}

/// Whether a run was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// All of it; the run is empty now.
    All,
    /// Too much waits already; the run is what is left.
    Full,
}

/// What the owner of a source has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceAction {
    /// Send this to the destination, in order.
    Send(RdmaMessage),
    /// Connect this many queue pairs, then say [`super::Source::on_connected`].
    Connect(Terms),
    /// Register these pages here (local use only), in the background and as many at once as there
    /// are threads for; then say [`super::Source::on_registered`].
    Register {
        /// Which unit.
        unit: UnitIndex,
        /// Its pages.
        pages: PageSpan,
    },
    /// Deregister a unit, in the background; then say [`super::Source::on_deregistered`].
    Deregister {
        /// Which unit.
        unit: UnitIndex,
    },
    /// Nothing of the epoch can land any more; runs are taken again, from any page on.
    Drained(Drain),
    /// The last round is in the destination's memory: commit. The fabric may be dropped.
    Finished,
    /// Close all queue pairs, pass on what completions there are, then say
    /// [`super::Source::on_queues_closed`].
    CloseQueues,
    /// RDMA is over, by [`super::Source::cause`]. What [`super::Source::unretired`] reports is
    /// dirty again.
    Closed {
        /// The destination said that nothing more can land: pages may go another way now. Without
        /// that this attempt is over; the guest goes on here.
        revoked: bool,
    },
}

/// What a source did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Writes that were posted.
    pub writes: u64,
    /// Lists that they went in.
    pub post_lists: u64,
    /// Pages that they wrote.
    pub data_pages: u64,
    /// Pages that went as zero.
    pub zero_pages: u64,
    /// Lists of zero ranges.
    pub zero_lists: u64,
    /// Epochs.
    pub drains: u64,
    /// Units that had to make room for others.
    pub units_dropped: u64,
    /// Bytes that are registered or on their way.
    pub pinned_bytes: u64,
    /// Messages that were taken and not posted.
    pub messages_waiting: usize,
}
