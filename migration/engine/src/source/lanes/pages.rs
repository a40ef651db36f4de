//! Lanes that send pages over connections.
//!
//! A lane is one channel with its thread. The driver hands out chunks; the lane looks for zero
//! pages and sends the rest straight from guest memory. In the blackout the driver may do a small
//! last run on the lanes itself: a thread's wake-up would cost more than the pages.

use super::{Common, QUEUE_CHUNKS, sleep_unless_stopped};
use crate::host;
use crate::source::events::Event;
use crossbeam_channel::{Receiver, SendTimeoutError, Sender, TrySendError};
use martlet_ram::{Chunk, ChunkBits, PageBatch, Pushed, ZeroFinder, ZeroFinders};
use martlet_transport::{PageSender, Stream, monotonic_now};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

enum Work {
    Chunk(Chunk),
    Barrier(u32),
}

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
    queue: Sender<Work>,
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
        let (queue, work) = crossbeam_channel::bounded(QUEUE_CHUNKS);
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
        match self.lane_of(&chunk).queue.try_send(Work::Chunk(chunk)) {
            Ok(()) => Ok(()),
            // A lane whose thread ended has posted why; the driver will come to that.
            Err(
                TrySendError::Full(Work::Chunk(chunk))
                | TrySendError::Disconnected(Work::Chunk(chunk)),
            ) => Err(chunk),
            Err(_) => unreachable!("a chunk was offered"),
        }
    }

    /// Ends a round on every lane: each sends its barrier behind its last page and says so.
    pub(super) fn barrier(&self, round: u32, patience: Duration) {
        for handle in &self.lanes {
            match handle.queue.send_timeout(Work::Barrier(round), patience) {
                Ok(()) | Err(SendTimeoutError::Disconnected(_)) => {}
                Err(SendTimeoutError::Timeout(_)) => {
                    self.common.shared.events.post(Event::LaneLost {
                        reason: format!("a channel took no work for {} s", patience.as_secs()),
                    })
                }
            }
        }
    }

    /// Sends chunks and the barrier on the caller's thread. Only while no lane has work.
    pub(super) fn send_now(
        &self,
        batch: &mut PageBatch<'_>,
        chunks: &[Chunk],
        round: u32,
    ) -> io::Result<()> {
        let channels = self.channels();
        for (channel, handle) in (0..).zip(&self.lanes) {
            let mut lane = lock(&handle.lane);
            let mut outgoing = Outgoing { common: &self.common, batch, pace: Pace::Unlimited };
            for chunk in chunks.iter().filter(|chunk| chunk.channel(channels) == channel) {
                let zero = chunk.zero_pages(&self.common.ram, &self.common.zero_check);
                outgoing.add(&mut lane, *chunk, &zero)?;
            }
            outgoing.flush(&mut lane)?;
            outgoing.barrier(&mut lane, round)?;
        }
        Ok(())
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
            // A panic there was reported by the panic hook; the attempt fails by its silence.
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
            let delay = common.pacer.delay(monotonic_now(), self.batch.payload());
            sleep_unless_stopped(common, delay);
        }
        let bytes = lane.sender.send(lane.round, self.batch)?;
        common.sent.bytes.fetch_add(bytes.0, Ordering::Relaxed);
        common.sent.normal.fetch_add(self.batch.data_pages(), Ordering::Relaxed);
        common.sent.zero.fetch_add(self.batch.zero_pages(), Ordering::Relaxed);
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
fn run(
    lane: &Mutex<Lane>,
    work: &Receiver<Work>,
    common: &Common,
    mut finder: Box<dyn ZeroFinder>,
) {
    if let Err(error) = serve(lane, work, common, finder.as_mut()) {
        common.shared.events.post(Event::of_lane("a data channel broke", &error));
    }
}

fn serve(
    lane: &Mutex<Lane>,
    work: &Receiver<Work>,
    common: &Common,
    finder: &mut dyn ZeroFinder,
) -> io::Result<()> {
    let ram = Arc::clone(&common.ram);
    let mut batch = PageBatch::new(&ram);
    let mut outgoing = Outgoing { common, batch: &mut batch, pace: Pace::Limited };
    for item in work {
        if let Some(slice) = common.pacer.slice() {
            outgoing.batch.limit_payload(slice);
        }
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
            Work::Barrier(round) => {
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
