//! Waiting until all of several threads have done their part, fast.

use crate::clock;
use martlet_units::Instant;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long a waiter stays on its processor before it sleeps. A vCPU is out of the guest after
/// some 20 to 50 us; sleeping and being woken costs about as much again.
const SPIN: Duration = Duration::from_micros(60);

/// The kernel counts in signed numbers, and wakes one thread if this is negative.
pub(super) const WAKE_ALL: u32 = i32::MAX.unsigned_abs();

/// Set in the counter when someone sleeps on it.
const SLEEPING: u32 = 1 << 31;

/// Counts down from a number of threads to zero, once for each [`Countdown::start`].
#[derive(Debug, Default)]
pub(crate) struct Countdown {
    left: AtomicU32,
}

impl Countdown {
    /// Expects `threads` arrivals. Only when the ones before have all arrived.
    pub(crate) fn start(&self, threads: u32) {
        assert!(threads < SLEEPING);
        // Released to the threads by the store of the order that follows.
        let before = self.left.swap(threads, Ordering::Relaxed);
        assert_eq!(before & !SLEEPING, 0, "a countdown restarted while {before} were expected");
    }

    /// One thread did its part; whether it was the last. What it wrote before is visible to whoever
    /// waited.
    pub(crate) fn arrive(&self) -> bool {
        // Release for this thread's work; pairs with the acquire in `is_done`. Acquire so that
        // the chain of several arrivals is ordered.
        let before = self.left.fetch_sub(1, Ordering::AcqRel);
        assert_ne!(before & !SLEEPING, 0, "more arrivals than were expected");
        if before == SLEEPING | 1 {
            let _ = futex::wake(&self.left, futex::Flags::PRIVATE, WAKE_ALL);
        }
        before & !SLEEPING == 1
    }

    /// Whether all have arrived.
    pub(crate) fn is_done(&self) -> bool {
        self.left.load(Ordering::Acquire) & !SLEEPING == 0
    }

    /// Returns when all have arrived.
    pub(crate) fn wait(&self) {
        self.wait_until(None);
    }

    /// Returns when all have arrived, or at this moment.
    pub(crate) fn wait_until(&self, end: Option<Instant>) {
        let awake = clock::now().after(SPIN);
        while !self.is_done() {
            let now = clock::now();
            if end.is_some_and(|end| end <= now) {
                return;
            }
            if now < awake {
                rustix::thread::sched_yield();
                continue;
            }
            let seen = self.left.fetch_or(SLEEPING, Ordering::AcqRel) | SLEEPING;
            if seen != SLEEPING {
                let time = end.map(|end| clock::timespec(end.since(now)));
                // A change since `seen` makes the kernel return at once.
                let _ = futex::wait(&self.left, futex::Flags::PRIVATE, seen, time.as_ref());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn waits_for_all_early_and_late() {
        let countdown = Arc::new(Countdown::default());
        for delay_us in [0, 30, 2_000] {
            countdown.start(8);
            let threads: Vec<_> = (0..8)
                .map(|i| {
                    let countdown = Arc::clone(&countdown);
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_micros(delay_us * i));
                        let _ = countdown.arrive();
                    })
                })
                .collect();
            countdown.wait();
            assert!(countdown.is_done());
            threads.into_iter().for_each(|t| t.join().unwrap());
        }
    }

    #[test]
    fn nothing_to_wait_for() {
        Countdown::default().wait();
    }

    #[test]
    fn waits_no_longer_than_it_is_told_to() {
        let countdown = Countdown::default();
        countdown.start(1);
        for time in [Duration::ZERO, SPIN / 2, 10 * SPIN] {
            countdown.wait_until(Some(clock::now().after(time)));
            assert!(!countdown.is_done());
        }
        countdown.arrive();
        countdown.wait();
    }
}
