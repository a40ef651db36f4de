//! The source's lanes, each the sending end of a channel with a thread of its own: [`pages`] over a
//! connection, [`rdma`] by queue pairs.
//!
//! The driver hands chunks out; a lane's thread looks for zero pages and has the lane send the rest
//! straight from guest memory. Near the blackout the driver takes all lanes over, and sends a small
//! last run itself: a thread's wake-up would cost more than the pages.

mod pages;
mod queue;
mod rdma;

use super::events::{Event, lane_error};
use super::shared::Shared;
use crate::handover::Handover;
use crate::{Error, Fault, host};
use martlet_core::source::Sending;
use martlet_policy::Pacer;
use martlet_ram::{
    BYTES_MAX, Chunk, ChunkBits, GuestRam, PageBatch, ZeroCheck, ZeroFinder, ZeroFinders,
};
use martlet_transport::{Stream, Wake, monotonic_now};
use martlet_units::ByteCount;
pub(super) use pages::PageLane;
use queue::{Inbox, Queue, Work, queue};
pub(super) use rdma::RdmaLane;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
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

impl Sent {
    pub(super) fn pages(&self) -> SentPages {
        SentPages {
            normal: self.normal.load(Ordering::Relaxed),
            zero: self.zero.load(Ordering::Relaxed),
        }
    }

    fn count(&self, bytes: ByteCount, normal: u64, zero: u64) {
        self.bytes.fetch_add(bytes.0, Ordering::Relaxed);
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
}

/// The sending end of a channel, for whoever has it in hand.
pub(super) trait Lane: Send {
    /// Does what is due besides the work of its queue; waits for nothing but room to send.
    fn step(&mut self, out: &mut Outgoing<'_, '_>) -> io::Result<Step>;

    /// Whether another chunk, or a round's end, can be taken.
    fn has_room(&self) -> bool;

    /// Takes a chunk; `zero` says which of its pages are zero.
    fn add(&mut self, out: &mut Outgoing<'_, '_>, chunk: Chunk, zero: &ChunkBits)
    -> io::Result<()>;

    /// Sends what was held back to go together with more.
    fn flush(&mut self, out: &mut Outgoing<'_, '_>) -> io::Result<()>;

    /// Ends a round behind everything that was taken.
    fn end_round(&mut self, out: &mut Outgoing<'_, '_>, round: u32, last: bool) -> io::Result<()>;

    /// The round that has ended: its barrier is sent, or, by RDMA, all of it has arrived.
    fn take_ended(&mut self) -> Option<u32>;

    /// Waits until `wake` is raised or there is something to do; may return early.
    fn wait(&mut self, common: &Common, wake: &Wake) -> io::Result<()>;

    /// Sends a part of the last run without waiting, on whatever thread.
    fn advance(
        &mut self,
        common: &Common,
        part: &mut Part<'_>,
        chunks: &mut dyn Iterator<Item = Chunk>,
        round: u32,
    ) -> io::Result<Sending>;
}

/// What came of a lane's step.
pub(super) enum Step {
    Idle,
    Busy,
    /// The channel goes on as this.
    Becomes(Box<dyn Lane>),
}

/// What a lane sends with, on its own thread.
pub(super) struct Outgoing<'a, 'ram> {
    pub(super) common: &'a Common,
    pub(super) batch: &'a mut PageBatch<'ram>,
}

/// A last run that the driver sends by itself, without ever waiting. Made before the blackout.
pub(super) struct LastRun<'ram> {
    parts: Vec<Part<'ram>>,
}

/// What of it goes by one lane.
pub(super) struct Part<'ram> {
    batch: PageBatch<'ram>,
    stage: pages::Stage,
    is_begun: bool,
    is_done: bool,
}

impl<'ram> LastRun<'ram> {
    pub(super) fn new(ram: &'ram GuestRam, lanes: &Lanes) -> LastRun<'ram> {
        let part = |_| Part {
            batch: PageBatch::new(ram),
            stage: pages::Stage::default(),
            is_begun: false,
            is_done: false,
        };
        LastRun { parts: (0..lanes.count()).map(part).collect() }
    }

    /// Nothing of it has been sent.
    pub(super) fn begin(&mut self) {
        for part in &mut self.parts {
            part.batch.clear();
            part.stage = pages::Stage::default();
            (part.is_begun, part.is_done) = (false, false);
        }
    }
}

/// All lanes of a migration.
pub(super) struct Lanes {
    common: Arc<Common>,
    handles: Vec<Handle>,
    /// The driver has the lanes until it disarms them.
    is_armed: AtomicBool,
}

struct Handle {
    lane: Arc<Handover<Box<dyn Lane>>>,
    queue: Queue,
    thread: JoinHandle<()>,
    breaker: Stream,
}

impl Handle {
    fn start(
        lane: Box<dyn Lane>,
        breaker: Stream,
        common: &Arc<Common>,
        finder: Box<dyn ZeroFinder>,
    ) -> io::Result<Handle> {
        let lane = Arc::new(Handover::new(lane)?);
        let (queue, work) = queue();
        let thread = {
            let (lane, common) = (Arc::clone(&lane), Arc::clone(common));
            host::spawn("martlet-send", move || run(&lane, &work, &common, finder))?
        };
        Ok(Handle { lane, queue, thread, breaker })
    }

    /// As [`Lanes::advance`], for this lane.
    fn advance(
        &self,
        common: &Common,
        part: &mut Part<'_>,
        chunks: &mut dyn Iterator<Item = Chunk>,
        round: u32,
    ) -> io::Result<Sending> {
        self.lane.take_over();
        let Some(mut lane) = self.lane.try_get() else {
            // Its thread is not out of it yet.
            rustix::thread::sched_yield();
            return Ok(Sending::Busy);
        };
        let sending = lane.advance(common, part, chunks, round)?;
        drop(lane);
        (part.is_begun, part.is_done) = (true, sending == Sending::Done);
        if sending == Sending::Left {
            self.lane.give_back();
        }
        Ok(sending)
    }
}

impl Lanes {
    /// Starts a thread for each lane; the streams are the connections that they send on.
    pub(super) fn start(
        lanes: Vec<(Box<dyn Lane>, Stream)>,
        common: Common,
        finders: &dyn ZeroFinders,
    ) -> io::Result<Lanes> {
        let (handles, is_armed) = (Vec::with_capacity(lanes.len()), AtomicBool::new(false));
        let mut started = Lanes { common: Arc::new(common), handles, is_armed };
        for (channel, (lane, breaker)) in (0..).zip(lanes) {
            let finder = finders.open(&started.common.ram, channel)?;
            let handle = Handle::start(lane, breaker, &started.common, finder)?;
            started.handles.push(handle);
        }
        Ok(started)
    }

    /// How many barriers a round has.
    pub(super) fn count(&self) -> usize {
        self.handles.len()
    }

    /// Hands a chunk to its lane, or gives it back if that lane has enough to do:
    /// [`Event::LaneRoom`] says when it has room again.
    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        let handle = &self.handles[usize::from(chunk.channel(self.channels()))];
        handle.queue.offer(chunk)?;
        handle.lane.poke();
        Ok(())
    }

    /// Ends a round on every lane: each sends its barrier behind its last page and says so. By
    /// RDMA it says so when all of the round is in the destination's memory. Once for each round,
    /// and only when the one before has ended everywhere: so there is always a place for it.
    pub(super) fn barrier(&self, round: u32, last: bool) {
        for handle in &self.handles {
            handle.queue.barrier(round, last);
            handle.lane.poke();
        }
    }

    /// Whether no limit holds.
    pub(super) fn set_unpaced(&self, unpaced: bool) {
        self.common.unpaced.store(unpaced, Ordering::Relaxed);
    }

    /// Bytes that were sent and have not reached the peer's kernel.
    pub(super) fn unacknowledged(&self) -> ByteCount {
        let bytes = |handle: &Handle| handle.breaker.unacknowledged().unwrap_or(0);
        ByteCount(self.handles.iter().map(bytes).sum())
    }

    /// What to wait for while a last run is blocked.
    pub(super) fn blocked<'a>(&'a self, run: &LastRun<'_>, fds: &mut Vec<PollFd<'a>>) {
        let unfinished = run.parts.iter().zip(&self.handles).filter(|(part, _)| !part.is_done);
        fds.extend(unfinished.map(|(_, handle)| PollFd::new(&handle.breaker, PollFlags::OUT)));
    }

    /// The blackout is near: the threads let go of their lanes.
    pub(super) fn arm(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
        self.handles.iter().for_each(|handle| handle.lane.take_over());
    }

    /// The threads go on by themselves.
    pub(super) fn disarm(&self) {
        self.is_armed.store(false, Ordering::Relaxed);
        self.handles.iter().for_each(|handle| handle.lane.give_back());
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
        let channels = self.channels();
        let mut sending = Sending::Done;
        for (channel, (part, handle)) in (0..).zip(run.parts.iter_mut().zip(&self.handles)) {
            if part.is_done {
                continue;
            }
            let own = chunks.iter().filter(|chunk| chunk.channel(channels) == channel);
            let sent = handle.advance(&self.common, part, &mut own.copied(), round)?;
            sending = sending.max(sent);
        }
        if sending == Sending::Done && !self.is_armed.load(Ordering::Relaxed) {
            self.disarm();
        }
        Ok(sending)
    }

    /// Breaks all connections; the threads end by themselves.
    pub(super) fn break_all(&self) {
        self.common.stop.store(true, Ordering::Relaxed);
        self.handles.iter().for_each(|handle| handle.breaker.shutdown());
        self.end();
    }

    /// Ends the threads. Call [`Lanes::break_all`] first where a peer may not be reading.
    pub(super) fn join(mut self) {
        self.end();
        for handle in self.handles.drain(..) {
            // A panic there was reported by the panic hook, and to the driver.
            let _ = handle.thread.join();
        }
    }

    fn end(&self) {
        self.handles.iter().for_each(|handle| handle.lane.end());
    }

    fn channels(&self) -> u16 {
        u16::try_from(self.handles.len()).expect("at most 128 channels")
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end();
    }
}

/// A lane's thread: ends when it is told to, or when the channel breaks.
fn run(
    lane: &Handover<Box<dyn Lane>>,
    work: &Inbox,
    common: &Common,
    mut finder: Box<dyn ZeroFinder>,
) {
    // Nobody else would say that a lane is lost whose thread panicked.
    let event = match host::guarded(|| serve(lane, work, common, finder.as_mut())) {
        Ok(Ok(())) => return,
        Ok(Err(error)) => Event::LaneLost(lane_error(&error)),
        Err(panic) => Event::LaneLost(Error::new(Fault::Host, "", panic)),
    };
    if !common.stop.load(Ordering::Relaxed) {
        common.shared.events.post(event);
    }
}

fn serve(
    lane: &Handover<Box<dyn Lane>>,
    work: &Inbox,
    common: &Common,
    finder: &mut dyn ZeroFinder,
) -> io::Result<()> {
    let ram = Arc::clone(&common.ram);
    let mut batch = PageBatch::new(&ram);
    let mut out = Outgoing { common, batch: &mut batch };
    let wake = lane.wake();
    while let Some(mut lane) = lane.turn() {
        out.batch.limit_payload(common.piece());
        let mut is_busy = match lane.step(&mut out)? {
            Step::Idle => false,
            Step::Busy => true,
            Step::Becomes(other) => {
                *lane = other;
                true
            }
        };
        if lane.has_room()
            && let Some(next) = work.try_take(&common.shared)
        {
            is_busy = true;
            do_work(lane.as_mut(), next, work, &mut out, finder)?;
        }
        if let Some(round) = lane.take_ended() {
            common.shared.events.post(Event::BarrierSent { round });
        }
        if !is_busy {
            lane.wait(common, wake)?;
        }
    }
    Ok(())
}

fn do_work(
    lane: &mut dyn Lane,
    next: Work,
    work: &Inbox,
    out: &mut Outgoing<'_, '_>,
    finder: &mut dyn ZeroFinder,
) -> io::Result<()> {
    match next {
        Work::Chunk(chunk) => {
            let room_for_one = finder.depth() - 1;
            collect(lane, out, finder, room_for_one)?;
            finder.submit(chunk);
            // Small runs of several chunks share a frame, but only while more is waiting.
            if work.is_empty() {
                collect(lane, out, finder, 0)?;
                lane.flush(out)?;
            }
            Ok(())
        }
        Work::Barrier { round, last } => {
            collect(lane, out, finder, 0)?;
            lane.end_round(out, round, last)
        }
    }
}

/// Adds the chunks that the finder has done or is doing until only `left` are pending.
fn collect(
    lane: &mut dyn Lane,
    out: &mut Outgoing<'_, '_>,
    finder: &mut dyn ZeroFinder,
    left: usize,
) -> io::Result<()> {
    while finder.pending() > left
        && let Some((chunk, zero)) = finder.collect()
    {
        lane.add(out, chunk, &zero)?;
    }
    Ok(())
}
