//! Stops queues together, and reads where they stand.

use super::fate::Faults;
use super::set::{Gates, Queues, batch};
use super::state::{ObjectEvent, ObjectState};
use crate::batch::Batch;
use crate::command::{CommandError, Output};
use crate::firmware::Firmware;
use crate::options::Barrier;
use martlet_mlx5_abi::Opcode;
use std::collections::BTreeMap;

/// A stop that is going on.
pub(crate) struct Stopping {
    queues: Vec<usize>,
    phase: Phase,
    /// What is wrong with a queue, unless it is found standing after all.
    wrong: BTreeMap<usize, CommandError>,
}

enum Phase {
    Stop { batch: Batch, items: Vec<Item> },
    Read { batch: Batch, queues: Vec<usize> },
    Over,
}

/// What an item of the stop's batch is.
#[derive(Clone, Copy)]
enum Item {
    Stop(usize),
    Read(usize),
}

impl Stopping {
    /// Begins to stop the whole device: the active queues, and every other that runs.
    pub(crate) fn of_device(firmware: &Firmware, queues: &Queues, gates: &impl Gates) -> Stopping {
        let mut which = queues.active();
        which.extend(queues.running().iter().filter(|index| !queues.active().contains(index)));
        Stopping::begin(firmware, queues, &which, gates)
    }

    /// Begins to stop these queues. Those that stand already are only asked where, if that is not
    /// known.
    pub(crate) fn begin(
        firmware: &Firmware,
        queues: &Queues,
        which: &[usize],
        gates: &impl Gates,
    ) -> Stopping {
        let mut batch = batch(firmware, firmware.options().queues);
        let mut items = Vec::new();
        for index in which.iter().copied() {
            gates.close(index);
            let Some(object) = queues.object(index).filter(|object| !object.stands()) else {
                continue;
            };
            let stop = batch.push(object.stop_request());
            items.push(Item::Stop(index));
            if firmware.options().barrier == Barrier::EachStopped {
                batch.push_after(object.query_request(), stop);
                items.push(Item::Read(index));
            }
        }
        let phase = Phase::Stop { batch, items };
        Stopping { queues: which.to_vec(), phase, wrong: BTreeMap::new() }
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
                    for (item, result) in items.iter().zip(batch.results()) {
                        match *item {
                            Item::Stop(index) => stopped(queues, &mut self.wrong, index, result),
                            Item::Read(index) => read(queues, &mut self.wrong, index, result),
                        }
                    }
                    self.phase = self.read(firmware, queues);
                }
                Phase::Read { batch, queues: which } => {
                    if !firmware.poll(batch) {
                        return None;
                    }
                    for (index, result) in which.iter().zip(batch.results()) {
                        read(queues, &mut self.wrong, *index, result);
                    }
                    self.phase = Phase::Over;
                }
                Phase::Over => return Some(self.faults(firmware, queues)),
            }
        }
    }

    /// Asks those that have not told where they stand: behind the barrier all of them, and those
    /// that could not be stopped, which may be in ERR.
    fn read(&self, firmware: &Firmware, queues: &Queues) -> Phase {
        let unknown =
            |index: &usize| queues.list[*index].at.is_none() && queues.object(*index).is_some();
        let which: Vec<usize> = self.queues.iter().copied().filter(unknown).collect();
        Phase::Read { batch: queues.query_batch(firmware, &which), queues: which }
    }

    fn faults(&self, firmware: &Firmware, queues: &Queues) -> Faults {
        let mut faults = Faults::default();
        if firmware.end().is_some() {
            // What was not answered may yet happen: nothing stands for certain.
            faults.add_general(CommandError::Tainted { opcode: Opcode::MODIFY_GENERAL_OBJECT });
        }
        for index in self.queues.iter().copied() {
            let Some(object) = queues.object(index) else { continue };
            if object.stands() && queues.list[index].at.is_some() {
                continue;
            }
            if object.state == ObjectState::Suspended && !queues.is_resumable() {
                // It can only be made anew, and where is lost.
                firmware.taint();
            }
            let opcode = Opcode::QUERY_GENERAL_OBJECT;
            let lost = CommandError::Nonsense { opcode, what: "where it stands" };
            faults.add(index, self.wrong.get(&index).cloned().unwrap_or(lost));
        }
        faults
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
        Err(error) => _ = wrong.insert(index, error.clone()),
    }
}

fn read(
    queues: &mut Queues,
    wrong: &mut BTreeMap<usize, CommandError>,
    index: usize,
    result: &Result<Output, CommandError>,
) {
    let Some(object) = queues.object_mut(index) else { return };
    let found =
        result.as_ref().map_err(CommandError::clone).and_then(|output| object.found(output));
    match found {
        Ok(Some(at)) => {
            queues.list[index].at = Some(at);
            wrong.remove(&index);
        }
        // It runs: the stop's own error says why.
        Ok(None) => {}
        Err(error) => _ = wrong.entry(index).or_insert(error),
    }
}
