//! Starts queues together: makes those that don't exist, changes those that do, makes those anew
//! that can't be changed, and tells the table last.

mod answers;
mod create;

use super::fate::Faults;
use super::queue::{Fields, Object};
use super::set::{Gates, Queues, batch};
use super::state::ObjectState;
use super::table::{TABLE_TRIES_MAX, TableStep};
use super::umem::UmemPlan;
use crate::batch::Batch;
use crate::command::{CommandError, Keep, Output};
use crate::firmware::Firmware;
use crate::options::Pace;
use answers::{found, readied, runs};
use create::Made;

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
    /// Whether queues that failed have had their second try.
    second: bool,
    faults: Faults,
}

enum Stage {
    Begin,
    Ask { batch: Batch, which: Vec<usize> },
    Table { batch: Batch, step: TableStep, receivers: Vec<u32>, tries: u32, then: Then },
    Destroy { batch: Batch, which: Vec<usize> },
    Supply { batch: Batch, plan: UmemPlan, counters: Vec<usize> },
    Create { batch: Batch, made: Vec<Made> },
    Ready { batch: Batch, items: Vec<Item>, failed: Vec<(usize, CommandError)> },
    Look { batch: Batch, failed: Vec<(usize, CommandError)> },
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
            second: false,
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
            Stage::Ask { batch, .. }
            | Stage::Table { batch, .. }
            | Stage::Destroy { batch, .. }
            | Stage::Supply { batch, .. }
            | Stage::Create { batch, .. }
            | Stage::Look { batch, .. } => firmware.poll(batch),
            Stage::Ready { batch, items, failed } => {
                let done = firmware.poll(batch);
                // At once, not when all are done: guests wait.
                while let Some(number) = batch.poll_item() {
                    if let (Some(item), Some(result)) = (items.get(number), batch.result(number)) {
                        let id = batch.command(number);
                        failed.extend(readied(queues, gates, item.clone(), id, result));
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
            Stage::Begin => self.ask(firmware, queues),
            Stage::Ask { batch, which } => {
                for (index, result) in which.iter().zip(batch.results()) {
                    found(queues, *index, result);
                }
                self.open_running(queues, gates);
                self.remake = self.to_remake(queues);
                self.table_out(firmware, queues)
            }
            Stage::Table { batch, step, receivers, tries, then } => {
                let answer = |result| queues.table_answer(step, &receivers, result).err();
                let error = batch.result(0).and_then(answer);
                if error.is_some() && tries < TABLE_TRIES_MAX {
                    return self.table(firmware, queues, receivers, tries + 1, then);
                }
                error.into_iter().for_each(|error| self.faults.add_general(error));
                self.after_table(firmware, queues, then)
            }
            Stage::Destroy { batch, which } => {
                queues.ended(&which, &batch);
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
            Stage::Ready { failed, .. } => self.look(firmware, queues, failed),
            Stage::Look { batch, failed } => {
                let results = batch.into_results();
                self.looked(firmware, queues, gates, failed, &results)
            }
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

    /// Asks queues of which an earlier failure has left something unknown.
    fn ask(&self, firmware: &Firmware, queues: &mut Queues) -> Stage {
        for index in self.queues.iter().copied() {
            queues.settle(firmware, index);
        }
        let is_unclear = |index: &usize| {
            let Some(object) = queues.object(*index) else { return false };
            match object.state {
                ObjectState::Unknown => !queues.is_lost_on_scratch(*index),
                ObjectState::Suspended | ObjectState::Broken => queues.list[*index].at.is_none(),
                ObjectState::Init | ObjectState::Ready => false,
            }
        };
        let which: Vec<usize> = self.queues.iter().copied().filter(is_unclear).collect();
        Stage::Ask { batch: queues.query_batch(firmware, &which), which }
    }

    /// Queues that run already, because they could not be stopped: kicks reach them again.
    fn open_running(&self, queues: &mut Queues, gates: &impl Gates) {
        for index in self.queues.iter().copied() {
            let is_ready = |object: &Object| object.state == ObjectState::Ready;
            if queues.object(index).is_some_and(is_ready) && !queues.is_lost_on_scratch(index) {
                runs(queues, gates, index);
            }
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
            let lost = queues.is_lost_on_scratch(*index);
            object.state == ObjectState::Broken || wrong_size || stuck || lost
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
        self.table(firmware, queues, queues.receivers(&stay), 1, Then::Destroy)
    }

    /// Makes the table name these queues.
    fn table(
        &mut self,
        firmware: &Firmware,
        queues: &Queues,
        receivers: Vec<u32>,
        tries: u32,
        then: Then,
    ) -> Stage {
        let Some(step) = queues.table_step(&receivers) else {
            return self.after_table(firmware, queues, then);
        };
        let mut batch = batch(firmware, Pace::Serial);
        batch.push(queues.table_request(step, &receivers));
        Stage::Table { batch, step, receivers, tries, then }
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
        Stage::Ready { batch, items, failed: Vec::new() }
    }

    /// Looks what state those are in that did not start.
    fn look(
        &mut self,
        firmware: &Firmware,
        queues: &mut Queues,
        failed: Vec<(usize, CommandError)>,
    ) -> Stage {
        if failed.is_empty() {
            return self.table_in(firmware, queues);
        }
        let which: Vec<usize> = failed.iter().map(|(index, _)| *index).collect();
        which.iter().for_each(|index| queues.settle(firmware, *index));
        Stage::Look { batch: queues.query_batch(firmware, &which), failed }
    }

    fn looked(
        &mut self,
        firmware: &Firmware,
        queues: &mut Queues,
        gates: &impl Gates,
        failed: Vec<(usize, CommandError)>,
        results: &[Result<Output, CommandError>],
    ) -> Stage {
        let mut again = Vec::new();
        for ((index, error), result) in failed.into_iter().zip(results) {
            let wanted = queues.wanted(index);
            found(queues, index, result);
            let Some(object) = queues.object_mut(index) else { continue };
            if object.state == ObjectState::Ready {
                // It has started after all, or it never stood.
                if let Some((fields, hold)) = wanted {
                    object.has_fields(&fields, Some(hold));
                }
                runs(queues, gates, index);
                continue;
            }
            // One that may run yet must not be made anew: where it is by now nobody knows.
            let known = object.state != ObjectState::Unknown && queues.list[index].at.is_some();
            if known && !self.second && !firmware.is_gone() {
                again.push(index);
            } else {
                self.faults.add(index, error);
                self.faults.add_standing(index);
            }
        }
        if again.is_empty() {
            return self.table_in(firmware, queues);
        }
        self.second = true;
        // One whose start may come yet, or was still out when it was asked, is only told to start
        // once more: made anew, it would be where it was before it ran.
        again.retain(|index| {
            let is_sure = |object: &Object| {
                object.state == ObjectState::Broken || object.changes_out.is_empty()
            };
            queues.object(*index).is_some_and(is_sure)
        });
        self.remake = again;
        self.table_out(firmware, queues)
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
        self.table(firmware, queues, queues.receivers(&which), 1, Then::Over)
    }
}
