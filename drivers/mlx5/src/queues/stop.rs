//! Stops queues together, and reads where they stand.

use super::fate::Faults;
use super::set::{Gates, Queues, batch};
use super::state::{ObjectEvent, ObjectState};
use crate::batch::Batch;
use crate::command::{CommandError, Output};
use crate::firmware::Firmware;
use crate::options::Barrier;
use martlet_mlx5_abi::Opcode;
use martlet_vdpa::QueueState;
use std::collections::BTreeMap;

/// How often a query that went wrong is issued.
const READS_MAX: u32 = 2;

/// A stop that is going on.
pub(crate) struct Stopping {
    queues: Vec<usize>,
    /// Others that may run: they stand in the end, or are ended. Where they are need not be known.
    others: Vec<usize>,
    /// Those of them to which an earlier change may come yet: whatever they are told now, only
    /// their end makes them stand for good.
    to_end: Vec<usize>,
    /// Where queues would have begun that may have been started: where they are if they were not.
    begins: BTreeMap<usize, QueueState>,
    phase: Phase,
    /// Queues of which an earlier change was not answered when this began. They are not stopped: a
    /// start that came after the stop would begin where it was told to, and repeat frames.
    unsettled: Vec<usize>,
    /// What is wrong with a queue, unless it is found standing after all.
    wrong: BTreeMap<usize, CommandError>,
}

enum Phase {
    Stop { batch: Batch, items: Vec<Item> },
    Read { batch: Batch, queues: Vec<usize>, round: u32 },
    End { batch: Batch, queues: Vec<usize> },
    Over,
}

/// What an item of the stop's batch is.
#[derive(Clone, Copy)]
enum Item {
    Stop(usize),
    Read(usize),
}

impl Stopping {
    /// Begins to stop the whole device: the active queues, and every other that may run.
    pub(crate) fn of_device(
        firmware: &Firmware,
        queues: &mut Queues,
        gates: &impl Gates,
    ) -> Stopping {
        let active = queues.active();
        let mut unsettled = active.clone();
        unsettled.retain(|index| queues.is_unsettled(firmware, *index));
        if !unsettled.is_empty() {
            // It can't succeed: frames go on meanwhile.
            return Stopping::new(firmware, queues, unsettled, Vec::new(), gates);
        }
        let others = queues.others(&active);
        Stopping::new(firmware, queues, active, others, gates)
    }

    /// Begins to stop these queues. Those that stand already are only asked where, if that is not
    /// known.
    pub(crate) fn begin(
        firmware: &Firmware,
        queues: &mut Queues,
        which: &[usize],
        gates: &impl Gates,
    ) -> Stopping {
        Stopping::new(firmware, queues, which.to_vec(), Vec::new(), gates)
    }

    fn new(
        firmware: &Firmware,
        queues: &mut Queues,
        which: Vec<usize>,
        others: Vec<usize>,
        gates: &impl Gates,
    ) -> Stopping {
        queues.forget_answered(firmware);
        let mut unsettled = which.clone();
        unsettled.retain(|index| queues.is_unsettled(firmware, *index));
        let to_end = to_end(firmware, queues, &others);
        let mut batch = batch(firmware, firmware.options().queues);
        let mut items = Vec::new();
        let (mut wrong, mut begins) = (BTreeMap::new(), BTreeMap::new());
        for index in which.iter().chain(&others).copied() {
            gates.close(index);
            let Some(object) = queues.object(index) else {
                if queues.list[index].at.is_none() {
                    wrong.insert(index, lost(index));
                }
                continue;
            };
            if !object.stands() && !to_end.contains(&index) && !unsettled.contains(&index) {
                let stop = batch.push(object.stop_request());
                items.push(Item::Stop(index));
                if firmware.options().barrier == Barrier::EachStopped {
                    batch.push_after(object.query_request(), stop);
                    items.push(Item::Read(index));
                }
                begins.extend(queues.list[index].at.take().map(|at| (index, at)));
            }
        }
        let phase = Phase::Stop { batch, items };
        Stopping { queues: which, others, to_end, begins, phase, unsettled, wrong }
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
                        take_answer(queues, &mut self.wrong, &self.begins, item, result);
                    }
                    self.phase = self.read(firmware, queues, 1);
                }
                Phase::Read { batch, queues: which, round } => {
                    if !firmware.poll(batch) {
                        return None;
                    }
                    for (index, result) in which.iter().zip(batch.results()) {
                        let item = Item::Read(*index);
                        take_answer(queues, &mut self.wrong, &self.begins, item, result);
                    }
                    let round = *round + 1;
                    self.phase = self.read(firmware, queues, round);
                }
                Phase::End { batch, queues: which } => {
                    if !firmware.poll(batch) {
                        return None;
                    }
                    queues.ended(which, batch);
                    // How far they came is lost with them.
                    which.iter().for_each(|index| queues.list[*index].at = None);
                    self.phase = Phase::Over;
                }
                Phase::Over => return Some(self.faults(queues)),
            }
        }
    }

    /// Asks those that have not told where they stand.
    fn read(&self, firmware: &Firmware, queues: &Queues, round: u32) -> Phase {
        let unknown =
            |index: &usize| queues.list[*index].at.is_none() && queues.object(*index).is_some();
        let stopped = self.others.iter().filter(|index| !self.to_end.contains(index));
        let which = self.queues.iter().chain(stopped).copied().filter(unknown);
        let which: Vec<usize> = which.collect();
        if which.is_empty() || round > READS_MAX {
            return self.end(firmware, queues);
        }
        Phase::Read { batch: queues.query_batch(firmware, &which), queues: which, round }
    }

    /// Ends those others that don't stand for good, and tries again to end what could not be ended
    /// before.
    fn end(&self, firmware: &Firmware, queues: &Queues) -> Phase {
        let has_to = |index: &usize| {
            let object = queues.object(*index);
            object.is_some_and(|object| !object.stands()) || self.to_end.contains(index)
        };
        let which: Vec<usize> = self.others.iter().copied().filter(has_to).collect();
        let which = queues.with_object(&which);
        if which.is_empty() && queues.undestroyed.is_empty() {
            return Phase::Over;
        }
        let batch = queues.end_batch(firmware, firmware.options().queues, &which);
        Phase::End { batch, queues: which }
    }

    fn faults(&self, queues: &Queues) -> Faults {
        let mut faults = Faults::default();
        if !queues.undestroyed.is_empty() {
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

/// Those others to which a change may come yet, or that run on the driver's own ring.
fn to_end(firmware: &Firmware, queues: &mut Queues, others: &[usize]) -> Vec<usize> {
    let mut to_end = others.to_vec();
    to_end
        .retain(|index| queues.is_unsettled(firmware, *index) || queues.is_lost_on_scratch(*index));
    to_end
}

fn take_answer(
    queues: &mut Queues,
    wrong: &mut BTreeMap<usize, CommandError>,
    begins: &BTreeMap<usize, QueueState>,
    item: Item,
    result: &Result<Output, CommandError>,
) {
    match item {
        Item::Stop(index) => stopped(queues, wrong, index, result),
        Item::Read(index) => read(queues, wrong, begins, index, result),
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
    begins: &BTreeMap<usize, QueueState>,
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
        // It has never run: it is where it would have begun.
        Ok(None) if object.state == ObjectState::Init && begins.contains_key(&index) => {
            queues.list[index].at = begins.get(&index).copied();
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
