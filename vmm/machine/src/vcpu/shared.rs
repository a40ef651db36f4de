//! What the vCPU threads of a machine and whoever orders them about have in common.

use super::backend::{BackendError, Kicker};
use super::countdown::Countdown;
use super::orders::Orders;
use crate::EndCause;
use crate::devices::Bus;
use martlet_engine::LoadFor;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::task::Waker;

/// See the module's comment.
pub(crate) struct Shared {
    pub(crate) orders: Orders,
    /// Threads that have yet to leave the guest after [`Task::Leave`] or [`Task::Save`].
    ///
    /// [`Task::Leave`]: super::orders::Task::Leave
    /// [`Task::Save`]: super::orders::Task::Save
    pub(crate) out: Countdown,
    /// Threads that have yet to finish saving or loading.
    pub(crate) done: Countdown,
    pub(crate) seats: Box<[Seat]>,
    pub(crate) bus: Arc<Bus>,
    /// How much of its time the guest loses, 0 to 99 per cent.
    pub(crate) throttle_percent: AtomicU8,
    ended: AtomicBool,
    ended_because: Mutex<Option<EndCause>>,
    /// Told when the guest asks for a reset.
    tell_reset: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub(crate) resets_at_triple_fault: AtomicBool,
    /// Who waits for a save, and is told when the last vCPU is out and when the last is saved.
    waker: Mutex<Option<Waker>>,
}

/// One vCPU as others see it.
pub(crate) struct Seat {
    pub(crate) kicker: Arc<dyn Kicker>,
    /// State going in or out; locked by the vCPU's thread and by the machine in turns.
    pub(crate) exchange: Mutex<Exchange>,
}

/// What a vCPU's thread gives and takes.
#[derive(Default)]
pub(crate) struct Exchange {
    /// To be loaded.
    pub(crate) input: Option<(Vec<u8>, LoadFor)>,
    /// What saving gave.
    pub(crate) saved: Option<Result<Vec<u8>, BackendError>>,
    /// What became of loading.
    pub(crate) loaded: Option<Result<(), BackendError>>,
}

impl Shared {
    pub(crate) fn new(orders: Orders, seats: Box<[Seat]>, bus: Arc<Bus>) -> Shared {
        Shared {
            orders,
            out: Countdown::default(),
            done: Countdown::default(),
            seats,
            bus,
            throttle_percent: AtomicU8::new(0),
            ended: AtomicBool::new(false),
            ended_because: Mutex::new(None),
            tell_reset: OnceLock::new(),
            resets_at_triple_fault: AtomicBool::new(false),
            waker: Mutex::new(None),
        }
    }

    /// The guest stopped for good; the first cause counts. All vCPUs leave and stay out, though
    /// the right to run them stays where it was.
    pub(crate) fn end(&self, cause: EndCause) {
        let is_reset = {
            let mut because = lock(&self.ended_because);
            because.is_none() && because.insert(cause) == &EndCause::Reset
        };
        self.ended.store(true, Ordering::SeqCst);
        self.kick_all();
        if is_reset {
            self.ask_reset();
        }
    }

    pub(crate) fn ask_reset(&self) {
        if let Some(tell) = self.tell_reset.get() {
            tell();
        }
    }

    /// As [`Shared::end`], in place of any cause before.
    pub(crate) fn end_for(&self, cause: EndCause) {
        *lock(&self.ended_because) = Some(cause);
        self.ended.store(true, Ordering::SeqCst);
        self.kick_all();
    }

    pub(crate) fn on_reset(&self, tell: Box<dyn Fn() + Send + Sync>) {
        assert!(self.tell_reset.set(tell).is_ok(), "one is told");
    }

    /// It begins anew. While no vCPU may run.
    pub(crate) fn begin_anew(&self) {
        *lock(&self.ended_because) = None;
        self.ended.store(false, Ordering::SeqCst);
    }

    /// Whether the guest stopped for good.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Why it did.
    pub(crate) fn ended_because(&self) -> Option<EndCause> {
        lock(&self.ended_because).clone()
    }

    /// Names who is told of the next save's progress.
    pub(crate) fn set_waker(&self, waker: Option<Waker>) {
        *lock(&self.waker) = waker;
    }

    /// Who is told of the last one's.
    pub(crate) fn waker(&self) -> Option<Waker> {
        lock(&self.waker).clone()
    }

    /// A vCPU is out, or saved.
    pub(crate) fn arrive(&self, countdown: &Countdown) {
        if countdown.arrive()
            && let Some(waker) = &*lock(&self.waker)
        {
            waker.wake_by_ref();
        }
    }

    /// Makes all vCPUs look at their orders.
    pub(crate) fn kick_all(&self) {
        for seat in &self.seats {
            seat.kicker.kick();
        }
    }
}

/// A poisoned lock means that a thread died at a panic of its own; the data behind these locks is
/// replaced as a whole, so it is as good as before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], if nobody else has it.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
