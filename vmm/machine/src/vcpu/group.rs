//! All vCPUs of a machine, ordered about together.
//!
//! The right to run the guest lies here while it runs: [`Group::run`] takes the permit and is the
//! only function that lets a vCPU into the guest, [`Group::wait_out`] gives it back when no vCPU
//! is in the guest any more.

use super::backend::{BackendError, VcpuBackend};
use super::orders::{Order, Orders, Task, Then};
use super::shared::{Exchange, Seat, Shared, lock};
use super::thread::{THROTTLE_RUN, VcpuThread};
use crate::EndCause;
use crate::clock;
use crate::devices::Bus;
use martlet_engine::LoadFor;
use martlet_protocol::RunPermit;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

/// See the module's comment. Calls that give orders must not overlap: the machine's lock sees to
/// that.
pub(crate) struct Group {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    permit: Mutex<Option<RunPermit>>,
    throttler: Mutex<Option<Throttler>>,
}

struct Throttler {
    thread: JoinHandle<()>,
    /// Dropped to end the thread.
    stop: Sender<()>,
}

impl Group {
    /// Starts one thread for each vCPU; `prepare` is called on it before it takes orders. Returns
    /// when all threads are ready.
    pub(crate) fn start(
        vcpus: Vec<Box<dyn VcpuBackend>>,
        bus: Arc<Bus>,
        prepare: impl Fn(usize, &mut dyn VcpuBackend) -> Result<(), BackendError>
        + Send
        + Sync
        + 'static,
    ) -> Result<Group, BackendError> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        // One processor is left to whoever receives the guest and gives the orders.
        let awake_max = u32::try_from(processors.saturating_sub(1).max(1)).unwrap_or(u32::MAX);
        let seats = vcpus
            .iter()
            .map(|vcpu| Seat { kicker: vcpu.kicker(), exchange: Mutex::new(Exchange::default()) })
            .collect();
        let shared = Arc::new(Shared::new(Orders::new(awake_max), seats, bus));
        let group = Group {
            shared: Arc::clone(&shared),
            threads: Mutex::new(Vec::new()),
            permit: Mutex::new(None),
            throttler: Mutex::new(None),
        };
        let prepare = Arc::new(prepare);
        let (ready, results) = mpsc::channel();
        let mut started = 0;
        for (number, mut backend) in vcpus.into_iter().enumerate() {
            let (shared, prepare, ready) =
                (Arc::clone(&shared), Arc::clone(&prepare), ready.clone());
            let number_u32 = u32::try_from(number).expect("vCPU numbers are small");
            let thread =
                std::thread::Builder::new().name(format!("vcpu{number}")).spawn(move || {
                    let prepared = backend.attach().and_then(|()| prepare(number, &mut *backend));
                    let _ = ready.send(prepared);
                    drop((ready, prepare));
                    let order = Order::FIRST;
                    VcpuThread { number: number_u32, backend, shared, order, running_since: None }
                        .main();
                });
            let thread = thread.map_err(BackendError::host("start a vCPU thread"))?;
            lock(&group.threads).push(thread);
            started += 1;
        }
        drop(ready);
        // On an error the group's drop ends the threads that did start.
        for _ in 0..started {
            results
                .recv()
                .map_err(|_| io::Error::other("ended early"))
                .map_err(BackendError::host("prepare a vCPU thread"))??;
        }
        Ok(group)
    }

    /// How many vCPUs there are.
    pub(crate) fn len(&self) -> usize {
        self.shared.seats.len()
    }

    fn threads(&self) -> u32 {
        u32::try_from(self.len()).expect("vCPU numbers are small")
    }

    /// Why the guest stopped for good, if it did.
    pub(crate) fn ended_because(&self) -> Option<EndCause> {
        self.shared.ended_because()
    }

    /// Whom to tell, on a vCPU's thread, that the guest wants to be reset; once.
    pub(crate) fn on_reset(&self, tell: impl Fn() + Send + Sync + 'static) {
        self.shared.on_reset(Box::new(tell));
    }

    /// From now on a triple fault is a wish to be reset.
    pub(crate) fn reset_at_triple_fault(&self) {
        self.shared.resets_at_triple_fault.store(true, Ordering::Relaxed);
    }

    /// Whether it is one.
    pub(crate) fn resets_at_triple_fault(&self) -> bool {
        self.shared.resets_at_triple_fault.load(Ordering::Relaxed)
    }

    /// Tells once more of a reset that the guest asked for.
    pub(crate) fn ask_reset(&self) {
        self.shared.ask_reset();
    }

    /// The guest can't go on, whatever it has asked for.
    pub(crate) fn end_for(&self, cause: EndCause) {
        self.shared.end_for(cause);
    }

    /// A guest that had stopped by itself begins anew. While no vCPU may run.
    pub(crate) fn begin_anew(&self) {
        assert!(lock(&self.permit).is_none(), "it begins while it may not run");
        self.shared.begin_anew();
    }

    /// Lets all vCPUs into the guest. One store for all of them; sleepers are woken.
    pub(crate) fn run(&self, permit: RunPermit) {
        let before = lock(&self.permit).replace(permit);
        assert!(before.is_none(), "a guest has one permit");
        self.shared.orders.give(Task::None, Then::Run);
    }

    /// Tells all vCPUs to leave; waits for nothing.
    pub(crate) fn begin_leave(&self) {
        self.shared.out.start(self.threads());
        self.shared.orders.give(Task::Leave, Then::Stay);
        self.shared.kick_all();
    }

    /// Tells all vCPUs to leave and then each to save itself; waits for nothing. `waker` is woken
    /// when the last one is out, and when the last one is saved.
    pub(crate) fn begin_save(&self, waker: Option<Waker>) {
        self.shared.set_waker(waker);
        self.order_save(Then::Stay);
    }

    /// Who is told of the last save's progress.
    pub(crate) fn waker(&self) -> Waker {
        self.shared.waker().unwrap_or_else(|| Waker::noop().clone())
    }

    /// Whether all are out.
    pub(crate) fn are_out(&self) -> bool {
        self.shared.out.is_done()
    }

    /// Waits until all are out.
    pub(crate) fn await_out(&self) {
        self.shared.out.wait();
    }

    /// Whether all have done what they were told.
    pub(crate) fn are_done(&self) -> bool {
        self.shared.done.is_done()
    }

    fn order_save(&self, then: Then) {
        self.shared.out.start(self.threads());
        self.shared.done.start(self.threads());
        self.shared.orders.give(Task::Save, then);
        self.shared.kick_all();
    }

    /// Waits until all are out and gives the permit back, if it was here.
    pub(crate) fn wait_out(&self) -> Option<RunPermit> {
        self.shared.out.wait();
        lock(&self.permit).take()
    }

    /// Waits for the states that `begin_save` asked for, in order of the vCPUs' numbers. The
    /// error names the vCPU.
    pub(crate) fn wait_saved(&self) -> Result<Vec<Vec<u8>>, (usize, BackendError)> {
        self.shared.done.wait();
        let states = self.shared.seats.iter().enumerate().map(|(number, seat)| {
            let saved = lock(&seat.exchange).saved.take();
            saved.unwrap_or_else(|| Err(BackendError::state("not saved"))).map_err(|e| (number, e))
        });
        // All are taken, so that an old state is never mistaken for a new one.
        states.collect::<Vec<_>>().into_iter().collect()
    }

    /// Makes all vCPUs leave and save themselves, as the stop does. Returns the time until the last
    /// was out; the states are collected with [`Group::wait_saved`]. Those that ran wait for
    /// [`Group::end_rehearsal`], but not for longer than a guest can do without them.
    pub(crate) fn begin_rehearsal(&self) -> Duration {
        let runs = lock(&self.permit).is_some();
        self.shared.set_waker(None);
        let begin = clock::now();
        self.order_save(if runs { Then::Run } else { Then::Stay });
        self.shared.out.wait();
        clock::now().since(begin)
    }

    /// All go on as they were. After the states were collected.
    pub(crate) fn end_rehearsal(&self) {
        if lock(&self.permit).is_some() {
            self.shared.orders.give(Task::None, Then::Run);
        }
    }

    /// Tells all vCPUs to load, each its state; waits for nothing. Only while none runs.
    pub(crate) fn begin_load(&self, states: Vec<Vec<u8>>, what_for: LoadFor) {
        assert_eq!(states.len(), self.len(), "one state for each vCPU");
        assert!(lock(&self.permit).is_none(), "vCPUs are loaded while they may not run");
        for (seat, state) in self.shared.seats.iter().zip(states) {
            lock(&seat.exchange).input = Some((state, what_for));
        }
        self.shared.done.start(self.threads());
        self.shared.orders.give(Task::Load, Then::Stay);
    }

    /// Waits for the loading that was begun. The error names the vCPU.
    pub(crate) fn wait_loaded(&self) -> Result<(), (usize, BackendError)> {
        self.shared.done.wait();
        let results = self.shared.seats.iter().enumerate().map(|(number, seat)| {
            let loaded = lock(&seat.exchange).loaded.take();
            loaded
                .unwrap_or_else(|| Err(BackendError::state("not loaded")))
                .map_err(|error| (number, error))
        });
        // All of them are taken, whichever failed.
        results.fold(Ok(()), Result::and)
    }

    /// Keeps the waiting threads awake for at most `limit`.
    pub(crate) fn arm(&self, limit: Duration) {
        assert!(lock(&self.permit).is_none(), "armed while it may run");
        self.shared.orders.arm(limit);
    }

    /// Takes this share of the guest's running time away, 0 to 99 per cent. A timer thread lives
    /// while it is not 0.
    pub(crate) fn set_throttle(&self, percent: u8) -> io::Result<()> {
        let percent = percent.min(99);
        self.shared.throttle_percent.store(percent, Ordering::Relaxed);
        let mut throttler = lock(&self.throttler);
        if percent == 0 {
            if let Some(Throttler { thread, stop }) = throttler.take() {
                drop(stop);
                let _ = thread.join();
            }
        } else if throttler.is_none() {
            let (stop, stopped) = mpsc::channel::<()>();
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("throttle".into()).spawn(move || {
                // Whether a vCPU has run long enough it knows itself; it only has to look.
                while stopped.recv_timeout(THROTTLE_RUN) == Err(RecvTimeoutError::Timeout) {
                    shared.kick_all();
                }
            })?;
            *throttler = Some(Throttler { thread, stop });
        }
        Ok(())
    }

    /// Ends all threads; the permit, if it is here, is dropped: the guest never runs again.
    pub(crate) fn end(&self) {
        let _ = self.set_throttle(0);
        self.shared.orders.give(Task::Exit, Then::Stay);
        self.shared.kick_all();
        for thread in lock(&self.threads).drain(..) {
            let _ = thread.join();
        }
        *lock(&self.permit) = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
