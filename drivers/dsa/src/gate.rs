//! Who may give how much to which device.

use martlet_units::Instant;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Pages that an engine would like to offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// How many.
    pub pages: u32,
    /// Fewer than this are not worth a submission.
    pub pages_min: u32,
    /// Whether the engine has pages with a device already.
    pub has_pending: bool,
    /// The NUMA node of the memory, as the engine was told.
    pub node: Option<u16>,
    /// Which channel asks, as the engine was told.
    pub channel: u16,
}

/// Leave to offload pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "every grant is finished once"]
pub struct Grant {
    /// To which of the engine's queues.
    pub queue: usize,
    /// How often a full queue may be tried.
    pub tries: u32,
    /// How many; not more than were asked for. The CPU checks the others meanwhile.
    pub pages: u32,
    /// Pages that were outstanding on the device before them; the gate's own business.
    pub ahead: u64,
    /// When it was granted.
    pub at: Instant,
}

/// How long a batch took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
    /// The engine waited for it.
    Measured(Duration),
    /// It was done already when the engine looked.
    AtMost(Duration),
}

/// What became of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The device answered.
    Completed {
        /// How long it took.
        latency: Latency,
        /// Pages that were not mapped, which the CPU checked.
        faulted: u32,
    },
    /// The queue was full at every try.
    Rejected,
    /// No answer by the deadline, or the queue had been given up for another batch's.
    TimedOut,
    /// The device answered with an error.
    Failed,
    /// There is no device any more.
    Gone,
}

/// The policy's place in the driver: asked before pages are offloaded and told what became of them.
/// Called once for many pages; never blocks.
pub trait Gate: Send + Sync {
    /// Whether pages may be offloaded; `None` for the CPU.
    fn admit(&self, now: Instant, ask: Ask) -> Option<Grant>;

    /// Asked before [`Gate::admit`] by an engine that has pages pending: whether it had better wait
    /// for those and ask again, if it gets no leave now. What a channel keeps busy itself is no
    /// reason to use the CPU.
    fn asks_again(&self) -> bool {
        false
    }

    /// Asked when pages got no leave: how long the engine had better sleep, and ask once more,
    /// before it lets the CPU check so many. Zero for not at all.
    fn pause(&self, _pages: u32) -> Duration {
        Duration::ZERO
    }

    /// A grant is used up.
    fn finish(&self, now: Instant, grant: Grant, outcome: Outcome);

    /// A queue that had timed out has answered after all.
    fn heard(&self, now: Instant, queue: usize);

    /// The CPU checked pages, in this time; told for enough pages to be measured.
    fn cpu(&self, pages: u32, time: Duration);
}

/// A gate that is always open, to the queue with the least outstanding of those that answer. For
/// tests and benchmarks: it does not care how long anything takes.
#[derive(Debug)]
pub struct OpenGate {
    queues: Vec<OpenQueue>,
    tries: u32,
}

#[derive(Debug, Default)]
struct OpenQueue {
    outstanding: AtomicU64,
    silent: AtomicBool,
}

impl OpenGate {
    /// To this many queues, each tried this often.
    pub fn new(queues: usize, tries: u32) -> OpenGate {
        OpenGate { queues: (0..queues).map(|_| OpenQueue::default()).collect(), tries }
    }
}

impl Gate for OpenGate {
    fn admit(&self, now: Instant, ask: Ask) -> Option<Grant> {
        // Relaxed throughout: counts and hints, which order nothing.
        let answers = |queue: &OpenQueue| !queue.silent.load(Ordering::Relaxed);
        let queues = self.queues.iter().enumerate().filter(|(_, queue)| answers(queue));
        let (index, queue) =
            queues.min_by_key(|(_, queue)| queue.outstanding.load(Ordering::Relaxed))?;
        let ahead = queue.outstanding.fetch_add(ask.pages.into(), Ordering::Relaxed);
        Some(Grant { queue: index, tries: self.tries, pages: ask.pages, ahead, at: now })
    }

    fn finish(&self, _now: Instant, grant: Grant, outcome: Outcome) {
        let Some(queue) = self.queues.get(grant.queue) else { return };
        queue.outstanding.fetch_sub(grant.pages.into(), Ordering::Relaxed);
        if matches!(outcome, Outcome::TimedOut | Outcome::Gone) {
            queue.silent.store(true, Ordering::Relaxed);
        }
    }

    fn heard(&self, _now: Instant, queue: usize) {
        if let Some(queue) = self.queues.get(queue) {
            queue.silent.store(false, Ordering::Relaxed);
        }
    }

    fn cpu(&self, _pages: u32, _time: Duration) {}
}
