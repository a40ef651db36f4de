//! Stops queues together, and reads where they stand.

use super::fate::Faults;
use super::set::{Gates, Queues, batch};
use super::state::{ObjectEvent, ObjectState};
use crate::batch::{Batch, OnFailure};
use crate::command::{CommandError, Output};
use crate::firmware::Firmware;
use crate::options::Barrier;
use martlet_mlx5_abi::Opcode;
use std::collections::BTreeMap;

/// How often a query that went wrong is issued.
const READS_MAX: u32 = 2;

/// A stop that is going on.
pub(crate) struct Stopping {
    queues: Vec<usize>,
    phase: Phase,
    /// Queues of which an earlier change was not answered when this began: it may come, or may have
    /// come, after they were asked where they stand.
    unsettled: Vec<usize>,
    /// What is wrong with a queue, unless it is found standing after all.
    wrong: BTreeMap<usize, CommandError>,
}

enum Phase {
    Stop { batch: Batch, items: Vec<Item> },
    Read { batch: Batch, queues: Vec<usize>, round: u32 },
    Over,
}

/// What an item of the stop's batch is.
#[derive(Clone, Copy)]
enum Item {
    Stop(usize),
    Read(usize),
}

impl Stopping {
    /// Begins to stop these queues. Those that stand already are only asked where, if that is not
    /// known.
    pub(crate) fn begin(
        firmware: &Firmware,
        queues: &mut Queues,
        which: &[usize],
        gates: &impl Gates,
    ) -> Stopping {
        let mut batch = batch(firmware, firmware.options().queues, OnFailure::GoOn);
        let mut items = Vec::new();
        let mut wrong = BTreeMap::new();
        for index in which.iter().copied() {
            gates.close(index);
            let Some(object) = queues.object(index) else {
                if queues.list[index].at.is_none() {
                    wrong.insert(index, lost(index));
                }
                continue;
            };
            if !object.stands() {
                let stop = batch.push(object.stop_request());
                items.push(Item::Stop(index));
                if firmware.options().barrier == Barrier::EachStopped {
                    batch.push_after(object.query_request(), stop);
                    items.push(Item::Read(index));
                }
                queues.list[index].at = None;
            }
        }
        let mut unsettled: Vec<usize> = which.to_vec();
        unsettled.retain(|index| queues.is_unsettled(firmware, *index));
        Stopping { queues: which.to_vec(), phase: Phase::Stop { batch, items }, unsettled, wrong }
    }

    /// Moves it on by a step: what is wrong, if it is over. Nothing wrong means that all of the
    /// queues stand and their indices are known.
    pub(crate) fn poll(&mut self, firmware: &Firmware, queues: &mut Queues) -> Option<Faults> {
        loop {
            match &mut self.phase {
                Phase::Stop { batch, items } => {
                    if !firmware.poll(batch) {
                        return None;
                    }
                    let answers: Vec<_> = items.iter().copied().zip(batch.results()).collect();
                    for (item, result) in answers {
                        take_answer(queues, &mut self.wrong, item, result);
                    }
                    self.phase = self.read(firmware, queues, 1);
                }
                Phase::Read { batch, queues: which, round } => {
                    if !firmware.poll(batch) {
                        return None;
                    }
                    for (index, result) in which.iter().zip(batch.results()) {
                        take_answer(queues, &mut self.wrong, Item::Read(*index), result);
                    }
                    let round = *round + 1;
                    self.phase = self.read(firmware, queues, round);
                }
                Phase::Over => return Some(self.faults(queues)),
            }
        }
    }

    /// Asks those that have not told where they stand.
    fn read(&self, firmware: &Firmware, queues: &Queues, round: u32) -> Phase {
        let unknown =
            |index: &usize| queues.list[*index].at.is_none() && queues.object(*index).is_some();
        let which: Vec<usize> = self.queues.iter().copied().filter(unknown).collect();
        if which.is_empty() || round > READS_MAX {
            return Phase::Over;
        }
        let mut batch = batch(firmware, firmware.options().queues, OnFailure::GoOn);
        for object in which.iter().filter_map(|index| queues.object(*index)) {
            batch.push(object.query_request());
        }
        Phase::Read { batch, queues: which, round }
    }

    fn faults(&self, queues: &Queues) -> Faults {
        let mut faults = Faults::default();
        if !queues.orphans.is_empty() {
            let what = "a virtqueue that could not be destroyed may run";
            let opcode = Opcode::DESTROY_GENERAL_OBJECT;
            faults.add_general(CommandError::Nonsense { opcode, what });
        }
        for index in self.queues.iter().copied() {
            // It would not stay where it is.
            if self.unsettled.contains(&index) {
                let what = "an earlier start that was not answered may come yet";
                let opcode = Opcode::MODIFY_GENERAL_OBJECT;
                faults.add(index, CommandError::Nonsense { opcode, what });
                continue;
            }
            let stands = queues.object(index).is_none_or(|object| object.stands());
            if stands && queues.list[index].at.is_some() {
                continue;
            }
            let error = self.wrong.get(&index).cloned();
            faults.add(index, error.unwrap_or_else(|| lost(index)));
        }
        faults
    }
}

/// The error for a queue of which nothing is known.
fn lost(_: usize) -> CommandError {
    CommandError::Nonsense { opcode: Opcode::QUERY_GENERAL_OBJECT, what: "its index is lost" }
}

fn take_answer(
    queues: &mut Queues,
    wrong: &mut BTreeMap<usize, CommandError>,
    item: Item,
    result: &Result<Output, CommandError>,
) {
    match item {
        Item::Stop(index) => stopped(queues, wrong, index, result),
        Item::Read(index) => read(queues, wrong, index, result),
    }
}

fn stopped(
    queues: &mut Queues,
    wrong: &mut BTreeMap<usize, CommandError>,
    index: usize,
    result: &Result<Output, CommandError>,
) {
    let Some(object) = queues.object_mut(index) else { return };
    match result {
        Ok(_) => {
            object.change(ObjectEvent::Stopped);
            object.fields.at = None;
        }
        Err(error) => {
            if error.may_be_done() {
                object.change(ObjectEvent::Unanswered);
            }
            wrong.insert(index, error.clone());
        }
    }
}

fn read(
    queues: &mut Queues,
    wrong: &mut BTreeMap<usize, CommandError>,
    index: usize,
    result: &Result<Output, CommandError>,
) {
    // After a stop that failed nothing was asked.
    if matches!(result, Err(CommandError::Skipped { .. })) {
        return;
    }
    let Some(object) = queues.object_mut(index) else { return };
    let found =
        result.as_ref().map_err(CommandError::clone).and_then(|output| object.found(output));
    match found {
        Ok(Some(at)) => {
            queues.list[index].at = Some(at);
            wrong.remove(&index);
        }
        // It runs: the stop's own error says why.
        Ok(None) => {
            let what = "it runs, though it was stopped";
            let opcode = Opcode::MODIFY_GENERAL_OBJECT;
            wrong.entry(index).or_insert(CommandError::Nonsense { opcode, what });
        }
        Err(error) => {
            if object.state == ObjectState::Suspended {
                wrong.insert(index, error);
            } else {
                wrong.entry(index).or_insert(error);
            }
        }
    }
}
