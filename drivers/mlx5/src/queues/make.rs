//! Makes queues ahead of time, and ends them. These wait.

use super::fate::Faults;
use super::set::{Gates, Queues, batch};
use super::start::{Starting, Target};
use super::state::{ObjectEvent, ObjectState};
use super::stop::Stopping;
use crate::command::{CommandError, Output, Request};
use crate::firmware::Firmware;
use crate::options::Prepare;
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::object_type;
use martlet_mlx5_abi::virtq::{QueryCountersOut, VirtqCounters};
use martlet_vdpa::VdpaError;

impl Queues {
    /// Makes the active queues, as far as they don't exist, so that their start is cheap.
    pub(crate) fn prepare(
        &mut self,
        firmware: &Firmware,
        gates: &impl Gates,
        style: Prepare,
    ) -> Faults {
        let active = self.active();
        match style {
            Prepare::Suspended if self.is_resumable() && self.scratch.is_some() => {
                let starting = Starting::begin(&active, Target::MadeOnScratch);
                let mut faults = starting.run(firmware, self, gates);
                faults.extend(self.warm_up(firmware, &active));
                faults
            }
            Prepare::Suspended | Prepare::Created => {
                Starting::begin(&active, Target::Made).run(firmware, self, gates)
            }
        }
    }

    /// Runs new queues on the driver's own empty ring and suspends them: from SUSPEND, one command
    /// is enough for all fields and the start.
    fn warm_up(&mut self, firmware: &Firmware, active: &[usize]) -> Faults {
        let mut faults = Faults::default();
        let mut batch = batch(firmware, firmware.options().lifecycle);
        let is_new = |index: &usize| {
            self.object(*index).is_some_and(|object| object.state == ObjectState::Init)
        };
        let new: Vec<usize> = active.iter().copied().filter(is_new).collect();
        for object in new.iter().filter_map(|index| self.object(*index)) {
            let ready = batch.push(object.ready_request(&object.fields));
            batch.push_after(object.stop_request(), ready);
        }
        firmware.run(&mut batch);
        let results = batch.into_results();
        for (index, pair) in new.into_iter().zip(results.chunks(2)) {
            let Some(object) = self.object_mut(index) else { continue };
            let changes = [ObjectEvent::Started, ObjectEvent::Stopped];
            for (result, event) in pair.iter().zip(changes) {
                match result {
                    Ok(_) => object.change(event),
                    Err(error) => faults.add(index, error.clone()),
                }
            }
        }
        faults
    }

    /// Stops queues and waits. Nothing wrong means that all stand where they say.
    pub(crate) fn stop(
        &mut self,
        firmware: &Firmware,
        which: &[usize],
        gates: &impl Gates,
    ) -> Faults {
        let mut stopping = Stopping::begin(firmware, self, which, gates);
        loop {
            if let Some(faults) = stopping.poll(firmware, self) {
                return faults;
            }
            firmware.wait_until(None);
        }
    }

    /// Ends queues, whatever they do. They must not be in the table. Where they stood, only their
    /// rings tell then.
    pub(crate) fn destroy(
        &mut self,
        firmware: &Firmware,
        which: &[usize],
        gates: &impl Gates,
    ) -> Faults {
        let which = self.with_object(which);
        which.iter().for_each(|index| gates.close(*index));
        let mut batch = self.end_batch(firmware, firmware.options().lifecycle, &which);
        firmware.run(&mut batch);
        let faults = self.ended(firmware, &which, &batch);
        self.drop_retired(firmware);
        faults
    }

    /// Asks a queue once more where it stands, as Linux does for each vring base.
    pub(crate) fn read_again(
        &mut self,
        firmware: &Firmware,
        index: usize,
        action: &'static str,
    ) -> Result<(), VdpaError> {
        let Some(object) = self.object_mut(index) else { return Ok(()) };
        let output = firmware.call(firmware.options().deadlines.queues, object.query_request());
        let found = output.and_then(|output| object.found(&output));
        let found = found.map_err(|error| super::fate::vdpa_error(action, &error))?;
        self.list[index].at = found.or(self.list[index].at);
        Ok(())
    }

    /// Reads the counters of all queues: receive and transmit queues, by turns.
    pub(crate) fn read_counters(&self, firmware: &Firmware) -> Vec<(usize, VirtqCounters)> {
        let mut batch = batch(firmware, firmware.options().lifecycle);
        let numbered = self.list.iter().enumerate();
        let numbered = numbered.filter_map(|(index, queue)| Some((index, queue.counters?)));
        let numbered: Vec<(usize, u32)> = numbered.collect();
        for (_, number) in &numbered {
            let (opcode, kind) = (Opcode::QUERY_GENERAL_OBJECT, object_type::VIRTIO_Q_COUNTERS);
            batch.push(Request::general::<QueryCountersOut>(opcode, kind, *number));
        }
        firmware.run(&mut batch);
        let read = |result: &Result<Output, CommandError>| {
            result.as_ref().ok()?.read::<QueryCountersOut>().ok()
        };
        let results = numbered.iter().zip(batch.results());
        results.filter_map(|((index, _), result)| Some((*index, read(result)?.object))).collect()
    }
}
