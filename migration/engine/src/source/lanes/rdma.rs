//! The lane that writes by RDMA.
//!
//! One thread for all queue pairs: it posts lists and takes completions, which is little work,
//! while the devices move the bytes. Near the blackout the driver takes the lane over and drives
//! it awake. Should RDMA fail, the lane goes on with page frames on the same stream, in the same
//! round: first what is not known to have arrived, then what comes.

mod state;

use super::pages::Pace;
use super::queue::{Inbox, Queue, Work, queue};
use super::{Common, LaneThread, Sending};
use crate::host;
use crate::source::events::Event;
use crossbeam_channel::TryRecvError;
use martlet_ram::{Chunk, GuestRam, PageBatch, RamBitmap, ZeroFinder, ZeroFinders};
use martlet_transport::{RdmaSender, Stream, Wake, wait_any};
use rustix::event::{PollFd, PollFlags};
use state::{State, Way, is_turn};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

/// With nothing to do the thread looks this often whether it should stop.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// A thread that waits for its turn under a limit looks this often whether that has changed.
const TURN_MAX: Duration = Duration::from_millis(20);

/// Steps of the driver with a last run before it looks at everything else.
const STEPS_MAX: usize = 64;

/// The lane, its thread and its queue.
pub(in crate::source) struct RdmaLane {
    common: Arc<Common>,
    gate: Arc<Gate>,
    state: Arc<Mutex<State>>,
    queue: Queue,
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
            turn: None,
            fallen: None,
            told_device: false,
            rounds_done: 0,
        }));
        let (queue, work) = queue();
        let thread = {
            let (state, gate, common) =
                (Arc::clone(&state), Arc::clone(&gate), Arc::clone(&common));
            host::spawn("martlet-rdma", move || run(&state, &gate, &work, &common, finder))?
        };
        Ok(RdmaLane { common, gate, state, queue, thread, breaker })
    }

    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        self.queue.offer(chunk)?;
        self.gate.wake.raise();
        Ok(())
    }

    pub(super) fn barrier(&self, round: u32, last: bool) {
        self.queue.barrier(round, last);
        self.gate.wake.raise();
    }

    pub(super) fn common(&self) -> &Common {
        &self.common
    }

    /// Asks for the lane: its thread lets go of it after the step that it is at.
    pub(super) fn take_over(&self) {
        *lock(&self.gate.taken_over) = true;
        self.gate.wake.raise();
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

    /// Sends the last pages, and drives the lane for some steps. Done is it when all of them are in
    /// place. Without RDMA, or once that has ended, they are the thread's.
    pub(super) fn advance(
        &self,
        run: &mut LastRun<'_>,
        chunks: &[Chunk],
        round: u32,
    ) -> io::Result<Sending> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // Its thread is not out of it yet.
            Err(TryLockError::WouldBlock) => {
                rustix::thread::sched_yield();
                return Ok(Sending::Busy);
            }
            Err(TryLockError::Poisoned(_)) => return Err(io::Error::other("its thread panicked")),
        };
        if !run.is_begun {
            run.is_begun = true;
            state.take_last(&self.common, &mut run.batch, chunks, round);
        }
        for _ in 0..STEPS_MAX {
            if state.rounds_done > round {
                return Ok(Sending::Done);
            }
            if state.fallen.is_some() || !matches!(state.way, Way::Rdma(_)) {
                drop(state);
                self.give_back();
                return Ok(Sending::Left);
            }
            if !state.step(&self.common, Pace::Unlimited)? {
                rustix::thread::sched_yield();
            }
        }
        Ok(Sending::Busy)
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

/// A last run by the driver.
pub(super) struct LastRun<'ram> {
    batch: PageBatch<'ram>,
    is_begun: bool,
}

impl<'ram> LastRun<'ram> {
    pub(super) fn new(ram: &'ram GuestRam) -> LastRun<'ram> {
        LastRun { batch: PageBatch::new(ram), is_begun: false }
    }

    pub(super) fn begin(&mut self) {
        self.is_begun = false;
    }
}

/// The lane's thread: ends when the queue is dropped or the lane is lost.
fn run(
    state: &Mutex<State>,
    gate: &Gate,
    work: &Inbox,
    common: &Common,
    mut finder: Box<dyn ZeroFinder>,
) {
    let _told = LaneThread(common);
    if let Err(error) = serve(state, gate, work, common, finder.as_mut())
        && !common.stop.load(Ordering::Relaxed)
    {
        common.lose_lane("the RDMA channel broke", &error);
    }
}

fn serve(
    state: &Mutex<State>,
    gate: &Gate,
    work: &Inbox,
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
        batch.limit_payload(common.piece());
        let mut busy = state.step(common, Pace::Limited)?;
        if let Some((reason, rounds)) = state.fallen.take() {
            state.fall_back(common, &mut batch, reason, rounds, Pace::Limited)?;
        }
        state.send_left(common, &mut batch)?;
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
        wait(&mut state, gate, work, common)?;
    }
    Ok(())
}

/// Takes chunks, and the round's end, while there is room for them; whether there were any. `None`
/// once nobody can send more.
fn take_work(
    state: &mut State,
    work: &Inbox,
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
        match work.try_take(&common.shared) {
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
fn wait(state: &mut State, gate: &Gate, work: &Inbox, common: &Common) -> io::Result<()> {
    gate.wake.lower();
    // What raised it before is looked at now.
    if *lock(&gate.taken_over) || (state.has_room() && !work.is_empty()) {
        return Ok(());
    }
    let limit = if state.runs.is_empty() {
        WAIT_MAX
    } else {
        if is_turn(common, state.turn) { WAIT_MAX } else { TURN_MAX }
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
