//! What late answers leave behind.
//!
//! A creation that was given up may have happened after all. Nobody knows its object then, and it
//! would live as long as the function: it is destroyed here, and only then what it was kept alive
//! for goes. A late change of a virtqueue is told to the queues, which look what state it is in.

use super::shared::users;
use crate::batch::{Batch, BatchOptions, OnFailure};
use crate::command::{CommandQueue, LateCompletion, Output, Request};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::message::{GeneralObjectIn, GeneralObjectOut, ShortIn, ShortOut};
use martlet_units::Instant;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Cleanup {
    deadline: Duration,
    waiting: Vec<Request>,
    current: Option<Batch>,
    changes: bool,
    destroyed: u64,
}

impl Cleanup {
    pub(super) fn new(deadline: Duration) -> Cleanup {
        Cleanup { deadline, waiting: Vec::new(), current: None, changes: false, destroyed: 0 }
    }

    /// How many objects were destroyed.
    pub(super) fn destroyed(&self) -> u64 {
        self.destroyed
    }

    pub(super) fn take_changes(&mut self) -> bool {
        std::mem::take(&mut self.changes)
    }

    pub(super) fn add(&mut self, late: LateCompletion) {
        if late.opcode == Opcode::MODIFY_GENERAL_OBJECT {
            self.changes = true;
            return;
        }
        let Ok(output) = &late.result else { return };
        if let Some(mut request) = undo(late.opcode, late.op_mod, output) {
            request.keep = late.keep;
            self.waiting.push(request);
        }
    }

    pub(super) fn poll(&mut self, now: Instant, queue: &mut CommandQueue) {
        if self.current.is_none() && !self.waiting.is_empty() {
            let mut batch = Batch::new(BatchOptions {
                user: users::LAZY,
                window: 1,
                deadline: self.deadline,
                on_failure: OnFailure::GoOn,
            });
            for request in self.waiting.drain(..) {
                batch.push(request);
            }
            self.current = Some(batch);
        }
        if let Some(batch) = &mut self.current
            && batch.poll(now, queue)
        {
            let done = batch.results().filter(|result| result.is_ok()).count();
            self.destroyed += u64::try_from(done).unwrap_or(0);
            self.current = None;
        }
    }

    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        self.current.as_ref().and_then(|batch| batch.poll_timeout(now))
    }
}

/// The command that destroys what another has made; `None` for one that makes nothing.
fn undo(opcode: Opcode, op_mod: u16, output: &Output) -> Option<Request> {
    if opcode == Opcode::CREATE_GENERAL_OBJECT {
        let id = output.read::<GeneralObjectOut>().ok()?.obj_id.get();
        let destroy = Opcode::DESTROY_GENERAL_OBJECT;
        let input = GeneralObjectIn::new(destroy, op_mod, id);
        return Some(Request::new::<GeneralObjectOut>(destroy, &input));
    }
    let destroy = match opcode {
        Opcode::CREATE_MKEY => Opcode::DESTROY_MKEY,
        Opcode::CREATE_UMEM => Opcode::DESTROY_UMEM,
        Opcode::CREATE_RQT => Opcode::DESTROY_RQT,
        Opcode::ALLOC_PD => Opcode::DEALLOC_PD,
        Opcode::ALLOC_UAR => Opcode::DEALLOC_UAR,
        Opcode::CREATE_EQ => Opcode::DESTROY_EQ,
        _ => return None,
    };
    let object = output.read::<ShortOut>().ok()?.object.get();
    Some(Request::new::<ShortOut>(destroy, &ShortIn::new(destroy, 0, object)))
}
