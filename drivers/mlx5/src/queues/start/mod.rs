//! Starts queues together: makes those that don't exist, changes those that do, makes those anew
//! that can't be changed, and tells the table last.
//!
//! A queue that does not start stands, and is named in the error. Nothing is tried twice: a function
//! that can't start a queue begins anew, with all of them.

mod create;

use super::fate::Faults;
use super::queue::Fields;
use super::set::{Gates, Queues, batch};
use super::state::{ObjectEvent, ObjectState};
use super::table::TableStep;
use super::umem::UmemPlan;
use crate::batch::Batch;
use crate::command::{CommandError, Keep, Output};
use crate::firmware::Firmware;
use crate::options::Pace;
use create::Made;
use martlet_mlx5_abi::Opcode;

/// How far a start goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// The queues exist, on their guests' rings.
    Made,
    /// The queues exist, on the driver's own ring.
    MadeOnScratch,
    /// Frames flow.
    Running,
}

/// A start that is going on.
pub(crate) struct Starting {
    queues: Vec<usize>,
    target: Target,
    stage: Stage,
    /// Queues whose objects are to be made anew.
    remake: Vec<usize>,
    faults: Faults,
}

enum Stage {
    Begin,
    Table { batch: Batch, step: TableStep, receivers: Vec<u32>, then: Then },
    Destroy { batch: Batch, which: Vec<usize> },
    Supply { batch: Batch, plan: UmemPlan, counters: Vec<usize> },
    Create { batch: Batch, made: Vec<Made> },
    Ready { batch: Batch, items: Vec<Item> },
    Over,
}

/// What follows the table.
#[derive(Clone, Copy)]
enum Then {
    Destroy,
    Over,
}

/// An item of the last batch: a queue's fields are changed, and if it is told to, it starts.
#[derive(Clone)]
struct Item {
    index: usize,
    fields: Fields,
    hold: Keep,
    starts: bool,
}

impl Starting {
    /// Begins to start these queues; those that run already are left alone.
    pub(crate) fn begin(which: &[usize], target: Target) -> Starting {
        Starting {
            queues: which.to_vec(),
            target,
            stage: Stage::Begin,
            remake: Vec::new(),
            faults: Faults::default(),
        }
    }

    /// Moves it on by a step: what is wrong, if it is over. Queues that started are kicked and
    /// their guests notified as soon as each has.
    pub(crate) fn poll(
        &mut self,
        firmware: &Firmware,
        queues: &mut Queues,
        gates: &impl Gates,
    ) -> Option<Faults> {
        loop {
            if !self.poll_batch(firmware, queues, gates) {
                return None;
            }
            if let Stage::Over = self.stage {
                if self.faults.is_empty() && firmware.end().is_some() {
                    let opcode = Opcode::MODIFY_GENERAL_OBJECT;
                    self.faults.add_general(CommandError::Tainted { opcode });
                }
                return Some(std::mem::take(&mut self.faults));
            }
            let stage = std::mem::replace(&mut self.stage, Stage::Over);
            self.stage = self.after(stage, firmware, queues, gates);
        }
    }

    /// Moves the stage's batch on. Whether it is done.
    fn poll_batch(&mut self, firmware: &Firmware, queues: &mut Queues, gates: &impl Gates) -> bool {
        match &mut self.stage {
            Stage::Begin | Stage::Over => true,
            Stage::Table { batch, .. }
            | Stage::Destroy { batch, .. }
            | Stage::Supply { batch, .. }
            | Stage::Create { batch, .. } => firmware.poll(batch),
            Stage::Ready { batch, items } => {
                let done = firmware.poll(batch);
                // At once, not when all are done: guests wait.
                while let Some(number) = batch.poll_item() {
                    if let (Some(item), Some(result)) = (items.get(number), batch.result(number)) {
                        self.faults.extend(readied(queues, gates, item.clone(), result));
                    }
                }
                done
            }
        }
    }

    /// Takes the answers of a stage that is done, and begins the next one.
    fn after(
        &mut self,
        stage: Stage,
        firmware: &Firmware,
        queues: &mut Queues,
        gates: &impl Gates,
    ) -> Stage {
        match stage {
            Stage::Begin => {
                if self.target == Target::Running {
                    // Those that could not be stopped: kicks reach them again.
                    let running = queues.running();
                    let which = self.queues.iter().filter(|index| running.contains(index));
                    which.for_each(|index| gates.open(*index));
                }
                self.remake = self.to_remake(queues);
                self.table_out(firmware, queues)
            }
            Stage::Table { batch, step, receivers, then } => {
                let answer = |result| queues.table_answer(step, &receivers, result).err();
                let error = batch.result(0).and_then(answer);
                error.into_iter().for_each(|error| self.faults.add_general(error));
                self.after_table(firmware, queues, then)
            }
            Stage::Destroy { batch, which } => {
                self.faults.extend(queues.ended(firmware, &which, &batch));
                self.remake.retain(|index| queues.object(*index).is_none());
                self.supply(firmware, queues)
            }
            Stage::Supply { batch, plan, counters } => {
                self.create(firmware, queues, &batch, plan, &counters)
            }
            Stage::Create { batch, made } => {
                for (made, result) in made.into_iter().zip(batch.results()) {
                    self.created(queues, made, result);
                }
                self.ready(firmware, queues)
            }
            Stage::Ready { .. } => self.table_in(firmware, queues),
            Stage::Over => Stage::Over,
        }
    }

    /// Executes it to the end.
    pub(crate) fn run(
        mut self,
        firmware: &Firmware,
        queues: &mut Queues,
        gates: &impl Gates,
    ) -> Faults {
        loop {
            if let Some(faults) = self.poll(firmware, queues, gates) {
                return faults;
            }
            firmware.wait_until(None);
        }
    }

    /// Queues whose objects are missing, or can't be changed to what is wanted.
    fn to_remake(&self, queues: &Queues) -> Vec<usize> {
        let resumable = queues.is_resumable();
        let has_to = |index: &usize| {
            let queue = &queues.list[*index];
            let Some(object) = &queue.object else { return true };
            let wrong_size = queue.config.is_some_and(|config| config.size != object.size);
            let stuck = object.state == ObjectState::Suspended && !resumable;
            object.state == ObjectState::Broken || wrong_size || stuck
        };
        self.queues.iter().copied().filter(has_to).collect()
    }

    /// The table must not name what is destroyed.
    fn table_out(&mut self, firmware: &Firmware, queues: &Queues) -> Stage {
        let names = |index: &usize| self.remake.contains(index);
        if queues.receivers(&self.remake).is_empty() || queues.table.is_none() {
            return self.destroy(firmware, queues);
        }
        let stay: Vec<usize> = queues.active().into_iter().filter(|index| !names(index)).collect();
        self.table(firmware, queues, queues.receivers(&stay), Then::Destroy)
    }

    /// Makes the table name these queues.
    fn table(
        &mut self,
        firmware: &Firmware,
        queues: &Queues,
        receivers: Vec<u32>,
        then: Then,
    ) -> Stage {
        let Some(step) = queues.table_step(&receivers) else {
            return self.after_table(firmware, queues, then);
        };
        let mut batch = batch(firmware, Pace::Serial);
        batch.push(queues.table_request(step, &receivers));
        Stage::Table { batch, step, receivers, then }
    }

    fn after_table(&mut self, firmware: &Firmware, queues: &Queues, then: Then) -> Stage {
        match then {
            Then::Destroy => self.destroy(firmware, queues),
            Then::Over => Stage::Over,
        }
    }

    fn destroy(&mut self, firmware: &Firmware, queues: &Queues) -> Stage {
        let which = queues.with_object(&self.remake);
        let batch = queues.end_batch(firmware, firmware.options().lifecycle, &which);
        Stage::Destroy { batch, which }
    }

    fn ready(&mut self, firmware: &Firmware, queues: &Queues) -> Stage {
        if self.target != Target::Running {
            return self.table_in(firmware, queues);
        }
        let mut batch = batch(firmware, firmware.options().queues);
        let mut items = Vec::new();
        for index in self.queues.iter().copied() {
            let Some(object) = queues.object(index) else { continue };
            if matches!(object.state, ObjectState::Ready | ObjectState::Broken) {
                continue;
            }
            let Some((fields, hold)) = queues.wanted(index) else { continue };
            let ready = Item { index, fields, hold, starts: true };
            // From INIT the fields have to go first.
            let first = match object.state {
                ObjectState::Init => object.fields_request(&fields),
                _ => None,
            };
            match first {
                Some(first) => {
                    let first = batch.push(first);
                    items.push(Item { starts: false, ..ready.clone() });
                    batch.push_after(object.ready_request(&fields), first);
                }
                None => {
                    batch.push(object.ready_request(&fields));
                }
            }
            items.push(ready);
        }
        Stage::Ready { batch, items }
    }

    /// The table names the queues that are in use.
    fn table_in(&mut self, firmware: &Firmware, queues: &Queues) -> Stage {
        let in_use = |index: &usize| match self.target {
            Target::Running => {
                queues.object(*index).is_some_and(|object| object.state == ObjectState::Ready)
            }
            Target::Made | Target::MadeOnScratch => queues.object(*index).is_some(),
        };
        let which: Vec<usize> = queues.active().into_iter().filter(in_use).collect();
        self.table(firmware, queues, queues.receivers(&which), Then::Over)
    }
}

/// Takes the answer to an item of the last batch; what is wrong with it.
fn readied(
    queues: &mut Queues,
    gates: &impl Gates,
    item: Item,
    result: &Result<Output, CommandError>,
) -> Faults {
    let Item { index, fields, hold, starts } = item;
    let mut faults = Faults::default();
    let Some(object) = queues.object_mut(index) else { return faults };
    match result {
        Ok(_) if starts => {
            object.change(ObjectEvent::Started);
            object.has_fields(&fields, hold);
            object.fields.at = None;
            queues.list[index].at = None;
            gates.open(index);
        }
        Ok(_) => object.has_fields(&fields, hold),
        // What follows a change that failed says nothing new.
        Err(CommandError::Skipped { .. }) => {}
        Err(error) => faults.add(index, error.clone()),
    }
    faults
}
