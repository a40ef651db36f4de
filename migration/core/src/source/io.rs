//! What an attempt at the source needs from outside, and what it is told.

use super::ending::Ended;
use crate::{Error, Progress, Rehearsal, SourceVmm};
use martlet_protocol::OperatorOverride;
use martlet_ram::{Chunk, RamBitmap, Tracker};
use martlet_units::{ByteCount, Instant};
use martlet_wire::control::{Answer, Control};
use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// What an [`Attempt`](super::Attempt) acts through: a process with threads and sockets is one, a
/// simulated world another. No call may wait for the peer, a device or a thread.
pub trait SourceIo {
    /// The present moment; never goes back.
    fn now(&self) -> Instant;

    /// The machine whose guest is moved.
    fn vmm(&self) -> &dyn SourceVmm;

    /// Ends a wait for [`Wait::Until`](super::Wait::Until) early.
    fn waker(&self) -> Waker;

    /// Whether the owner wants the guest to stay.
    fn is_cancelled(&self) -> bool;

    /// The blackout that the owner accepts; he may change it.
    fn downtime_limit(&self) -> Duration;

    /// Begins something that takes long, at the side. An [`Event`] says what came of it.
    fn begin(&mut self, work: Work);

    /// Puts a message behind those that wait for `flush`.
    fn send(&mut self, message: &Control);

    /// Sends of them what there is room for; the rest goes by itself, as room comes. Why the
    /// control connection is lost, if it is.
    fn flush(&mut self) -> Result<(), String>;

    /// Bytes of messages that wait for room.
    fn unsent(&self) -> usize;

    /// The next message of the peer, if it is there.
    fn receive(&mut self) -> Result<Option<Control>, Lost>;

    /// Breaks the control connection: nothing that was sent and is still at this host may reach the
    /// peer later on. What came and was not received is lost with it.
    fn break_control(&mut self);

    /// What was sent by all lanes so far.
    fn sent(&self) -> Sent;

    /// Sent on the control connection so far.
    fn control_bytes(&self) -> ByteCount;

    /// The lanes, once [`Work::OpenChannels`] is done.
    fn lanes(&mut self) -> Option<&mut dyn Lanes>;

    /// The wall clock (`CLOCK_REALTIME`) minus the clock of [`SourceIo::now`], in nanoseconds.
    fn wall_clock_ns(&self) -> i64;

    /// Shows the owner how it stands. Called often.
    fn show(&mut self, progress: &Progress);

    /// Tells the owner that it is over, or that an undecided attempt is settled. With an attempt
    /// that is over for good everything else may go, the lanes first.
    fn finish(&mut self, ended: Ended);

    /// The destination of an undecided attempt could not be asked, for this reason.
    fn unanswered(&mut self, reason: &Error);
}

/// The senders of guest memory, all together. Each has a queue of its own.
pub trait Lanes {
    /// How many there are; so many [`Event::BarrierSent`] end a round.
    fn count(&self) -> usize;

    /// Hands a chunk to its lane, or gives it back if that has enough to do:
    /// [`Event::LaneRoom`] follows then.
    fn offer(&mut self, chunk: Chunk) -> Result<(), Chunk>;

    /// Ends a round on every lane, behind all that it has. Once for each round.
    fn barrier(&mut self, round: u32, last: bool);

    /// Whether no bandwidth limit holds.
    fn set_unpaced(&mut self, unpaced: bool);

    /// Bytes that were sent and have not reached the peer's kernel.
    fn unacknowledged(&self) -> ByteCount;

    /// The last round is near: whatever needs it gets awake.
    fn arm(&mut self);

    /// The lanes go on by themselves.
    fn disarm(&mut self);

    /// Nothing of a last run has been sent.
    fn begin_last(&mut self);

    /// Sends the last chunks and the barriers right here, as far as there is room. Begun only while
    /// no lane has work; called until it is [`Sending::Done`] or [`Sending::Left`].
    fn send_last(&mut self, chunks: &[Chunk], round: u32) -> Result<Sending, Error>;

    /// Whether another round may follow a last one whose end was sent.
    fn outlive_last(&self) -> bool;

    /// Breaks all connections: nobody waits for the peer any more.
    fn break_all(&mut self);
}

/// How far a last run has come that is sent by [`Lanes::send_last`]. Of several lanes the greatest
/// counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sending {
    /// All of it, and the barriers, are in the channels.
    Done,
    /// Some channel has no room. A wait ends when it has.
    Blocked,
    /// Something was done, and there is more to do at once.
    Busy,
    /// The lanes have taken it over, and will say when they have sent the barriers.
    Left,
}

/// What lanes sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes handed to the connections, headers included.
    pub bytes: u64,
    /// Pages with their content.
    pub normal: u64,
    /// Pages found to be zero.
    pub zero: u64,
}

impl Sent {
    /// All pages.
    pub fn pages(self) -> u64 {
        self.normal + self.zero
    }
}

/// Something that takes long.
#[derive(Debug)]
pub enum Work {
    /// Open the data channels: [`Event::ChannelsOpened`].
    OpenChannels {
        /// How many.
        count: u16,
        /// What each shows.
        token: [u8; 16],
    },
    /// Begin dirty tracking: [`Event::Tracked`].
    Track,
    /// Mark the pages that the guest ever touched: [`Event::TouchedFound`].
    FindTouched {
        /// Where.
        into: Arc<RamBitmap>,
    },
    /// Rehearse the stop: [`Event::Rehearsed`].
    Rehearse,
    /// Digest guest memory: [`Event::Digested`].
    Digest,
    /// Ask the destination, on a connection of its own, what became of the attempt:
    /// [`Event::Asked`].
    Ask,
}

/// What happened beside the control connection.
pub enum Event {
    /// The lanes are there.
    ChannelsOpened(Result<(), Error>),
    /// Pages are tracked from now on.
    Tracked(Result<Tracker, Error>),
    /// So many pages may hold data, and are marked.
    TouchedFound(Result<u64, Error>),
    /// The stop was rehearsed.
    Rehearsed(Result<Option<Rehearsal>, Error>),
    /// The digest of this side's memory.
    Digested(Result<[u8; 32], Error>),
    /// A lane that had given a chunk back has room.
    LaneRoom,
    /// One lane sent everything of a round, and the barrier behind it.
    BarrierSent {
        /// The round.
        round: u32,
    },
    /// A lane can't go on.
    LaneLost(Error),
    /// The guest has ended by itself, or this host can't go on.
    HostFailed(Error),
    /// The owner wants an undecided attempt settled.
    Resolve,
    /// An operator wants to end one.
    Override(OperatorOverride),
    /// What the destination said of one.
    Asked(Result<Answer, Error>),
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Event::ChannelsOpened(_) => "ChannelsOpened",
            Event::Tracked(_) => "Tracked",
            Event::TouchedFound(_) => "TouchedFound",
            Event::Rehearsed(_) => "Rehearsed",
            Event::Digested(_) => "Digested",
            Event::LaneRoom => "LaneRoom",
            Event::BarrierSent { .. } => "BarrierSent",
            Event::LaneLost(_) => "LaneLost",
            Event::HostFailed(_) => "HostFailed",
            Event::Resolve => "Resolve",
            Event::Override(_) => "Override",
            Event::Asked(_) => "Asked",
        };
        f.write_str(name)
    }
}

/// Why nothing more comes from the peer. One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The connection is gone.
    Gone(String),
    /// It said something that is no message.
    Malformed(String),
}
