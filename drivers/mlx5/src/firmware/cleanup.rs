//! What late answers leave behind.
//!
//! A creation that was given up may have happened after all. Nobody knows its object then, and it
//! would live as long as the function: it is destroyed here, and only then what it was kept alive
//! for goes. A late change of a virtqueue is told to the queues, which look what state it is in.

use super::shared::is_done;
use crate::batch::Batch;
use crate::command::{CommandError, CommandQueue, Keep, LateCompletion, Output, Request};
use martlet_mlx5_abi::message::{GeneralObjectOut, ShortIn, ShortOut};
use martlet_mlx5_abi::{CommandStatus, Opcode};
use martlet_units::Instant;
use std::fmt;
use std::time::Duration;

/// How often an object is tried to be destroyed, before only a restart of the function helps.
const TRIES_MAX: u32 = 3;

pub(super) struct Cleanup {
    deadline: Duration,
    waiting: Vec<Undo>,
    current: Option<(Batch, Vec<Undo>)>,
    /// What could not be destroyed: it lives as long as the function, and so does what it uses.
    left: Vec<Undo>,
    changes: bool,
}

/// Something that was made, and that nobody wants.
struct Undo {
    destroy: Opcode,
    op_mod: u16,
    object: u32,
    keep: Option<Keep>,
    tries: u32,
}

impl fmt::Debug for Undo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Undo({}, {})", self.destroy, self.object)
    }
}

impl Cleanup {
    pub(super) fn new(deadline: Duration) -> Cleanup {
        Cleanup { deadline, waiting: Vec::new(), current: None, left: Vec::new(), changes: false }
    }

    /// Whether something exists that nobody wants.
    pub(super) fn is_clean(&self) -> bool {
        self.waiting.is_empty() && self.current.is_none() && self.left.is_empty()
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
        if let Some((destroy, object)) = undo(late.opcode, output) {
            let (op_mod, keep) = (late.op_mod, late.keep);
            self.waiting.push(Undo { destroy, op_mod, object, keep, tries: 0 });
        }
    }

    pub(super) fn poll(&mut self, now: Instant, queue: &mut CommandQueue) {
        if self.current.is_none() && !self.waiting.is_empty() {
            let mut batch = Batch::new(1, self.deadline);
            let undoing = std::mem::take(&mut self.waiting);
            for undo in &undoing {
                batch.push(undo.request());
            }
            self.current = Some((batch, undoing));
        }
        let done = |(batch, _): &mut (Batch, Vec<Undo>)| batch.poll(now, queue);
        if let Some((batch, undoing)) = self.current.take_if(done) {
            for (undo, result) in undoing.into_iter().zip(batch.results()) {
                self.undone(undo, result);
            }
        }
    }

    fn undone(&mut self, mut undo: Undo, result: &Result<Output, CommandError>) {
        undo.tries += 1;
        // Either a try that was not answered has happened after all, or the number that the late
        // answer gave was never the right one: nothing else has confirmed it.
        let is_missing =
            matches!(result, Err(CommandError::Status { status: CommandStatus::BAD_RESOURCE, .. }));
        if is_done(undo.destroy, result) {
            return;
        }
        if undo.tries < TRIES_MAX && !is_missing {
            self.waiting.push(undo);
        } else {
            tracing::warn!(?undo, "what a late command made can't be destroyed");
            self.left.push(undo);
        }
    }

    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        self.current.as_ref().and_then(|(batch, _)| batch.poll_timeout(now))
    }
}

impl Undo {
    fn request(&self) -> Request {
        let Undo { destroy, op_mod, object, .. } = self;
        let mut request = if *destroy == Opcode::DESTROY_GENERAL_OBJECT {
            Request::general::<GeneralObjectOut>(*destroy, *op_mod, *object)
        } else {
            Request::new::<ShortOut>(*destroy, &ShortIn::new(*destroy, 0, *object))
        };
        request.keep.clone_from(&self.keep);
        request
    }
}

/// What destroys what another command has made, and its number; `None` for one that makes nothing.
fn undo(opcode: Opcode, output: &Output) -> Option<(Opcode, u32)> {
    let destroy = match opcode {
        Opcode::CREATE_GENERAL_OBJECT => {
            let object = output.read::<GeneralObjectOut>().ok()?.obj_id.get();
            return Some((Opcode::DESTROY_GENERAL_OBJECT, object));
        }
        Opcode::CREATE_MKEY => Opcode::DESTROY_MKEY,
        Opcode::CREATE_UMEM => Opcode::DESTROY_UMEM,
        Opcode::CREATE_RQT => Opcode::DESTROY_RQT,
        Opcode::ALLOC_PD => Opcode::DEALLOC_PD,
        Opcode::ALLOC_UAR => Opcode::DEALLOC_UAR,
        Opcode::CREATE_EQ => Opcode::DESTROY_EQ,
        _ => return None,
    };
    Some((destroy, output.read::<ShortOut>().ok()?.object.get()))
}
