//! The lane that writes by RDMA.
//!
//! One thread for all queue pairs: it posts lists and takes completions, which is little work,
//! while the devices move the bytes. Near the blackout the driver takes the lane over and drives
//! it awake. Should RDMA fail, the lane goes on with page frames on the same stream, in the same
//! round: first what is not known to have arrived, then what comes.

use super::pages::{Lane as PageLane, Outgoing, Pace};
use super::{Common, QUEUE_CHUNKS};
use crate::host;
use crate::source::events::Event;
use crossbeam_channel::{Receiver, SendTimeoutError, Sender, TryRecvError, TrySendError};
use martlet_ram::{
    Chunk, ChunkBits, PageBatch, Pushed, RamBitmap, Run, RunKind, Scanner, ZeroFinder, ZeroFinders,
};
use martlet_transport::rdma::{Offered, PageSpan};
use martlet_transport::{RdmaSender, Sent, Stream, Wake, monotonic_now, wait_any};
use martlet_units::{ByteCount, Instant, PAGE_SIZE};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::{info, warn};

/// With nothing to do the thread looks this often whether it should stop.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Pages of a bitmap's word.
const WORD_PAGES: u64 = 64;

enum Work {
    Chunk(Chunk),
    Barrier { round: u32, last: bool },
}

/// The lane, its thread and its queue.
pub(in crate::source) struct RdmaLane {
    common: Arc<Common>,
    gate: Arc<Gate>,
    state: Arc<Mutex<State>>,
    queue: Sender<Work>,
    thread: JoinHandle<()>,
    breaker: Stream,
}

/// Who drives the lane.
struct Gate {
    /// The driver does, not the thread.
    taken_over: Mutex<bool>,
    given_back: Condvar,
    /// Raised when there is work or the above changes.
    wake: Wake,
    /// Set while the thread must not sleep: the guest is stopped.
    awake: AtomicBool,
}

enum Way {
    Rdma(Box<RdmaSender>),
    Pages(PageLane),
    /// Being changed, or lost.
    None,
}

struct State {
    way: Way,
    dirty: Arc<RamBitmap>,
    /// Classified and not taken by the sender.
    runs: VecDeque<Run>,
    /// A round's end that waits for the runs before it.
    ending: Option<(u32, bool)>,
    /// A round's end that waits until all is in place.
    draining: Option<u32>,
    /// The round that is being sent.
    round: u32,
    /// Nothing is offered before, for the pace.
    hold_until: Instant,
    told_device: bool,
    rounds_done: u32,
}

impl RdmaLane {
    pub(super) fn start(
        sender: RdmaSender,
        breaker: Stream,
        common: Common,
        dirty: &Arc<RamBitmap>,
        finders: &dyn ZeroFinders,
    ) -> io::Result<RdmaLane> {
        let common = Arc::new(common);
        let finder = finders.open(&common.ram, 0)?;
        let gate = Arc::new(Gate {
            taken_over: Mutex::new(false),
            given_back: Condvar::new(),
            wake: Wake::new()?,
            awake: AtomicBool::new(false),
        });
        let state = Arc::new(Mutex::new(State {
            way: Way::Rdma(Box::new(sender)),
            dirty: Arc::clone(dirty),
            runs: VecDeque::new(),
            ending: None,
            draining: None,
            round: 0,
            hold_until: Instant(0),
            told_device: false,
            rounds_done: 0,
        }));
        let (queue, work) = crossbeam_channel::bounded(QUEUE_CHUNKS);
        let thread = {
            let (state, gate, common) =
                (Arc::clone(&state), Arc::clone(&gate), Arc::clone(&common));
            host::spawn("martlet-rdma", move || run(&state, &gate, &work, &common, finder))?
        };
        Ok(RdmaLane { common, gate, state, queue, thread, breaker })
    }

    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        match self.queue.try_send(Work::Chunk(chunk)) {
            Ok(()) => {
                self.gate.wake.raise();
                Ok(())
            }
            // A thread that ended has posted why; the driver will come to that.
            Err(
                TrySendError::Full(Work::Chunk(chunk))
                | TrySendError::Disconnected(Work::Chunk(chunk)),
            ) => Err(chunk),
            Err(_) => unreachable!("a chunk was offered"),
        }
    }

    pub(super) fn barrier(&self, round: u32, last: bool, patience: Duration) {
        match self.queue.send_timeout(Work::Barrier { round, last }, patience) {
            Ok(()) | Err(SendTimeoutError::Disconnected(_)) => {}
            Err(SendTimeoutError::Timeout(_)) => {
                let reason = format!("RDMA took no work for {} s", patience.as_secs());
                self.common.shared.events.post(Event::LaneLost { reason });
            }
        }
        self.gate.wake.raise();
    }

    /// Takes the lane from its thread, which may be a moment; the caller drives it from now on.
    pub(super) fn take_over(&self) {
        *lock(&self.gate.taken_over) = true;
        self.gate.wake.raise();
        drop(lock(&self.state));
    }

    /// The thread drives the lane again, awake until the end of the round.
    pub(super) fn give_back(&self) {
        let mut taken_over = lock(&self.gate.taken_over);
        // Relaxed: the mutex orders it.
        self.gate.awake.store(*taken_over, Ordering::Relaxed);
        *taken_over = false;
        drop(taken_over);
        self.gate.given_back.notify_all();
        self.gate.wake.raise();
    }

    /// Sends the last pages, and drives the lane until all of them are in place, without sleeping.
    pub(super) fn send_now(
        &self,
        batch: &mut PageBatch<'_>,
        chunks: &[Chunk],
        round: u32,
    ) -> io::Result<()> {
        self.take_over();
        let mut state = lock(&self.state);
        for chunk in chunks {
            let zero = chunk.zero_pages(&self.common.ram, &self.common.zero_check);
            state.add(&self.common, batch, *chunk, &zero, Pace::Unlimited)?;
        }
        state.end_round(&self.common, batch, round, true)?;
        while state.rounds_done <= round {
            if self.common.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("told to stop"));
            }
            if !state.step(&self.common, batch, Pace::Unlimited)? {
                rustix::thread::sched_yield();
            }
        }
        Ok(())
    }

    pub(super) fn break_all(&self) {
        self.common.stop.store(true, Ordering::Relaxed);
        self.breaker.shutdown();
        self.give_back();
    }

    pub(super) fn join(self) {
        drop(self.queue);
        // A panic there was reported by the panic hook; the attempt fails by its silence.
        let _ = self.thread.join();
    }
}

impl State {
    /// Does what can be done now; whether there was anything.
    fn step(&mut self, common: &Common, batch: &mut PageBatch<'_>, pace: Pace) -> io::Result<bool> {
        let Way::Rdma(sender) = &mut self.way else { return Ok(false) };
        let mut busy = sender.step().map_err(io::Error::other)?;
        if !self.told_device
            && let Some(device) = sender.device()
        {
            self.told_device = true;
            info!(%device, "guest memory goes by RDMA");
            common.shared.note_rdma(|rdma| rdma.device = Some(device));
        }
        while let Way::Rdma(sender) = &mut self.way
            && let Some(said) = sender.take()
        {
            busy = true;
            match said {
                Sent::Round { round } => self.on_round_done(round),
                Sent::FellBack { reason, rounds } => {
                    self.fall_back(common, batch, reason, rounds, pace)?;
                }
            }
        }
        Ok(self.feed(common, pace) | busy)
    }

    fn on_round_done(&mut self, round: u32) {
        self.draining = None;
        self.round = round + 1;
        self.rounds_done = round + 1;
    }

    /// Hands runs to the sender, then the round's end. What was taken is posted at the next step.
    fn feed(&mut self, common: &Common, pace: Pace) -> bool {
        let Way::Rdma(sender) = &mut self.way else { return false };
        if !sender.is_open() {
            return false;
        }
        let dirty = &self.dirty;
        sender.prefetch(|pages| is_any_dirty(dirty, pages));
        let mut busy = false;
        while let Some(run) = self.runs.front_mut() {
            if pace == Pace::Limited && monotonic_now() < self.hold_until {
                break;
            }
            let before = *run;
            let offered = sender.offer(run);
            let taken = before.count - run.count;
            busy |= taken > 0;
            count(common, before.kind, taken);
            if pace == Pace::Limited && before.kind == RunKind::Data {
                let now = monotonic_now();
                let bytes = ByteCount(u64::from(taken) * PAGE_SIZE);
                self.hold_until = now.after(common.pacer.delay(now, bytes));
            }
            match offered {
                Offered::All => self.runs.pop_front(),
                Offered::Full => break,
            };
        }
        if self.runs.is_empty()
            && let Some((round, last)) = self.ending.take()
        {
            sender.end_round(last);
            self.draining = Some(round);
            busy = true;
        }
        busy
    }

    /// Takes a chunk, by whichever way is open.
    fn add(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        chunk: Chunk,
        zero: &ChunkBits,
        pace: Pace,
    ) -> io::Result<()> {
        if let Way::Pages(lane) = &mut self.way {
            return Outgoing { common, batch, pace }.add(lane, chunk, zero);
        }
        let mut rest = chunk;
        while batch.push_chunk(&mut rest, zero) != Pushed::All {
            self.take_runs(batch);
        }
        self.take_runs(batch);
        Ok(())
    }

    fn take_runs(&mut self, batch: &mut PageBatch<'_>) {
        self.runs.extend(batch.runs());
        batch.clear();
    }

    fn end_round(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        round: u32,
        last: bool,
    ) -> io::Result<()> {
        let Way::Pages(lane) = &mut self.way else {
            self.ending = Some((round, last));
            return Ok(());
        };
        let mut outgoing = Outgoing { common, batch, pace: Pace::Unlimited };
        outgoing.flush(lane)?;
        outgoing.barrier(lane, round)?;
        self.on_round_done(round);
        Ok(())
    }

    /// Goes on over the stream: first what nobody knows to have arrived.
    fn fall_back(
        &mut self,
        common: &Common,
        batch: &mut PageBatch<'_>,
        reason: String,
        rounds: u32,
        pace: Pace,
    ) -> io::Result<()> {
        let Way::Rdma(sender) = std::mem::replace(&mut self.way, Way::None) else { return Ok(()) };
        warn!(%reason, "RDMA ended; the rest goes over the connection");
        let again = RamBitmap::new(&common.ram);
        // The destination may have all of a round although the last acknowledgements were lost.
        let arrived = self.draining.filter(|round| rounds > *round);
        if arrived.is_none() {
            for pages in sender.unretired() {
                again.region(pages.region()).set_range(pages.first_page()..pages.end());
            }
        }
        for run in self.runs.drain(..) {
            let end = run.first_page + u64::from(run.count);
            again.region(run.region).set_range(run.first_page..end);
        }
        let resent = again.count();
        common.shared.note_rdma(|rdma| {
            rdma.fell_back = Some(reason);
            rdma.pages_again = resent;
        });
        let round = arrived.map_or(self.round, |round| round + 1);
        self.way = Way::Pages(PageLane::new(sender.into_stream(), round));
        let ended = self.draining.take().or(self.ending.take().map(|(round, _)| round));
        if let Some(round) = arrived {
            self.on_round_done(round);
            return Ok(());
        }
        let mut scanner = Scanner::new(Arc::new(again));
        // They were rearmed before they were taken, so what the guest writes meanwhile is dirty.
        while let Some(chunk) = scanner.next_last() {
            let zero = chunk.zero_pages(&common.ram, &common.zero_check);
            self.add(common, batch, chunk, &zero, pace)?;
        }
        if let Way::Pages(lane) = &mut self.way {
            Outgoing { common, batch, pace }.flush(lane)?;
        }
        match ended {
            Some(round) => self.end_round(common, batch, round, false),
            None => Ok(()),
        }
    }

    fn flush(&mut self, common: &Common, batch: &mut PageBatch<'_>) -> io::Result<()> {
        match &mut self.way {
            Way::Pages(lane) => Outgoing { common, batch, pace: Pace::Limited }.flush(lane),
            Way::Rdma(_) | Way::None => Ok(()),
        }
    }

    /// Whether another chunk can be taken from the queue.
    fn has_room(&self) -> bool {
        match &self.way {
            Way::Rdma(sender) => sender.is_open() && self.ending.is_none() && self.runs.is_empty(),
            Way::Pages(_) => true,
            Way::None => false,
        }
    }
}

fn count(common: &Common, kind: RunKind, pages: u32) {
    let pages = u64::from(pages);
    match kind {
        RunKind::Data => {
            common.sent.bytes.fetch_add(pages * PAGE_SIZE, Ordering::Relaxed);
            common.sent.normal.fetch_add(pages, Ordering::Relaxed);
        }
        RunKind::Zero => {
            common.sent.zero.fetch_add(pages, Ordering::Relaxed);
        }
    }
}

fn is_any_dirty(dirty: &RamBitmap, pages: PageSpan) -> bool {
    let word = |page: u64| usize::try_from(page / WORD_PAGES).unwrap_or(usize::MAX);
    let next = dirty.region(pages.region()).next_nonzero_word(word(pages.first_page()));
    next.is_some_and(|next| next <= word(pages.end() - 1))
}

/// The lane's thread: ends when the queue is dropped or the lane is lost.
fn run(
    state: &Mutex<State>,
    gate: &Gate,
    work: &Receiver<Work>,
    common: &Common,
    mut finder: Box<dyn ZeroFinder>,
) {
    if let Err(error) = serve(state, gate, work, common, finder.as_mut())
        && !common.stop.load(Ordering::Relaxed)
    {
        common.shared.events.post(Event::of_lane("the RDMA channel broke", &error));
    }
}

fn serve(
    state: &Mutex<State>,
    gate: &Gate,
    work: &Receiver<Work>,
    common: &Common,
    finder: &mut dyn ZeroFinder,
) -> io::Result<()> {
    let ram = Arc::clone(&common.ram);
    let mut batch = PageBatch::new(&ram);
    let mut told = 0;
    while !common.stop.load(Ordering::Relaxed) {
        let mut taken_over = lock(&gate.taken_over);
        while *taken_over && !common.stop.load(Ordering::Relaxed) {
            taken_over = gate.given_back.wait(taken_over).unwrap_or_else(PoisonError::into_inner);
            // What the driver finished it knows.
            told = told.max(lock(state).rounds_done);
        }
        // Taking the state before letting go of the flag: `take_over` then waits for us.
        let mut state = lock(state);
        drop(taken_over);
        if let Some(slice) = common.pacer.slice() {
            batch.limit_payload(slice);
        }
        let mut busy = state.step(common, &mut batch, Pace::Limited)?;
        match take_work(&mut state, work, common, &mut batch, finder)? {
            Some(took) => busy |= took,
            None => return Ok(()),
        }
        while told < state.rounds_done {
            common.shared.events.post(Event::BarrierSent { round: told });
            // Relaxed: it only says how to wait.
            gate.awake.store(false, Ordering::Relaxed);
            told += 1;
        }
        if busy {
            continue;
        }
        if gate.awake.load(Ordering::Relaxed) {
            drop(state);
            rustix::thread::sched_yield();
            continue;
        }
        wait(&mut state, gate, work)?;
    }
    Ok(())
}

/// Takes chunks, and the round's end, while there is room for them; whether there were any. `None`
/// once nobody can send more.
fn take_work(
    state: &mut State,
    work: &Receiver<Work>,
    common: &Common,
    batch: &mut PageBatch<'_>,
    finder: &mut dyn ZeroFinder,
) -> io::Result<Option<bool>> {
    let mut busy = false;
    let collect =
        |state: &mut State, batch: &mut PageBatch<'_>, finder: &mut dyn ZeroFinder, left| {
            while finder.pending() > left
                && let Some((chunk, zero)) = finder.collect()
            {
                state.add(common, batch, chunk, &zero, Pace::Limited)?;
            }
            io::Result::Ok(())
        };
    while state.has_room() {
        match work.try_recv() {
            Ok(Work::Chunk(chunk)) => {
                let room_for_one = finder.depth() - 1;
                collect(state, batch, finder, room_for_one)?;
                finder.submit(chunk);
                if work.is_empty() {
                    collect(state, batch, finder, 0)?;
                    state.flush(common, batch)?;
                }
            }
            Ok(Work::Barrier { round, last }) => {
                collect(state, batch, finder, 0)?;
                state.end_round(common, batch, round, last)?;
            }
            Err(TryRecvError::Empty) => break,
            Err(TryRecvError::Disconnected) => return Ok(None),
        }
        busy = true;
    }
    Ok(Some(busy))
}

/// Waits for work, for the device, for the destination or for the pace.
fn wait(state: &mut State, gate: &Gate, work: &Receiver<Work>) -> io::Result<()> {
    gate.wake.lower();
    // What raised it before is looked at now.
    if *lock(&gate.taken_over) || (state.has_room() && !work.is_empty()) {
        return Ok(());
    }
    let limit = if state.runs.is_empty() {
        WAIT_MAX
    } else {
        let left = state.hold_until.since(monotonic_now());
        if left.is_zero() { WAIT_MAX } else { left.min(WAIT_MAX) }
    };
    match &mut state.way {
        Way::Rdma(sender) => sender.wait(&gate.wake, limit),
        Way::Pages(_) | Way::None => {
            let mut fds = [PollFd::new(&gate.wake, PollFlags::IN)];
            wait_any(&mut fds, limit).map(drop)
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
