//! All virtqueues of a device.

use super::queue::{Common, Fields, LogTo, Object, Place, Queue};
use super::state::{ObjectEvent, ObjectState};
use super::table::Table;
use super::umem::{self, Retired};
use crate::batch::Batch;
use crate::command::{CommandError, CommandId, Keep, Output};
use crate::firmware::Firmware;
use crate::memory::MapRef;
use crate::options::Pace;
use martlet_mlx5_abi::capability::VirtioCapabilities;
use martlet_vdpa::QueueState;
use std::sync::{Arc, PoisonError};

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

/// All virtqueues of a device, and what they have in common.
pub(crate) struct Queues {
    pub(crate) list: Vec<Queue>,
    /// By the numbers of the device.
    pub(crate) features: u16,
    /// Queues in use, from the first; an even number.
    pub(crate) used: usize,
    pub(crate) map: Option<MapRef>,
    pub(crate) scratch: Option<Scratch>,
    pub(crate) log: Option<LogTo>,
    pub(crate) table: Option<Table>,
    pub(crate) common: Common,
    pub(crate) capabilities: VirtioCapabilities,
    pub(crate) has_counters: bool,
    pub(crate) retired: Retired,
    /// Objects that could not be destroyed. They keep what they may use.
    pub(crate) undestroyed: Vec<Object>,
    /// Changes that were not answered, of objects that are destroyed: numbers are given again, and
    /// a change that comes late would hit whatever has the number then.
    pub(crate) pending_changes: Vec<(u32, CommandId)>,
    /// The device says that an object does not exist that should, or that there is one where none
    /// should be: a number that it told was not the right one.
    pub(crate) has_wrong_numbers: bool,
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
            at: self.list[index].at,
            log: self.log,
        };
        Some((fields, Arc::new(map.clone())))
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

    /// Queues outside of these that may run, or may come to run: left by a growth or a preparation
    /// that failed, or told to start by a command that was not answered.
    pub(super) fn others(&self, which: &[usize]) -> Vec<usize> {
        let is_other = |index: &usize| {
            let Some(object) = self.object(*index) else { return false };
            // Out of ERR no command leads.
            let may_start = object.state != ObjectState::Broken && !object.changes_out.is_empty();
            !which.contains(index) && (!object.stands() || may_start)
        };
        (0..self.list.len()).filter(is_other).collect()
    }

    /// Whether a queue was last told to run on the driver's own ring, and nobody knows whether it
    /// does: nothing of it is worth keeping.
    pub(super) fn is_lost_on_scratch(&self, index: usize) -> bool {
        let (Some(object), Some(scratch)) = (self.object(index), &self.scratch) else {
            return false;
        };
        !object.stands() && object.fields.place == scratch.place
    }

    /// Changes that may yet happen to an object that was made under this number.
    pub(super) fn pending_changes_of(&mut self, id: u32) -> Vec<CommandId> {
        self.pending_changes.extract_if(.., |(of, _)| *of == id).map(|(_, change)| change).collect()
    }

    /// Commands that ask queues for their state and indices.
    pub(super) fn query_batch(&self, firmware: &Firmware, which: &[usize]) -> Batch {
        let mut batch = batch(firmware, firmware.options().queues);
        for object in which.iter().filter_map(|index| self.object(*index)) {
            batch.push(object.query_request());
        }
        batch
    }

    /// Commands that end the objects of these queues, and tries again to end what could not be ended
    /// before; for [`Self::ended`].
    pub(super) fn end_batch(&self, firmware: &Firmware, pace: Pace, which: &[usize]) -> Batch {
        let mut batch = batch(firmware, pace);
        let objects = which.iter().filter_map(|index| self.object(*index));
        for object in objects.chain(&self.undestroyed) {
            batch.push(object.destroy_request());
        }
        batch
    }

    /// Takes the answers to those commands.
    pub(super) fn ended(&mut self, which: &[usize], batch: &Batch) {
        let mut results = batch.results();
        let objects: Vec<Object> =
            which.iter().filter_map(|index| self.list.get_mut(*index)?.object.take()).collect();
        let before = std::mem::take(&mut self.undestroyed);
        for object in objects.into_iter().chain(before) {
            match results.next() {
                Some(result) => self.take_destruction(object, result),
                None => self.undestroyed.push(object),
            }
        }
    }

    /// Takes the answer to the destruction of an object that is not in the list any more.
    fn take_destruction(&mut self, mut object: Object, result: &Result<Output, CommandError>) {
        // Unless an earlier destruction has been done, its number was not the right one.
        let may_be_missing = object.is_known && object.may_be_gone;
        self.has_wrong_numbers |= is_missing(result) && !may_be_missing;
        if is_destroyed(result) {
            let changes = object.changes_out.iter().map(|change| (object.id, *change));
            self.pending_changes.extend(changes);
        } else {
            tracing::warn!(object = object.id, "a virtqueue could not be destroyed");
            object.may_be_gone |= result.as_ref().is_err_and(CommandError::may_be_done);
            self.undestroyed.push(object);
        }
    }

    /// Forgets changes that were answered after all.
    pub(super) fn forget_answered(&mut self, firmware: &Firmware) {
        self.pending_changes.retain(|(_, change)| firmware.is_out(*change));
    }

    /// Forgets changes of a queue that were answered late. They may have come since it was asked
    /// last: one that stood then may run by now, and has to be asked, or stopped, once more.
    pub(super) fn settle(&mut self, firmware: &Firmware, index: usize) {
        let Some(object) = self.object_mut(index) else { return };
        let before = object.changes_out.len();
        object.changes_out.retain(|id| firmware.is_out(*id));
        let came = object.changes_out.len() < before;
        if came && matches!(object.state, ObjectState::Init | ObjectState::Suspended) {
            object.change(ObjectEvent::Unanswered);
        }
    }

    /// Whether a queue does not stay where it stands, because a change that was not answered may
    /// come yet.
    pub(super) fn is_unsettled(&mut self, firmware: &Firmware, index: usize) -> bool {
        self.settle(firmware, index);
        self.object(index).is_some_and(|object| !object.changes_out.is_empty())
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
        let failed = retired.into_iter().zip(batch.into_results()).filter(|(_, result)| {
            let opcode = martlet_mlx5_abi::Opcode::DESTROY_UMEM;
            !crate::firmware::is_done(opcode, result)
        });
        let failed: Vec<_> = failed.map(|(umem, _)| umem).collect();
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(failed);
    }

    /// The function is down: there are no umems any more.
    pub(crate) fn forget_retired(&mut self) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Tries again to destroy what could not be destroyed; how many are left.
    pub(crate) fn destroy_again(&mut self, firmware: &Firmware) -> usize {
        if self.undestroyed.is_empty() {
            return 0;
        }
        let mut batch = self.end_batch(firmware, firmware.options().lifecycle, &[]);
        firmware.run(&mut batch);
        self.ended(&[], &batch);
        self.undestroyed.len()
    }
}

/// Whether the answer to a destruction means that there is nothing any more.
pub(super) fn is_destroyed(result: &Result<Output, CommandError>) -> bool {
    let opcode = martlet_mlx5_abi::Opcode::DESTROY_GENERAL_OBJECT;
    // A second try after one that was not answered finds nothing.
    is_missing(result) || crate::firmware::is_done(opcode, result)
}

fn is_missing(result: &Result<Output, CommandError>) -> bool {
    let missing = martlet_mlx5_abi::CommandStatus::BAD_RESOURCE;
    matches!(result, Err(CommandError::Status { status, .. }) if *status == missing)
}

/// A batch of commands about queues.
pub(crate) fn batch(firmware: &Firmware, pace: Pace) -> Batch {
    Batch::new(firmware.careful(pace).window(), firmware.options().deadlines.queues)
}
