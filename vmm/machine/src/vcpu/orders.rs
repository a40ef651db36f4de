//! One word that tells all vCPU threads what to do.
//!
//! An order has a task, done once by each thread, and says whether the guest runs afterwards. The
//! word changes by one store, so all vCPUs see the order at the same moment; those that run are
//! kicked, those that sleep are woken, those that were armed need neither.

use super::countdown::WAKE_ALL;
use crate::clock;
use martlet_units::Instant;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// What each thread does once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Nothing.
    None,
    /// Be out of the guest and say so.
    Leave,
    /// Be out of the guest and say so, then save the vCPU and say so.
    Save,
    /// Load the vCPU and say so.
    Load,
    /// End the thread.
    Exit,
}

/// What comes after the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Wait for the next order.
    Stay,
    /// Run the guest until the next order.
    Run,
}

/// An order as a thread sees it. Two are the same only if they are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order(u32);

const RUN_BIT: u32 = 1;
const TASK_SHIFT: u32 = 1;
const TASK_MASK: u32 = 0x7;
/// Above the task: a number that makes each order differ from its 2^28 predecessors.
const NUMBER_SHIFT: u32 = 4;

impl Order {
    /// What every thread has seen when it begins.
    pub(crate) const FIRST: Order = Order(0);

    fn next(self, task: Task, then: Then) -> Order {
        let number = (self.0 >> NUMBER_SHIFT).wrapping_add(1) << NUMBER_SHIFT;
        let run = if then == Then::Run { RUN_BIT } else { 0 };
        Order(number | (task as u32) << TASK_SHIFT | run)
    }

    pub(crate) fn task(self) -> Task {
        match self.0 >> TASK_SHIFT & TASK_MASK {
            0 => Task::None,
            1 => Task::Leave,
            2 => Task::Save,
            3 => Task::Load,
            4 => Task::Exit,
            other => unreachable!("task {other} was never ordered"),
        }
    }

    pub(crate) fn then(self) -> Then {
        if self.0 & RUN_BIT == 0 { Then::Stay } else { Then::Run }
    }
}

/// The word and who sleeps on it.
#[derive(Debug)]
pub(crate) struct Orders {
    word: AtomicU32,
    sleepers: AtomicU32,
    /// Until when waiting threads stay awake, on the monotonic clock.
    awake_until: AtomicU64,
    /// How many of the waiting threads may do so: more spinning threads than processors would
    /// only keep each other, and whoever gives the orders, from running.
    awake_max: u32,
}

impl Orders {
    pub(crate) fn new(awake_max: u32) -> Orders {
        Orders {
            word: AtomicU32::new(Order::FIRST.0),
            sleepers: AtomicU32::new(0),
            awake_until: AtomicU64::new(0),
            awake_max,
        }
    }

    /// The latest order.
    pub(crate) fn current(&self) -> Order {
        // Sequentially consistent: pairs with the store in `give`, see `Kicker::clear`. Whatever
        // the giver wrote before (inputs, countdowns) is visible to who sees its order.
        Order(self.word.load(Ordering::SeqCst))
    }

    /// Gives an order and wakes who sleeps. Callers hold the machine's lock; kicking is theirs.
    pub(crate) fn give(&self, task: Task, then: Then) {
        let order = self.current().next(task, then);
        self.word.store(order.0, Ordering::SeqCst);
        // A thread counts itself before the kernel compares the word: it is seen here or it sees
        // the new word.
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, WAKE_ALL);
        }
    }

    /// Keeps waiting threads awake for `limit` from now on.
    pub(crate) fn arm(&self, limit: Duration) {
        self.awake_until.store(clock::now().after(limit).0, Ordering::SeqCst);
        self.give(Task::None, Then::Stay);
    }

    /// Waits for an order other than `seen`. `thread` is the number of the waiting thread.
    pub(crate) fn wait(&self, seen: Order, thread: u32) -> Order {
        loop {
            let order = self.current();
            if order != seen {
                return order;
            }
            let awake = thread < self.awake_max
                && clock::now() < Instant(self.awake_until.load(Ordering::SeqCst));
            if awake {
                rustix::thread::sched_yield();
            } else {
                self.sleep(seen, None);
            }
        }
    }

    /// Waits for an order other than `seen`, until `end`.
    pub(crate) fn wait_until(&self, seen: Order, end: Instant) {
        loop {
            let now = clock::now();
            if self.current() != seen || end <= now {
                return;
            }
            self.sleep(seen, Some(end.since(now)));
        }
    }

    /// Sleeps for `time` or until an order other than `seen`; may also return early for nothing.
    pub(crate) fn sleep(&self, seen: Order, time: Option<Duration>) {
        let timeout = time.map(clock::timespec);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wait(&self.word, futex::Flags::PRIVATE, seen.0, timeout.as_ref());
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_differ_and_keep_their_meaning() {
        let mut order = Order(!0xf);
        for task in [Task::None, Task::Leave, Task::Save, Task::Load, Task::Exit] {
            for then in [Then::Stay, Then::Run] {
                let next = order.next(task, then);
                assert_ne!(next, order);
                assert_eq!((next.task(), next.then()), (task, then));
                order = next;
            }
        }
    }
}
