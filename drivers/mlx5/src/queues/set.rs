//! All virtqueues of a device.

use super::fate::Faults;
use super::queue::{Common, Fields, LogTo, Object, Place, Queue};
use super::table::Table;
use super::umem::{self, Retired};
use crate::batch::Batch;
use crate::command::Keep;
use crate::firmware::Firmware;
use crate::memory::MapRef;
use crate::options::Pace;
use martlet_mlx5_abi::capability::VirtioCapabilities;
use martlet_vdpa::{MapRun, QueueState};
use std::sync::{Arc, PoisonError};

/// Where the rings of a split queue have their indices (virtio 1.3, 2.7.6 and 2.7.8).
const AVAILABLE_INDEX: u64 = 2;
const USED_INDEX: u64 = 2;

/// What the guest sees of a queue's start and stop.
pub(crate) trait Gates {
    /// Kicks reach the device from now on; it is kicked, and the guest notified, once.
    fn open(&self, queue: usize);

    /// Kicks are forgotten from now on.
    fn close(&self, queue: usize);
}

/// An empty ring of the driver's own, on which queues are run before their guest arrives.
pub(crate) struct Scratch {
    pub(crate) place: Place,
    pub(crate) keep: Keep,
}

/// What objects on a function have that is stopped: to be held until it has.
#[expect(dead_code, reason = "it is there to be held")]
pub(crate) struct OldObjects {
    objects: Vec<Object>,
    scratch: Option<Scratch>,
    map: Option<MapRef>,
    retired: Retired,
}

/// All virtqueues of a device, and what they have in common.
pub(crate) struct Queues {
    pub(crate) list: Vec<Queue>,
    /// By the numbers of the device.
    pub(crate) features: u16,
    /// Queues in use, from the first; an even number.
    pub(crate) used: usize,
    pub(crate) map: Option<MapRef>,
    /// The memory behind it.
    pub(crate) runs: Vec<MapRun>,
    pub(crate) scratch: Option<Scratch>,
    pub(crate) log: Option<LogTo>,
    pub(crate) table: Option<Table>,
    pub(crate) common: Common,
    pub(crate) capabilities: VirtioCapabilities,
    pub(crate) has_counters: bool,
    pub(crate) retired: Retired,
}

impl Queues {
    /// Whether a suspended queue can be made ready again.
    pub(crate) fn is_resumable(&self) -> bool {
        self.capabilities.suspend_abilities & VirtioCapabilities::FREEZE_TO_RDY != 0
    }

    /// The queues that are configured and in use.
    pub(crate) fn active(&self) -> Vec<usize> {
        let used = self.list.iter().take(self.used).enumerate();
        used.filter(|(_, queue)| queue.config.is_some()).map(|(index, _)| index).collect()
    }

    /// What a queue of the guest's is to have. `None` without a configuration or a map.
    pub(crate) fn wanted(&self, index: usize) -> Option<(Fields, Keep)> {
        let (config, map) = (self.list.get(index)?.config?, self.map.as_ref()?);
        let fields = Fields {
            place: Place::of(&config, map.key()),
            features: self.features,
            at: self.at(index),
            log: self.log,
        };
        Some((fields, Arc::new(map.clone())))
    }

    /// Where a queue stands: as it was said, or as a query has told, or else as its rings tell.
    ///
    /// The device completes buffers in their order and writes the used index last: whatever it had
    /// taken besides is taken again.
    pub(crate) fn at(&self, index: usize) -> Option<QueueState> {
        let queue = self.list.get(index)?;
        queue.at.or_else(|| {
            let at = queue.config?.device.0.checked_add(USED_INDEX)?;
            let used_index = self.read16(at)?;
            Some(QueueState { avail_index: used_index, used_index })
        })
    }

    /// Buffers of a queue that the device has and has not completed.
    pub(crate) fn in_flight(&self, index: usize) -> u16 {
        let begin = self.list[index].config.and_then(|config| {
            let available = self.read16(config.driver.0.checked_add(AVAILABLE_INDEX)?)?;
            Some(available.wrapping_sub(self.at(index)?.used_index).min(config.size))
        });
        begin.unwrap_or(0)
    }

    /// A number in guest memory.
    fn read16(&self, at: u64) -> Option<u16> {
        let run = self.runs.iter().rfind(|run| run.iova.0 <= at)?;
        run.memory.load16(at - run.iova.0)
    }

    /// What a queue on the driver's own ring is to have.
    pub(crate) fn wanted_on_scratch(&self, scratch: &Scratch) -> (Fields, Keep) {
        let fields = Fields {
            place: scratch.place,
            features: self.features,
            at: Some(QueueState::default()),
            log: self.log,
        };
        (fields, Keep::clone(&scratch.keep))
    }

    /// Objects that exist, of these queues.
    pub(crate) fn with_object(&self, queues: &[usize]) -> Vec<usize> {
        queues.iter().copied().filter(|index| self.list[*index].object.is_some()).collect()
    }

    pub(crate) fn object(&self, index: usize) -> Option<&Object> {
        self.list.get(index)?.object.as_ref()
    }

    pub(crate) fn object_mut(&mut self, index: usize) -> Option<&mut Object> {
        self.list.get_mut(index)?.object.as_mut()
    }

    /// Queues that run.
    pub(super) fn running(&self) -> Vec<usize> {
        let runs = |index: &usize| self.object(*index).is_some_and(|object| !object.stands());
        (0..self.list.len()).filter(runs).collect()
    }

    /// Commands that ask queues for their state and indices.
    pub(super) fn query_batch(&self, firmware: &Firmware, which: &[usize]) -> Batch {
        let mut batch = batch(firmware, firmware.options().queues);
        for object in which.iter().filter_map(|index| self.object(*index)) {
            batch.push(object.query_request());
        }
        batch
    }

    /// Commands that end the objects of these queues; for [`Self::ended`].
    pub(super) fn end_batch(&self, firmware: &Firmware, pace: Pace, which: &[usize]) -> Batch {
        let mut batch = batch(firmware, pace);
        for object in which.iter().filter_map(|index| self.object(*index)) {
            batch.push(object.destroy_request());
        }
        batch
    }

    /// Takes the answers to those commands. What can't be ended might run for ever: the function
    /// has to begin anew.
    pub(super) fn ended(&mut self, firmware: &Firmware, which: &[usize], batch: &Batch) -> Faults {
        let mut faults = Faults::default();
        for (index, result) in which.iter().zip(batch.results()) {
            match result {
                Ok(_) => self.list[*index].object = None,
                Err(error) => {
                    firmware.taint();
                    faults.add(*index, error.clone());
                }
            }
        }
        faults
    }

    /// Receive queues' object numbers, of these queues.
    pub(crate) fn receivers(&self, queues: &[usize]) -> Vec<u32> {
        let receive = queues.iter().filter(|index| index.is_multiple_of(2));
        receive.filter_map(|index| self.object(*index)).map(|object| object.id).collect()
    }

    /// Unregisters umems whose last queue is gone. What can't be is kept and tried again.
    pub(crate) fn drop_retired(&mut self, firmware: &Firmware) {
        let take = |retired: &Retired| {
            std::mem::take(&mut *retired.lock().unwrap_or_else(PoisonError::into_inner))
        };
        let retired = take(&self.retired);
        if retired.is_empty() {
            return;
        }
        let mut batch = batch(firmware, firmware.options().lifecycle);
        for (id, memory) in &retired {
            batch.push(umem::destroy(*id, memory));
        }
        firmware.run(&mut batch);
        let results = retired.into_iter().zip(batch.into_results());
        let failed = results.filter(|(_, result)| result.is_err()).map(|(umem, _)| umem);
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(failed);
    }

    /// The function is stopped: no object on it is used any more. Gives the memory that they have,
    /// which is free when the function has stopped.
    pub(crate) fn take_objects(&mut self) -> OldObjects {
        self.table = None;
        self.log = None;
        let mut objects = Vec::new();
        for queue in &mut self.list {
            objects.extend(queue.object.take());
            queue.counters = None;
        }
        // Umems that somebody still holds go into the old list, which nobody reads.
        let retired = std::mem::take(&mut self.retired);
        OldObjects { objects, scratch: self.scratch.take(), map: self.map.take(), retired }
    }
}

/// A batch of commands about queues.
pub(crate) fn batch(firmware: &Firmware, pace: Pace) -> Batch {
    Batch::new(firmware.careful(pace).window(), firmware.options().deadlines.queues)
}
