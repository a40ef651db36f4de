//! Makes the objects of queues that have none: memory for the firmware and counters first.

use super::{Stage, Starting, Target};
use crate::batch::Batch;
use crate::command::{CommandError, Keep, Output, Request};
use crate::firmware::Firmware;
use crate::queues::fate::number;
use crate::queues::queue::{Fields, Object, create_request};
use crate::queues::set::{Queues, batch};
use crate::queues::state::ObjectState;
use crate::queues::umem::{UmemPiece, UmemPlan};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::{GeneralObjectIn, GeneralObjectOut, ShortOut, object_type};
use martlet_mlx5_abi::virtq::{CountersIn, VirtqCounters};
use std::sync::Arc;
use zerocopy::FromZeros;

/// A queue whose object is being made.
pub(super) struct Made {
    index: usize,
    fields: Fields,
    hold: Keep,
    umem: Arc<UmemPiece>,
    size: u16,
}

impl Starting {
    /// Memory for the firmware, and counters.
    pub(super) fn supply(&mut self, firmware: &Firmware, queues: &Queues) -> Stage {
        let size = |index: &usize| queues.list[*index].config.map_or(0, |config| config.size);
        let sizes: Vec<u16> = self.remake.iter().map(size).collect();
        let style = firmware.options().umems;
        let plan = UmemPlan::new(firmware.dma(), &queues.capabilities, style, &sizes);
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => {
                self.faults.add_host(error.to_string());
                self.remake.clear();
                return self.ready(firmware, queues);
            }
        };
        let mut batch = batch(firmware, firmware.options().lifecycle);
        for request in plan.requests() {
            batch.push(request);
        }
        let lacks = |index: &usize| queues.has_counters && queues.list[*index].counters.is_none();
        let counters: Vec<usize> = self.remake.iter().copied().filter(lacks).collect();
        for _ in &counters {
            batch.push(counters_request());
        }
        Stage::Supply { batch, plan, counters }
    }

    pub(super) fn create(
        &mut self,
        firmware: &Firmware,
        queues: &mut Queues,
        supplied: &Batch,
        plan: UmemPlan,
        counters: &[usize],
    ) -> Stage {
        let mut results = supplied.results();
        let umems = supplied.len() - counters.len();
        let ids: Result<Vec<u32>, CommandError> =
            results.by_ref().take(umems).map(object_of).collect();
        for (index, result) in counters.iter().zip(results) {
            // Without counters a queue works as well.
            let output = result.as_ref().ok().and_then(|o| o.read::<GeneralObjectOut>().ok());
            queues.list[*index].counters = output.map(|output| output.obj_id.get());
        }
        let pieces = match ids {
            Ok(ids) => plan.pieces(&ids, &queues.retired),
            Err(error) => {
                self.forget_umems(supplied, umems, plan, queues);
                for index in std::mem::take(&mut self.remake) {
                    self.faults.add(index, error.clone());
                }
                return self.ready(firmware, queues);
            }
        };
        let mut batch = batch(firmware, firmware.options().lifecycle);
        let mut made = Vec::new();
        for (index, umem) in self.remake.iter().copied().zip(pieces) {
            let queue = &queues.list[index];
            let wanted = match (self.target, &queues.scratch) {
                (Target::MadeOnScratch, Some(scratch)) => Some(queues.wanted_on_scratch(scratch)),
                _ => queues.wanted(index),
            };
            // Without a map nothing can be made of it, nor if nobody can say where it would begin.
            let Some(((fields, hold), size)) =
                wanted.filter(|(f, _)| f.at.is_some()).zip(queue.config.map(|config| config.size))
            else {
                self.faults.add_host(format!("where queue {index} stands can't be read"));
                continue;
            };
            let counters = queue.counters;
            let common = &queues.common;
            let request = create_request(number(index), size, &fields, common, &umem, counters);
            let keep = Arc::new((Arc::clone(&umem), hold.clone()));
            batch.push(request.keeping(keep));
            made.push(Made { index, fields, hold, umem, size });
        }
        Stage::Create { batch, made }
    }

    /// Some umems could not be made: those that were are retired.
    fn forget_umems(&self, supplied: &Batch, umems: usize, plan: UmemPlan, queues: &Queues) {
        let made = supplied.results().take(umems).map(object_of);
        plan.retire(made.map(Result::ok), &queues.retired);
    }

    pub(super) fn created(
        &mut self,
        queues: &mut Queues,
        made: Made,
        result: &Result<Output, CommandError>,
    ) {
        let id = result
            .as_ref()
            .map_err(CommandError::clone)
            .and_then(|output| output.read::<GeneralObjectOut>())
            .map(|output| output.obj_id.get());
        match id {
            Ok(id) => {
                let Made { index, fields, hold, umem, size } = made;
                let state = ObjectState::Init;
                queues.list[index].object = Some(Object { id, size, state, fields, umem, hold });
            }
            Err(error) => self.faults.add(made.index, error),
        }
    }
}

fn object_of(result: &Result<Output, CommandError>) -> Result<u32, CommandError> {
    let output = result.as_ref().map_err(CommandError::clone)?;
    Ok(output.read::<ShortOut>()?.object.get())
}

fn counters_request() -> Request {
    let opcode = Opcode::CREATE_GENERAL_OBJECT;
    let header = GeneralObjectIn::new(opcode, object_type::VIRTIO_Q_COUNTERS, 0);
    let object = VirtqCounters::new_zeroed();
    Request::new::<GeneralObjectOut>(opcode, &CountersIn { header, object })
}
