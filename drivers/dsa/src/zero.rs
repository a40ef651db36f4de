//! Which pages are zero.

mod give_up;
mod group;
mod job;
mod settle;
mod submit;
mod verdict;

use crate::gate::Gate;
use crate::range::RangeLength;
use crate::slots::{Piece, SlotState, Slots};
use crate::{CpuCheck, PageRun, SharedMemory, WorkQueue};
use group::Groups;
use job::Job;
use martlet_device_io::{Dma, DmaError};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use job::{JOB_PAGES_MAX, ZeroPages};

/// Jobs that an engine has open at most: one that is collected while the other is on the device.
pub const JOBS: usize = 2;
/// Slots that an engine has beyond what two jobs need, so that some can rest.
const SPARE_SLOTS: usize = 16;
/// The most slots: what an engine does not find room for is the CPU's.
const SLOTS_MAX: usize = 64;

/// What an engine is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// From here on a batch is late, and the CPU does it again. Longer than a device takes for all
    /// that its queues hold: 128 batches of 128 pages are 2.1 ms.
    pub deadline: Duration,
    /// Pages that are offered to a device at once, at most, in as many batches as its queue makes of
    /// them. 128 keep a device busy for 16.5 us, which hides what a
    /// submission costs; more would only make others wait longer.
    pub batch_pages: u32,
    /// Fewer pages than this are the CPU's: it has checked them before a device would answer.
    pub offload_pages_min: u32,
    /// The number of the channel, for the gate.
    pub channel: u16,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            deadline: Duration::from_millis(5),
            batch_pages: 128,
            offload_pages_min: 8,
            channel: 0,
        }
    }
}

/// What an engine did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pages that a device answered for.
    pub device_pages: u64,
    /// Pages that the CPU checked, for whatever reason.
    pub cpu_pages: u64,
    /// Those of them that the device found not mapped.
    pub faulted_pages: u64,
    /// Batches that a device took.
    pub batches: u64,
    /// Batches that found their queue full.
    pub rejected: u64,
    /// Batches that were given up.
    pub timed_out: u64,
    /// Batches that came back with an error.
    pub failed: u64,
    /// Records that were written when nobody had asked: twice, by a broken device.
    pub disturbed: u64,
}

/// Tells zero pages from others, for one channel.
///
/// [`ZeroEngine::begin`] a job, and another one, then [`ZeroEngine::collect`] the first while the
/// device works on the second. Answers come job by job, in the order of their beginnings, and always
/// come. Nothing here allocates.
///
/// A page that others write meanwhile is answered by some mix of old and new, as by a CPU.
pub struct ZeroEngine<C: CpuCheck> {
    config: EngineConfig,
    queues: Vec<Arc<WorkQueue>>,
    gate: Arc<dyn Gate>,
    memory: Arc<SharedMemory>,
    cpu: C,
    slots: Slots,
    groups: Groups,
    jobs: [Job; JOBS],
    /// The job that is collected next.
    oldest: usize,
    /// How many are open.
    open: usize,
    /// The pieces that are being offered to a device.
    draft: Vec<Piece>,
    /// Most descriptors in a batch, for all queues alike.
    batch_max: usize,
    transfer_pages_max: u32,
    range: RangeLength,
    /// Whether the gate refused the last time that it was asked.
    was_refused: bool,
    stats: Stats,
}

impl<C: CpuCheck> ZeroEngine<C> {
    /// An engine that offloads to `queues` (the gate names them by their place there), as far as
    /// the pages are in `memory`; `cpu` does everything else. Its memory for descriptors comes from
    /// `dma`.
    pub fn new(
        config: EngineConfig,
        queues: Vec<Arc<WorkQueue>>,
        gate: Arc<dyn Gate>,
        memory: Arc<SharedMemory>,
        dma: &dyn Dma,
        cpu: C,
    ) -> Result<ZeroEngine<C>, DmaError> {
        let pages = config.batch_pages.clamp(1, 512);
        let config = EngineConfig { batch_pages: pages, ..config };
        let limits = queues.iter().map(|queue| queue.limits());
        let least = limits.clone().map(|limits| limits.batch_max.max(1)).min();
        let batch_max = least.unwrap_or(1).min(pages) as usize;
        let transfer = limits.map(|limits| limits.transfer_bytes_max / martlet_units::PAGE_SIZE);
        let transfer = transfer.min().unwrap_or(u64::MAX).clamp(1, JOB_PAGES_MAX as u64);
        let count = (JOBS * JOB_PAGES_MAX.div_ceil(batch_max) + SPARE_SLOTS).min(SLOTS_MAX);
        Ok(ZeroEngine {
            config,
            gate,
            memory,
            cpu,
            slots: Slots::new(dma, count, batch_max)?,
            queues,
            jobs: [Job::new(), Job::new()],
            oldest: 0,
            open: 0,
            draft: Vec::with_capacity(pages as usize + 1),
            groups: Groups::new(count),
            batch_max,
            transfer_pages_max: u32::try_from(transfer).unwrap_or(1),
            range: RangeLength::new(if batch_max > 1 { 1 } else { submit::SINGLE_PAGES_MIN }),
            was_refused: false,
            stats: Stats::default(),
        })
    }

    /// Begins a job: what a device should check is submitted, what the CPU should is checked now.
    /// The pages are numbered through all runs, in their order.
    ///
    /// # Panics
    /// If both jobs are open, or for more than [`JOB_PAGES_MAX`] pages.
    pub fn begin(&mut self, runs: &[PageRun]) {
        assert!(self.open < JOBS, "collect a job before you begin a third");
        let job = (self.oldest + self.open) % JOBS;
        self.open += 1;
        self.jobs[job].reset(runs);
        self.pump_all();
    }

    /// How many jobs are open.
    pub fn open_jobs(&self) -> usize {
        self.open
    }

    /// Ends the job that was begun first, and says which of its pages are zero; waits for the
    /// device if it must. `None` if no job is open.
    pub fn collect(&mut self) -> Option<ZeroPages> {
        if self.open == 0 {
            return None;
        }
        let job = self.oldest;
        loop {
            self.pump_all();
            match self.oldest_batch(job) {
                Some(slot) => self.await_slot(slot),
                None => break,
            }
        }
        assert!(self.jobs[job].is_given(), "what stays, waits for a batch");
        self.oldest = (self.oldest + 1) % JOBS;
        self.open -= 1;
        Some(self.jobs[job].zero())
    }

    /// Which of these pages are zero: one job, begun and collected.
    ///
    /// # Panics
    /// If a job is open, or for more than [`JOB_PAGES_MAX`] pages.
    pub fn check(&mut self, runs: &[PageRun]) -> ZeroPages {
        assert!(self.open == 0, "collect what was begun first");
        self.begin(runs);
        self.collect().expect("a job was begun")
    }

    /// What it did so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The slot that was submitted first of those that a job waits for: its own, or if a part of it
    /// waits for room, anybody's.
    fn oldest_batch(&self, job: usize) -> Option<usize> {
        let waits_for_all = !self.jobs[job].is_given();
        let busy = (0..self.slots.count()).filter_map(|slot| match self.slots.state(slot) {
            SlotState::Busy(busy) if busy.job == job => Some((false, busy.submitted, slot)),
            SlotState::Busy(busy) if waits_for_all => Some((true, busy.submitted, slot)),
            SlotState::Busy(_) | SlotState::Free | SlotState::Lost => None,
        });
        busy.min().map(|(_, _, slot)| slot)
    }
}

impl<C: CpuCheck> Drop for ZeroEngine<C> {
    /// Waits for what is outstanding, for at most one deadline. If a device owes an answer even
    /// then, the memory that it may write to is never given back.
    fn drop(&mut self) {
        while self.collect().is_some() {}
        let slots = 0..self.slots.count();
        let held = slots.filter(|slot| !matches!(self.slots.state(*slot), SlotState::Free)).count();
        if held > 0 {
            tracing::warn!(held, "a DSA device still owes answers: their memory is kept for it");
            self.slots.leak();
            // Pinned memory that the device may still read stays pinned.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl<C: CpuCheck> fmt::Debug for ZeroEngine<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroEngine")
            .field("config", &self.config)
            .field("queues", &self.queues)
            .field("batch_max", &self.batch_max)
            .field("range", &self.range)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
