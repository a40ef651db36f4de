//! Lanes that send pages over connections.
//!
//! A lane is one channel with its thread. The driver hands out chunks; the lane looks for zero
//! pages and sends the rest straight from guest memory. In the blackout the driver may do a small
//! last run on the lanes itself: a thread's wake-up would cost more than the pages.

use super::queue::{Inbox, Queue, Work, queue};
use super::{Common, LaneThread, Sending};
use crate::host;
use crate::source::events::Event;
use martlet_ram::{Chunk, ChunkBits, GuestRam, PageBatch, Pushed, ZeroFinder, ZeroFinders};
use martlet_transport::{PageSender, Partly, Stream};
use martlet_units::ByteCount;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The channel of a lane, used by its thread, or by the driver while the thread has no work.
pub(super) struct Lane {
    sender: PageSender,
    /// The round that is being sent.
    round: u32,
}

impl Lane {
    /// Goes on with a round over a connection that is ready for page frames.
    pub(super) fn new(stream: Stream, round: u32) -> Lane {
        Lane { sender: PageSender::new(stream), round }
    }
}

struct Handle {
    lane: Arc<Mutex<Lane>>,
    queue: Queue,
    thread: JoinHandle<()>,
    breaker: Stream,
}

/// All lanes of a migration over connections.
pub(in crate::source) struct PageLanes {
    common: Arc<Common>,
    lanes: Vec<Handle>,
}

impl PageLanes {
    pub(super) fn start(
        streams: Vec<Stream>,
        common: Common,
        finders: &dyn ZeroFinders,
    ) -> io::Result<PageLanes> {
        let common = Arc::new(common);
        let mut lanes = PageLanes { common, lanes: Vec::with_capacity(streams.len()) };
        for (channel, stream) in (0..).zip(streams) {
            let finder = finders.open(&lanes.common.ram, channel)?;
            let handle = lanes.start_lane(stream, finder)?;
            lanes.lanes.push(handle);
        }
        Ok(lanes)
    }

    fn start_lane(&self, stream: Stream, finder: Box<dyn ZeroFinder>) -> io::Result<Handle> {
        let breaker = stream.try_clone()?;
        let lane = Arc::new(Mutex::new(Lane::new(stream, 0)));
        let (queue, work) = queue();
        let thread = {
            let (lane, common) = (Arc::clone(&lane), Arc::clone(&self.common));
            host::spawn("martlet-send", move || run(&lane, &work, &common, finder))?
        };
        Ok(Handle { lane, queue, thread, breaker })
    }

    pub(super) fn count(&self) -> usize {
        self.lanes.len()
    }

    /// Hands a chunk to its lane, or gives it back if that lane has enough to do.
    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        self.lane_of(&chunk).queue.offer(chunk)
    }

    /// Ends a round on every lane: each sends its barrier behind its last page and says so.
    pub(super) fn barrier(&self, round: u32, last: bool) {
        self.lanes.iter().for_each(|handle| handle.queue.barrier(round, last));
    }

    pub(super) fn common(&self) -> &Common {
        &self.common
    }

    pub(super) fn unacknowledged(&self) -> ByteCount {
        let bytes = |handle: &Handle| handle.breaker.unacknowledged().unwrap_or(0);
        ByteCount(self.lanes.iter().map(bytes).sum())
    }

    pub(super) fn blocked<'a>(&'a self, run: &LastRun<'_>, fds: &mut Vec<PollFd<'a>>) {
        let unfinished = |(part, _): &(&Part<'_>, _)| part.step != Step::Done;
        let handles = run.parts.iter().zip(&self.lanes).filter(unfinished);
        fds.extend(handles.map(|(_, handle)| PollFd::new(&handle.breaker, PollFlags::OUT)));
    }

    /// Sends chunks and the barriers on the caller's thread, as far as there is room. Begun only
    /// while no lane has work.
    pub(super) fn advance(
        &self,
        run: &mut LastRun<'_>,
        chunks: &[Chunk],
        round: u32,
    ) -> io::Result<Sending> {
        let channels = self.channels();
        let mut sending = Sending::Done;
        for (channel, (part, handle)) in (0..).zip(run.parts.iter_mut().zip(&self.lanes)) {
            let mut own = chunks.iter().filter(|chunk| chunk.channel(channels) == channel);
            let mut lane = lock(&handle.lane);
            if part.advance(&self.common, &mut lane, &mut own, round)? == Sending::Blocked {
                sending = Sending::Blocked;
            }
        }
        Ok(sending)
    }

    /// Breaks all connections; the threads end by themselves.
    pub(super) fn break_all(&self) {
        self.common.stop.store(true, Ordering::Relaxed);
        for handle in &self.lanes {
            handle.breaker.shutdown();
        }
    }

    /// Ends the threads. Call [`Lanes::break_all`] first where a peer may not be reading.
    pub(super) fn join(self) {
        for handle in self.lanes {
            drop(handle.queue);
            // A panic there was reported by the panic hook, and to the driver.
            let _ = handle.thread.join();
        }
    }

    fn lane_of(&self, chunk: &Chunk) -> &Handle {
        &self.lanes[usize::from(chunk.channel(self.channels()))]
    }

    fn channels(&self) -> u16 {
        u16::try_from(self.lanes.len()).expect("at most 128 channels")
    }
}

/// A last run on all lanes, by the driver.
pub(super) struct LastRun<'ram> {
    parts: Vec<Part<'ram>>,
}

/// What of it goes by one lane.
struct Part<'ram> {
    batch: PageBatch<'ram>,
    /// Chunks of this lane that were taken.
    taken: usize,
    /// What of the newest of them is not in a batch yet.
    rest: Option<(Chunk, ChunkBits)>,
    step: Step,
    /// How far the frame is that is being sent.
    frame: Partly,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Fill,
    Pages,
    Barrier,
    Done,
}

impl<'ram> LastRun<'ram> {
    pub(super) fn new(ram: &'ram GuestRam, lanes: usize) -> LastRun<'ram> {
        let part = |_| Part {
            batch: PageBatch::new(ram),
            taken: 0,
            rest: None,
            step: Step::Fill,
            frame: Partly::default(),
        };
        LastRun { parts: (0..lanes).map(part).collect() }
    }

    pub(super) fn begin(&mut self) {
        for part in &mut self.parts {
            part.batch.clear();
            (part.taken, part.rest, part.step) = (0, None, Step::Fill);
        }
    }
}

impl Part<'_> {
    fn advance<'c>(
        &mut self,
        common: &Common,
        lane: &mut Lane,
        chunks: &mut impl Iterator<Item = &'c Chunk>,
        round: u32,
    ) -> io::Result<Sending> {
        // Those that were taken before.
        let mut chunks = chunks.skip(self.taken);
        loop {
            match self.step {
                Step::Fill => {
                    self.fill(common, &mut chunks);
                    self.frame = Partly::default();
                    self.step = if self.batch.is_empty() { Step::Barrier } else { Step::Pages };
                }
                Step::Pages => {
                    let bytes = lane.sender.try_send(lane.round, &self.batch, &mut self.frame)?;
                    common.sent.bytes.fetch_add(bytes.0, Ordering::Relaxed);
                    if !self.frame.is_all() {
                        return Ok(Sending::Blocked);
                    }
                    common.sent.count(self.batch.data_pages(), self.batch.zero_pages());
                    self.batch.clear();
                    self.step = Step::Fill;
                }
                Step::Barrier => {
                    let bytes = lane.sender.try_barrier(round, &mut self.frame)?;
                    common.sent.bytes.fetch_add(bytes.0, Ordering::Relaxed);
                    if !self.frame.is_all() {
                        return Ok(Sending::Blocked);
                    }
                    lane.round = round + 1;
                    self.step = Step::Done;
                }
                Step::Done => return Ok(Sending::Done),
            }
        }
    }

    /// Fills the batch with what comes next.
    fn fill<'c>(&mut self, common: &Common, chunks: &mut impl Iterator<Item = &'c Chunk>) {
        loop {
            if let Some((chunk, zero)) = &mut self.rest
                && self.batch.push_chunk(chunk, zero) != Pushed::All
            {
                return;
            }
            let Some(chunk) = chunks.next() else {
                self.rest = None;
                return;
            };
            self.taken += 1;
            self.rest = Some((*chunk, chunk.zero_pages(&common.ram, &common.zero_check)));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    Limited,
    Unlimited,
}

/// What goes onto a lane: by its thread at the pre-copy's pace, or by the driver without limit.
pub(super) struct Outgoing<'a, 'ram> {
    pub(super) common: &'a Common,
    pub(super) batch: &'a mut PageBatch<'ram>,
    pub(super) pace: Pace,
}

impl Outgoing<'_, '_> {
    pub(super) fn add(
        &mut self,
        lane: &mut Lane,
        chunk: Chunk,
        zero: &ChunkBits,
    ) -> io::Result<()> {
        let mut rest = chunk;
        while self.batch.push_chunk(&mut rest, zero) != Pushed::All {
            self.flush(lane)?;
        }
        Ok(())
    }

    /// Adds the chunks that the finder has done or is doing until only `left` are pending.
    fn collect(
        &mut self,
        lane: &mut Lane,
        finder: &mut dyn ZeroFinder,
        left: usize,
    ) -> io::Result<()> {
        while finder.pending() > left
            && let Some((chunk, zero)) = finder.collect()
        {
            self.add(lane, chunk, &zero)?;
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, lane: &mut Lane) -> io::Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let common = self.common;
        if self.pace == Pace::Limited {
            common.await_turn(self.batch.payload());
        }
        let bytes = lane.sender.send(lane.round, self.batch)?;
        common.sent.bytes.fetch_add(bytes.0, Ordering::Relaxed);
        common.sent.count(self.batch.data_pages(), self.batch.zero_pages());
        self.batch.clear();
        Ok(())
    }

    pub(super) fn barrier(&mut self, lane: &mut Lane, round: u32) -> io::Result<()> {
        let bytes = lane.sender.barrier(round)?;
        self.common.sent.bytes.fetch_add(bytes.0, Ordering::Relaxed);
        lane.round = round + 1;
        Ok(())
    }
}

/// A lane's thread: ends when the queue is dropped or the channel breaks.
fn run(lane: &Mutex<Lane>, work: &Inbox, common: &Common, mut finder: Box<dyn ZeroFinder>) {
    let _told = LaneThread(common);
    if let Err(error) = serve(lane, work, common, finder.as_mut()) {
        common.lose_lane("a data channel broke", &error);
    }
}

fn serve(
    lane: &Mutex<Lane>,
    work: &Inbox,
    common: &Common,
    finder: &mut dyn ZeroFinder,
) -> io::Result<()> {
    let ram = Arc::clone(&common.ram);
    let mut batch = PageBatch::new(&ram);
    let mut outgoing = Outgoing { common, batch: &mut batch, pace: Pace::Limited };
    while let Some(item) = work.take(&common.shared) {
        outgoing.batch.limit_payload(common.piece());
        let mut lane = lock(lane);
        match item {
            Work::Chunk(chunk) => {
                let room_for_one = finder.depth() - 1;
                outgoing.collect(&mut lane, finder, room_for_one)?;
                finder.submit(chunk);
                // Small runs of several chunks share a frame, but only while more is waiting.
                if work.is_empty() {
                    outgoing.collect(&mut lane, finder, 0)?;
                    outgoing.flush(&mut lane)?;
                }
            }
            Work::Barrier { round, .. } => {
                outgoing.collect(&mut lane, finder, 0)?;
                outgoing.flush(&mut lane)?;
                outgoing.barrier(&mut lane, round)?;
                drop(lane);
                common.shared.events.post(Event::BarrierSent { round });
            }
        }
    }
    Ok(())
}

fn lock(lane: &Mutex<Lane>) -> MutexGuard<'_, Lane> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}
