//! What is posted and what comes back. The numbers are those of verbs, so that whoever drives
//! this over verbs only moves them.

use super::layout::PageSpan;
use std::fmt;

/// A queue pair of a migration, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueIndex(pub u16);

/// Names a request; counts from 0 on each queue pair. The completion of one says that all before
/// it on that queue pair are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkSequence(pub u64);

/// The key of memory registered on this side, for this side's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalKey(pub u32);

/// The key of memory registered at the destination, for the source's requests. Whoever has it can
/// write the memory, so it is not shown.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct RemoteKey(pub u32);

impl fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RemoteKey(..)")
    }
}

/// Memory at the destination that may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Of the first byte, in the destination's words.
    pub address: u64,
    /// By which key.
    pub key: RemoteKey,
}

/// What one request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Writes pages from this guest's memory to the destination's.
    Write {
        /// Which pages.
        pages: PageSpan,
        /// The key of the unit that holds them.
        local: LocalKey,
        /// Where they go.
        to: u64,
        /// By which key.
        remote: RemoteKey,
    },
    /// A write of nothing with the round's number as its immediate data: behind it nothing of the
    /// round comes on this queue pair.
    Marker {
        /// Which round.
        round: u32,
    },
}

/// A request to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Post {
    /// Its name, which comes back in the completion.
    pub sequence: WorkSequence,
    /// What it does.
    pub work: Work,
    /// Whether success leaves a completion; failure always does.
    pub signalled: bool,
}

/// How a request ended: `enum ibv_wc_status` of rdma-core, open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkStatus(pub u32);

impl WorkStatus {
    /// The destination's NIC has placed all bytes.
    pub const SUCCESS: WorkStatus = WorkStatus(0);
    /// Not done, because something else failed on the queue pair.
    pub const FLUSHED: WorkStatus = WorkStatus(5);
}

/// A completion of a queue pair's send side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// Of which request.
    pub sequence: WorkSequence,
    /// How it ended.
    pub status: WorkStatus,
}
