//! Who may give how much to which device.

use martlet_units::Instant;
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

    /// The CPU checked pages, in this time; told for enough pages to be measured.
    fn cpu(&self, pages: u32, time: Duration);
}
