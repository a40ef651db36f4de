//! The source's ways of guest memory and the threads that fill them: [`pages`] over connections,
//! [`rdma`] by queue pairs.

mod pages;
mod queue;
mod rdma;

use super::events::Event;
use super::shared::Shared;
use martlet_policy::Pacer;
use martlet_ram::{BYTES_MAX, Chunk, GuestRam, RamBitmap, ZeroCheck, ZeroFinders};
use martlet_transport::{RdmaSender, Stream, monotonic_now};
use martlet_units::ByteCount;
use pages::PageLanes;
use rdma::RdmaLane;
use rustix::event::PollFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A lane that waits for its turn looks this often whether something has changed.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// What the lanes sent so far.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) bytes: AtomicU64,
    pub(super) normal: AtomicU64,
    pub(super) zero: AtomicU64,
}

/// Pages that the lanes sent so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentPages {
    pub(super) normal: u64,
    pub(super) zero: u64,
}

impl SentPages {
    pub(super) fn total(self) -> u64 {
        self.normal + self.zero
    }
}

impl Sent {
    pub(super) fn pages(&self) -> SentPages {
        SentPages {
            normal: self.normal.load(Ordering::Relaxed),
            zero: self.zero.load(Ordering::Relaxed),
        }
    }

    fn count(&self, normal: u64, zero: u64) {
        self.normal.fetch_add(normal, Ordering::Relaxed);
        self.zero.fetch_add(zero, Ordering::Relaxed);
    }
}

/// What all lanes share.
pub(super) struct Common {
    ram: Arc<GuestRam>,
    sent: Arc<Sent>,
    pacer: Arc<Pacer>,
    shared: Arc<Shared>,
    /// For the last pages: an accelerator's round trip costs more than they do.
    zero_check: ZeroCheck,
    stop: AtomicBool,
    /// The guest is stopped: no limit holds.
    unpaced: AtomicBool,
}

impl Common {
    pub(super) fn new(
        ram: &Arc<GuestRam>,
        sent: &Arc<Sent>,
        pacer: &Arc<Pacer>,
        shared: &Arc<Shared>,
    ) -> Common {
        Common {
            ram: Arc::clone(ram),
            sent: Arc::clone(sent),
            pacer: Arc::clone(pacer),
            shared: Arc::clone(shared),
            zero_check: ZeroCheck::detect(),
            stop: AtomicBool::new(false),
            unpaced: AtomicBool::new(false),
        }
    }

    /// Most bytes to send in one piece now.
    fn piece(&self) -> ByteCount {
        // Relaxed, as everywhere: it says when to wait, and orders nothing.
        let limit = self.pacer.slice().filter(|_| !self.unpaced.load(Ordering::Relaxed));
        limit.unwrap_or(BYTES_MAX)
    }

    /// Waits for the turn of so many bytes, in pieces that are short enough to hear of a new limit,
    /// of the guest's stop and of the end.
    fn await_turn(&self, bytes: ByteCount) {
        let slot = self.pacer.reserve(monotonic_now(), bytes);
        loop {
            let wait = self.pacer.wait(monotonic_now(), slot);
            let is_free = wait.is_zero()
                || self.stop.load(Ordering::Relaxed)
                || self.unpaced.load(Ordering::Relaxed);
            if is_free {
                return;
            }
            std::thread::sleep(wait.min(SLEEP_MAX));
        }
    }

    fn lose_lane(&self, what: &str, error: &io::Error) {
        self.shared.events.post(Event::of_lane(what, error));
    }
}

/// Posts that a lane is lost should its thread panic: nobody else would say so.
struct LaneThread<'a>(&'a Common);

impl Drop for LaneThread<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "internal error: the thread of a data channel panicked".to_owned();
            self.0.shared.events.post(Event::LaneLost { reason });
        }
    }
}

/// How far a last run has come that its driver sends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    /// All of it, and the barriers, are in the channels.
    Done,
    /// Some channel has no room.
    Blocked,
    /// Something was done, and there is more to do at once.
    Busy,
    /// The lanes' threads have taken it over, and will say when they have sent the barriers.
    Left,
}

/// A last run that the driver sends by itself, without ever waiting. Made before the blackout.
pub(super) struct LastRun<'ram> {
    pages: pages::LastRun<'ram>,
    rdma: rdma::LastRun<'ram>,
}

impl<'ram> LastRun<'ram> {
    pub(super) fn new(ram: &'ram GuestRam, lanes: &Lanes) -> LastRun<'ram> {
        let count = match lanes {
            Lanes::Pages(lanes) => lanes.count(),
            Lanes::Rdma(_) => 0,
        };
        LastRun { pages: pages::LastRun::new(ram, count), rdma: rdma::LastRun::new(ram) }
    }

    /// Nothing of it has been sent.
    pub(super) fn begin(&mut self) {
        self.pages.begin();
        self.rdma.begin();
    }
}

/// All lanes of a migration.
pub(super) enum Lanes {
    Pages(PageLanes),
    Rdma(RdmaLane),
}

impl Lanes {
    /// One lane for each connection.
    pub(super) fn start(
        streams: Vec<Stream>,
        common: Common,
        finders: &dyn ZeroFinders,
    ) -> io::Result<Lanes> {
        PageLanes::start(streams, common, finders).map(Lanes::Pages)
    }

    /// One lane that writes by RDMA. `breaker` is its sender's connection.
    pub(super) fn start_rdma(
        sender: RdmaSender,
        breaker: Stream,
        common: Common,
        dirty: &Arc<RamBitmap>,
        finders: &dyn ZeroFinders,
    ) -> io::Result<Lanes> {
        RdmaLane::start(sender, breaker, common, dirty, finders).map(Lanes::Rdma)
    }

    /// How many barriers a round has.
    pub(super) fn count(&self) -> usize {
        match self {
            Lanes::Pages(lanes) => lanes.count(),
            Lanes::Rdma(_) => 1,
        }
    }

    /// Hands a chunk to its lane, or gives it back if that lane has enough to do:
    /// [`Event::LaneRoom`] says when it has room again.
    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        match self {
            Lanes::Pages(lanes) => lanes.offer(chunk),
            Lanes::Rdma(lane) => lane.offer(chunk),
        }
    }

    /// Ends a round on every lane: each sends its barrier behind its last page and says so. By
    /// RDMA it says so when all of the round is in the destination's memory. Once for each round,
    /// and only when the one before has ended everywhere: so there is always a place for it.
    pub(super) fn barrier(&self, round: u32, last: bool) {
        match self {
            Lanes::Pages(lanes) => lanes.barrier(round, last),
            Lanes::Rdma(lane) => lane.barrier(round, last),
        }
    }

    /// Whether no limit holds.
    pub(super) fn set_unpaced(&self, unpaced: bool) {
        let common = match self {
            Lanes::Pages(lanes) => lanes.common(),
            Lanes::Rdma(lane) => lane.common(),
        };
        common.unpaced.store(unpaced, Ordering::Relaxed);
    }

    /// Bytes that were sent and have not reached the peer's kernel.
    pub(super) fn unacknowledged(&self) -> ByteCount {
        match self {
            Lanes::Pages(lanes) => lanes.unacknowledged(),
            // A round's end by RDMA is its arrival.
            Lanes::Rdma(_) => ByteCount(0),
        }
    }

    /// What to wait for while a last run is blocked.
    pub(super) fn blocked<'a>(&'a self, run: &LastRun<'_>, fds: &mut Vec<PollFd<'a>>) {
        if let Lanes::Pages(lanes) = self {
            lanes.blocked(&run.pages, fds);
        }
    }

    /// The last round is near: whatever needs it gets awake.
    pub(super) fn arm(&self) {
        if let Lanes::Rdma(lane) = self {
            lane.take_over();
        }
    }

    /// The threads of the lanes go on by themselves.
    pub(super) fn disarm(&self) {
        if let Lanes::Rdma(lane) = self {
            lane.give_back();
        }
    }

    /// Sends the last chunks and the barriers on the caller's thread, as far as there is room.
    /// Begun only while no lane has work; call it until it is [`Sending::Done`] or
    /// [`Sending::Left`].
    pub(super) fn advance(
        &self,
        run: &mut LastRun<'_>,
        chunks: &[Chunk],
        round: u32,
    ) -> io::Result<Sending> {
        match self {
            Lanes::Pages(lanes) => lanes.advance(&mut run.pages, chunks, round),
            Lanes::Rdma(lane) => lane.advance(&mut run.rdma, chunks, round),
        }
    }

    /// Breaks all connections; the threads end by themselves.
    pub(super) fn break_all(&self) {
        match self {
            Lanes::Pages(lanes) => lanes.break_all(),
            Lanes::Rdma(lane) => lane.break_all(),
        }
    }

    /// Ends the threads. Call [`Lanes::break_all`] first where a peer may not be reading.
    pub(super) fn join(self) {
        match self {
            Lanes::Pages(lanes) => lanes.join(),
            Lanes::Rdma(lane) => lane.join(),
        }
    }
}
