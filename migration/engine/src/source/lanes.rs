//! The source's ways of guest memory and the threads that fill them: [`pages`] over connections,
//! [`rdma`] by queue pairs.

mod pages;
mod rdma;

use super::shared::Shared;
use martlet_policy::Pacer;
use martlet_ram::{Chunk, GuestRam, PageBatch, RamBitmap, ZeroCheck, ZeroFinders};
use martlet_transport::{RdmaSender, Stream};
use pages::PageLanes;
use rdma::RdmaLane;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Chunks that may wait for one lane. Few, so that a page is read soon after it was rearmed: what
/// the guest writes in between would only be sent again.
const QUEUE_CHUNKS: usize = 8;

/// A sleeping lane looks this often whether it should stop.
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
        }
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

    /// Hands a chunk to its lane, or gives it back if that lane has enough to do.
    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        match self {
            Lanes::Pages(lanes) => lanes.offer(chunk),
            Lanes::Rdma(lane) => lane.offer(chunk),
        }
    }

    /// Ends a round on every lane: each sends its barrier behind its last page and says so. By
    /// RDMA it says so when all of the round is in the destination's memory.
    pub(super) fn barrier(&self, round: u32, last: bool, patience: Duration) {
        match self {
            Lanes::Pages(lanes) => lanes.barrier(round, patience),
            Lanes::Rdma(lane) => lane.barrier(round, last, patience),
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

    /// Sends the last chunks and the barrier on the caller's thread. Only while no lane has work.
    pub(super) fn send_now(
        &self,
        batch: &mut PageBatch<'_>,
        chunks: &[Chunk],
        round: u32,
    ) -> io::Result<()> {
        match self {
            Lanes::Pages(lanes) => lanes.send_now(batch, chunks, round),
            Lanes::Rdma(lane) => lane.send_now(batch, chunks, round),
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

fn sleep_unless_stopped(common: &Common, mut delay: Duration) {
    while !delay.is_zero() && !common.stop.load(Ordering::Relaxed) {
        let slice = delay.min(SLEEP_MAX);
        std::thread::sleep(slice);
        delay -= slice;
    }
}
