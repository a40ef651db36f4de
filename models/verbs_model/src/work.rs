//! What goes into the network and what comes out.

use crate::region::Key;

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The one.
    A,
    /// The other.
    B,
}

impl Side {
    /// The other one.
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }

    pub(crate) fn place(self) -> usize {
        match self {
            Side::A => 0,
            Side::B => 1,
        }
    }
}

/// A reliable connection: one queue pair on each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PairId(pub usize);

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Writes local bytes to the peer's memory.
    Write {
        /// Where to, in the peer's addresses.
        to: u64,
        /// By which key.
        key: Key,
    },
    /// The same, and completes one of the peer's receives with a number.
    WriteWithImmediate {
        /// Where to; not looked at without bytes.
        to: u64,
        /// By which key.
        key: Key,
        /// The number.
        immediate: u32,
    },
    /// Reads the peer's memory into the local bytes.
    Read {
        /// Where from, in the peer's addresses.
        at: u64,
        /// By which key.
        key: Key,
    },
}

impl Operation {
    /// Where in the peer's memory, and by which key.
    pub(crate) fn remote(self) -> (u64, Key) {
        match self {
            Operation::Write { to, key } | Operation::WriteWithImmediate { to, key, .. } => {
                (to, key)
            }
            Operation::Read { at, key } => (at, key),
        }
    }

    pub(crate) fn is_read(self) -> bool {
        matches!(self, Operation::Read { .. })
    }
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Comes back in the completion.
    pub id: u64,
    /// What it does.
    pub operation: Operation,
    /// Where the local bytes are.
    pub local_at: u64,
    /// How many; with 0 no key is looked at.
    pub bytes: u64,
    /// The key of the local memory.
    pub local: Key,
    /// Whether success leaves a completion.
    pub signalled: bool,
}

/// How a connection stands, as one side knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing is known against it.
    Up,
    /// One of the sides ended it.
    Disconnected,
    /// A request failed.
    Failed,
}

/// How a request ended: numbers of `enum ibv_wc_status` (rdma-core, `infiniband/verbs.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

impl Status {
    /// Placed.
    pub const SUCCESS: Status = Status(0);
    /// The local key does not cover it.
    pub const LOCAL_PROTECTION: Status = Status(4);
    /// Something else failed.
    pub const FLUSHED: Status = Status(5);
    /// The remote key does not cover it.
    pub const REMOTE_ACCESS: Status = Status(10);
    /// The peer's NIC failed.
    pub const REMOTE_OPERATION: Status = Status(11);
    /// The peer does not answer.
    pub const RETRY_EXCEEDED: Status = Status(12);
    /// The peer had no receive, too often.
    pub const RNR_RETRY_EXCEEDED: Status = Status(13);
}

/// The end of a request or of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Of the request or the receive.
    pub id: u64,
    /// Whether it is a receive's.
    pub is_receive: bool,
    /// How it ended.
    pub status: Status,
    /// What the peer sent, for a receive that succeeded.
    pub immediate: Option<u32>,
}

/// Why requests were not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// No slot is free (`ENOMEM` of `ibv_post_send`). So many were posted before.
    Full(usize),
    /// The queue pair is closed.
    Closed,
}

/// Where something may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A request of this side begins to be executed.
    Execute(Side),
    /// A request of this side has been placed and is to be acknowledged.
    Acknowledge(Side),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request fails with this; of its bytes nothing is placed. At
    /// [`Point::Acknowledge`] everything is placed, and the acknowledgement is lost for ever.
    Fail(Status),
    /// Nothing passes for so long.
    Pause {
        /// In nanoseconds.
        ns: u64,
    },
}

/// The memory behind the NICs' addresses.
pub trait Memory {
    /// The NIC reads.
    fn read(&mut self, side: Side, address: u64, into: &mut [u8]);
    /// The NIC writes.
    fn write(&mut self, side: Side, address: u64, bytes: &[u8]);
}

/// No content: for tables, where only lengths and times count. To be used with
/// [`crate::Params::content`] off.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMemory;

impl Memory for NoMemory {
    fn read(&mut self, _: Side, _: u64, _: &mut [u8]) {}
    fn write(&mut self, _: Side, _: u64, _: &[u8]) {}
}
