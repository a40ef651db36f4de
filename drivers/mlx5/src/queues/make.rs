//! Makes queues ahead of time, and ends them. These wait.

use super::fate::Faults;
use super::set::{Gates, Queues, batch, is_destroyed};
use super::start::{Starting, Target};
use super::state::{ObjectEvent, ObjectState};
use super::stop::Stopping;
use crate::command::{CommandError, Output, Request};
use crate::firmware::Firmware;
use crate::options::Prepare;
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::{GeneralObjectOut, object_type};
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
        let commands: Vec<_> = (0..batch.len()).map(|number| batch.command(number)).collect();
        let results = batch.into_results();
        let answers = results.chunks(2).zip(commands.chunks(2));
        for (index, (pair, commands)) in new.into_iter().zip(answers) {
            let Some(object) = self.object_mut(index) else { continue };
            match pair {
                [Ok(_), Ok(_)] => {
                    object.change(ObjectEvent::Started);
                    object.change(ObjectEvent::Stopped);
                }
                [first, second] => {
                    // It may run, or may come to: it is made anew by whoever needs it, and ended
                    // before anybody says that all queues stand.
                    object.change(ObjectEvent::Unanswered);
                    if first.as_ref().is_err_and(CommandError::may_be_done) {
                        object.changes_out.extend(commands[0]);
                    }
                    if let Some(error) = first.as_ref().err().or(second.as_ref().err()) {
                        faults.add(index, error.clone());
                    }
                }
                _ => {}
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

    /// Ends queues, whatever they do. They must not be in the table. What can't be ended is kept, with
    /// the memory that it may use.
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
        self.ended(&which, &batch);
        let mut faults = Faults::default();
        for (index, result) in which.iter().zip(batch.results()) {
            if let Err(error) = result
                && !is_destroyed(result)
            {
                faults.add(*index, error.clone());
            }
        }
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
        let options = firmware.options();
        let request = object.query_request();
        let output = firmware.call(options.deadlines.queues, request);
        let found = output.and_then(|output| object.found(&output));
        match found {
            Ok(Some(at)) => {
                self.list[index].at = Some(at);
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => Err(super::fate::vdpa_error(action, &error)),
        }
    }

    /// Looks what state queues are in that should run, and starts those that stand.
    pub(crate) fn wake_up(
        &mut self,
        firmware: &Firmware,
        which: &[usize],
        gates: &impl Gates,
    ) -> Faults {
        let which = self.with_object(which);
        let mut batch = self.query_batch(firmware, &which);
        firmware.run(&mut batch);
        let mut standing = Vec::new();
        for (index, result) in which.into_iter().zip(batch.into_results()) {
            let Some(object) = self.object_mut(index) else { continue };
            let was = object.state;
            if let Ok(Some(at)) = result.and_then(|output| object.found(&output))
                && was != ObjectState::Broken
                && object.state == ObjectState::Suspended
            {
                self.list[index].at = Some(at);
                standing.push(index);
            }
        }
        if standing.is_empty() {
            return Faults::default();
        }
        Starting::begin(&standing, Target::Running).run(firmware, self, gates)
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

    /// Drops the counters of all queues, which must not exist any more.
    pub(crate) fn drop_counters(&mut self, firmware: &Firmware) {
        let mut batch = batch(firmware, firmware.options().lifecycle);
        for queue in &mut self.list {
            if let Some(number) = queue.counters.take() {
                let (opcode, kind) =
                    (Opcode::DESTROY_GENERAL_OBJECT, object_type::VIRTIO_Q_COUNTERS);
                batch.push(Request::general::<GeneralObjectOut>(opcode, kind, number));
            }
        }
        firmware.run(&mut batch);
    }
}
