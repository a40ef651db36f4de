//! A work queue as a driver sees it: a portal, its limits, and whether its device answers.

use crate::gate::Latency;
use crate::{CompletionWait, StatusByte};
use martlet_device_io::{Portal, Submission};
use martlet_dsa_abi::Descriptor;
use martlet_units::Instant;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// What a work queue takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Most descriptors in a batch; below 2 for a queue that takes no batches.
    pub batch_max: u32,
    /// Most bytes in a transfer.
    pub transfer_bytes_max: u64,
    /// Entries, if the queue does not say when it is full: MOVDIR64B to a dedicated one. So many
    /// submissions may be outstanding.
    pub credits: Option<u32>,
}

/// Tries that follow each other with a pause of a few instructions; later ones let time pass.
const FAST_TRIES: u32 = 16;
/// Pause instructions before the second try; twice as many before the next, and so on.
const FIRST_PAUSES: u32 = 4;
/// The most of them.
const PAUSES_MAX: u32 = 64;
/// What a slow try waits.
const SLOW_TRY: Duration = Duration::from_micros(1);

/// Looks at a record before the caller waits elsewhere: about 2 us, in which an idle device
/// finishes a few pages.
const SPINS: u32 = 64;
/// The first wait; twice as long each time. A wait that ends early or late costs little either way,
/// and one that nobody ends is repeated.
const FIRST_WAIT: Duration = Duration::from_micros(20);
/// The longest wait.
const WAIT_MAX: Duration = Duration::from_micros(500);

/// What came of handing a descriptor over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submitted {
    Accepted,
    Full,
    Gone,
}

/// One work queue, for all engines of a process.
pub struct WorkQueue {
    name: String,
    portal: Box<dyn Portal>,
    wait: Arc<dyn CompletionWait>,
    limits: QueueLimits,
    /// Submissions that are left, for queues that don't say when they are full.
    credits: Option<AtomicU32>,
    /// Its device owes an answer: nothing is submitted and nothing waited for.
    given_up: AtomicBool,
}

impl WorkQueue {
    /// A queue behind a portal. `name` is for people; `wait` is where its answers are waited for.
    pub fn new(
        name: impl Into<String>,
        portal: Box<dyn Portal>,
        wait: Arc<dyn CompletionWait>,
        limits: QueueLimits,
    ) -> Arc<WorkQueue> {
        let credits = limits.credits.map(AtomicU32::new);
        let given_up = AtomicBool::new(false);
        Arc::new(WorkQueue { name: name.into(), portal, wait, limits, credits, given_up })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it takes.
    pub fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// Whether its device owes an answer past its deadline, so that nobody uses it any more.
    pub fn is_given_up(&self) -> bool {
        // Acquire and release: who sees the device given up need not wait for it any more. Nothing
        // else is published by it.
        self.given_up.load(Ordering::Acquire)
    }

    /// Nobody uses it any more; whether that is news.
    pub(crate) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn wait(&self) -> &dyn CompletionWait {
        &*self.wait
    }

    /// Hands a descriptor over, in `tries` tries and until `until`. After acceptance the entry is
    /// given back by [`WorkQueue::entry_is_free`].
    pub(crate) fn submit(&self, descriptor: &Descriptor, tries: u32, until: Instant) -> Submitted {
        if !self.take_credit() {
            return Submitted::Full;
        }
        let bytes = descriptor.to_bytes();
        let mut attempt = 0;
        let result = loop {
            match self.portal.submit(&bytes) {
                Submission::Accepted => break Submitted::Accepted,
                Submission::Gone => break Submitted::Gone,
                Submission::Retry => {}
            }
            attempt += 1;
            if attempt >= tries || !self.pause(attempt, until) {
                break Submitted::Full;
            }
        };
        if result != Submitted::Accepted {
            self.entry_is_free();
        }
        result
    }

    /// Before another try; false if time is up.
    fn pause(&self, attempt: u32, until: Instant) -> bool {
        if attempt < FAST_TRIES {
            let pauses = FIRST_PAUSES.checked_shl(attempt - 1).unwrap_or(PAUSES_MAX);
            (0..pauses.min(PAUSES_MAX)).for_each(|_| std::hint::spin_loop());
            return true;
        }
        let now = self.wait.now();
        if now >= until || self.is_given_up() {
            return false;
        }
        self.wait.let_pass(SLOW_TRY.min(until.since(now)));
        true
    }

    /// Waits for a record until its deadline; `None` if it is late, or if the queue was given up for
    /// another one.
    pub(crate) fn await_record(
        &self,
        status: StatusByte<'_>,
        submitted: Instant,
        deadline: Instant,
    ) -> Option<Latency> {
        let wait = &*self.wait;
        let took = || wait.now().since(submitted);
        wait.poll();
        if status.is_written() {
            return Some(Latency::AtMost(took()));
        }
        for _ in 0..SPINS {
            std::hint::spin_loop();
            wait.poll();
            if status.is_written() {
                return Some(Latency::Measured(took()));
            }
        }
        let mut step = FIRST_WAIT;
        loop {
            let now = wait.now();
            if self.is_given_up() || now >= deadline {
                // It may have come since the last look.
                return status.is_written().then(|| Latency::Measured(took()));
            }
            wait.wait(status, deadline.min(now.after(step)));
            if status.is_written() {
                return Some(Latency::Measured(took()));
            }
            step = (step * 2).min(WAIT_MAX);
        }
    }

    fn take_credit(&self) -> bool {
        let Some(credits) = &self.credits else { return true };
        // Relaxed: a count. The completion record's acquire orders what an entry's end means.
        let taken = credits
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credits| credits.checked_sub(1));
        taken.is_ok()
    }

    /// The entry of an accepted descriptor is free: its record was written.
    pub(crate) fn entry_is_free(&self) {
        if let Some(credits) = &self.credits {
            credits.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .field("given_up", &self.is_given_up())
            .finish_non_exhaustive()
    }
}
