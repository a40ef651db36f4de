//! The plainest gate there is.

use martlet_dsa::{Ask, Gate, Grant, Outcome};
use martlet_units::Instant;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A gate that is always open, to the queue with the least outstanding of those that answer: it does
/// not care how long anything takes.
#[derive(Debug)]
pub(crate) struct OpenGate {
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
    pub(crate) fn new(queues: usize, tries: u32) -> OpenGate {
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

    fn cpu(&self, _pages: u32, _time: Duration) {}
}
