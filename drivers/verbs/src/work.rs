//! What is posted and what comes back: keys, work requests, completions.

use bitflags::bitflags;
use std::fmt;

/// Names a registered region in requests of the process that registered it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lkey(pub u32);

/// Names a registered region in requests of the peer. Whoever has it can do with the region what
/// its [`Access`] says, until it is deregistered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rkey(pub u32);

/// An address in the memory of the process that registered it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteAddress(pub u64);

/// The number of a queue pair at its device (24 bits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueNumber(pub u32);

/// What the poster calls a request; comes back in its completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId(pub u64);

bitflags! {
    /// What a region may be used for, beside being the source of a write. The bits are those of
    /// `enum ibv_access_flags` (rdma-core, `infiniband/verbs.h`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device may write it for requests of this process: the target of a read.
        const LOCAL_WRITE = 1;
        /// The peer may write it. Needs [`Access::LOCAL_WRITE`].
        const REMOTE_WRITE = 1 << 1;
        /// The peer may read it.
        const REMOTE_READ = 1 << 2;
        /// Pages are faulted in by the device instead of being pinned, where it can.
        const ON_DEMAND = 1 << 6;
        /// Bytes may be placed in any order until the completion. A hint, ignored by devices
        /// that don't know it.
        const RELAXED_ORDERING = 1 << 20;
    }
}

/// A piece of local memory: where the bytes of a write come from, or those of a read go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Its first byte, as an address of this process.
    pub address: u64,
    /// Its length.
    pub bytes: u32,
    /// The region that it lies in.
    pub key: Lkey,
}

/// What is done with the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The local bytes go there; the peer's program is not told.
    Write {
        /// Where to.
        to: RemoteAddress,
        /// The region that holds it.
        key: Rkey,
    },
    /// As [`Operation::Write`]; then one of the peer's receives completes with `immediate`. All
    /// that was posted before on the same queue pair is in place by then.
    WriteWithImmediate {
        /// Where to. Not looked at if no bytes are written.
        to: RemoteAddress,
        /// The region that holds it.
        key: Rkey,
        /// What the peer is told.
        immediate: u32,
    },
    /// The peer's bytes come here. The local region needs [`Access::LOCAL_WRITE`].
    Read {
        /// Where from.
        from: RemoteAddress,
        /// The region that holds it.
        key: Rkey,
    },
}

/// Whether a successful request leaves a completion. A failed one always does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// It does.
    Completion,
    /// It does not. Its slot of the send queue stays taken until a later completion of the same
    /// queue pair is polled, which says that this one is done too.
    None,
}

/// One request of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// Comes back in the completion.
    pub id: WorkId,
    /// What to do.
    pub operation: Operation,
    /// The local side. With 0 bytes its address and key are not looked at.
    pub local: Sge,
    /// Whether to tell of success.
    pub signal: Signal,
}

impl WorkRequest {
    /// A write of no bytes. It names no memory, and completes when all that was posted before it
    /// is in place: what a drain posts if the last real request was not signalled.
    pub fn marker(id: WorkId) -> WorkRequest {
        WorkRequest {
            id,
            operation: Operation::Write { to: RemoteAddress(0), key: Rkey(0) },
            local: Sge::default(),
            signal: Signal::Completion,
        }
    }
}

/// How a request ended: `enum ibv_wc_status`. Open, because devices have their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

impl Status {
    /// Done: the peer's device has placed all bytes.
    pub const SUCCESS: Status = Status(0);
    /// More bytes than a message or a receive may have.
    pub const LOCAL_LENGTH: Status = Status(1);
    /// The device could not do it; often a fault of the local memory.
    pub const LOCAL_OPERATION: Status = Status(2);
    /// The local key does not cover the local bytes, or not for this use.
    pub const LOCAL_PROTECTION: Status = Status(4);
    /// Not done, as the queue pair is in error because of something else.
    pub const FLUSHED: Status = Status(5);
    /// The peer's device can't do such a request.
    pub const REMOTE_INVALID_REQUEST: Status = Status(9);
    /// The remote key does not cover the remote bytes, or not for this use.
    pub const REMOTE_ACCESS: Status = Status(10);
    /// The peer's device failed.
    pub const REMOTE_OPERATION: Status = Status(11);
    /// The peer's device does not answer.
    pub const RETRY_EXCEEDED: Status = Status(12);
    /// The peer posted no receive in time.
    pub const RNR_RETRY_EXCEEDED: Status = Status(13);

    /// Whether the request only suffered from another one's failure.
    pub const fn is_flush(self) -> bool {
        self.0 == Status::FLUSHED.0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            Status::SUCCESS => "success",
            Status::LOCAL_LENGTH => "too many bytes",
            Status::LOCAL_OPERATION => "the local device could not do it",
            Status::LOCAL_PROTECTION => "the local key does not allow it",
            Status::FLUSHED => "flushed after an earlier failure",
            Status::REMOTE_INVALID_REQUEST => "the peer's device can't do it",
            Status::REMOTE_ACCESS => "the remote key does not allow it",
            Status::REMOTE_OPERATION => "the peer's device failed",
            Status::RETRY_EXCEEDED => "the peer's device does not answer",
            Status::RNR_RETRY_EXCEEDED => "the peer posted no receive in time",
            Status(other) => return write!(f, "status {other}"),
        };
        f.write_str(text)
    }
}

/// Which queue a completion belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Side {
    /// A request that was posted by `post`.
    #[default]
    Send,
    /// A receive that was posted by `post_receives`.
    Receive,
}

/// How a posted request or receive ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// What the poster called it.
    pub id: WorkId,
    /// Which queue it was posted to.
    pub side: Side,
    /// How it ended.
    pub status: Status,
    /// For a receive that succeeded: what the peer said.
    pub immediate: Option<u32>,
}
