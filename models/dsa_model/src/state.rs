//! What a device holds at a moment.

use crate::memory::Absent;
use crate::{DeviceConfig, Faults, Mode, QueueConfig};
use martlet_dsa_abi::{CompletionRecord, Descriptor};
use martlet_simulation::Agenda;
use martlet_units::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// What a device did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Descriptors that a portal took, batches counted once.
    pub accepted: u64,
    /// Submissions that were answered with "retry".
    pub retries: u64,
    /// Descriptors that a dedicated queue had no room for.
    pub overflows: u64,
    /// Operations done, in batches or alone, whatever came of them.
    pub operations: u64,
    /// Batches done.
    pub batches: u64,
    /// Operations that a page fault ended.
    pub page_faults: u64,
    /// Completion records that could not be written: no such memory, or not aligned. Hardware tells
    /// the host in its software error register.
    pub records_lost: u64,
}

/// Whether it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Running,
    Halted,
    Gone,
}

pub(crate) struct State {
    pub(crate) config: DeviceConfig,
    /// Everything due until then was done.
    pub(crate) now: Instant,
    pub(crate) life: Life,
    pub(crate) queues: Vec<Queue>,
    pub(crate) engines: Vec<Engine>,
    /// Batches under way, by the number of their submission.
    pub(crate) batches: BTreeMap<u64, Batch>,
    pub(crate) drains: Vec<Drain>,
    pub(crate) landings: Agenda<Instant, Land>,
    pub(crate) faults: Faults,
    pub(crate) absent: Absent,
    pub(crate) counters: Counters,
    pub(crate) woken: bool,
    /// Numbers submissions.
    next_number: u64,
}

pub(crate) struct Queue {
    pub(crate) config: QueueConfig,
    pub(crate) waiting: VecDeque<Waiting>,
    /// For the weighted choice between queues of a group.
    pub(crate) credit: i64,
    /// Submissions that are not done.
    pub(crate) open: BTreeSet<u64>,
}

pub(crate) struct Waiting {
    pub(crate) number: u64,
    pub(crate) descriptor: Descriptor,
}

pub(crate) struct Engine {
    pub(crate) group: u8,
    /// The batch whose descriptors it works on, by number.
    pub(crate) batch: Option<u64>,
    pub(crate) operation: Option<Operation>,
    /// Whether it took its last operation from its batch: then a queue comes first.
    pub(crate) queue_first: bool,
}

/// One descriptor on its way.
pub(crate) struct Operation {
    pub(crate) owner: Owner,
    pub(crate) descriptor: Descriptor,
    pub(crate) todo: Todo,
    /// What is left to do on the fabric, alone, in picoseconds.
    pub(crate) work_ps: u64,
    /// What it holds the engine for besides, in picoseconds.
    pub(crate) hold_ps: u64,
    pub(crate) ending: Ending,
}

/// Whose descriptor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) queue: usize,
    /// The submission's number.
    pub(crate) number: u64,
    pub(crate) in_batch: bool,
}

/// What is to be done at the end.
#[derive(Clone, Copy)]
pub(crate) enum Todo {
    Run { fault_after: Option<u32> },
    Answer(CompletionRecord),
}

/// How its completion is to go wrong.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ending {
    pub(crate) hangs: bool,
    pub(crate) silent: bool,
    pub(crate) late: Duration,
    pub(crate) again: Option<Duration>,
}

pub(crate) struct Batch {
    pub(crate) owner: Owner,
    pub(crate) descriptor: Descriptor,
    pub(crate) members: VecDeque<Descriptor>,
    pub(crate) dispatched: u32,
    pub(crate) landed: u32,
    pub(crate) failed: bool,
    /// The record to end with, if it is not told by the members: the list faulted.
    pub(crate) list_fault: Option<CompletionRecord>,
    pub(crate) ending: Ending,
}

pub(crate) struct Drain {
    pub(crate) owner: Owner,
    pub(crate) descriptor: Descriptor,
}

/// A completion that is due.
pub(crate) enum Land {
    Operation(Operation),
    Batch(u64),
    /// A record that was written before.
    Again {
        completion: u64,
        record: CompletionRecord,
    },
}

impl State {
    pub(crate) fn new(config: DeviceConfig, faults: Faults, now: Instant) -> State {
        let queue = |config: &QueueConfig| Queue {
            config: *config,
            waiting: VecDeque::new(),
            credit: 0,
            open: BTreeSet::new(),
        };
        let engine =
            |group: &u8| Engine { group: *group, batch: None, operation: None, queue_first: true };
        State {
            now,
            life: Life::Running,
            queues: config.queues.iter().map(queue).collect(),
            engines: config.engines.iter().map(engine).collect(),
            config,
            batches: BTreeMap::new(),
            drains: Vec::new(),
            landings: Agenda::default(),
            faults,
            absent: Absent::default(),
            counters: Counters::default(),
            woken: false,
            next_number: 0,
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Puts a completion at a time.
    pub(crate) fn land_at(&mut self, at: Instant, what: Land) {
        self.landings.put(at, what);
    }

    /// It was pulled out: whatever it held is never done.
    pub(crate) fn unplug(&mut self) {
        self.life = Life::Gone;
        self.landings = Agenda::default();
        self.batches.clear();
        self.drains.clear();
        for queue in &mut self.queues {
            queue.waiting.clear();
            queue.open.clear();
        }
        for engine in &mut self.engines {
            (engine.batch, engine.operation) = (None, None);
        }
    }
}

impl Queue {
    /// Whether another descriptor fits.
    pub(crate) fn has_room(&self) -> bool {
        let limit = match self.config.mode {
            Mode::Shared => self.config.threshold,
            Mode::Dedicated => self.config.size,
        };
        u32::try_from(self.waiting.len()).is_ok_and(|taken| taken < limit)
    }
}
