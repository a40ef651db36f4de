//! What the answers to a start's commands mean for its queues.

use super::Item;
use crate::command::{CommandError, CommandId, Output};
use crate::queues::set::{Gates, Queues};
use crate::queues::state::{ObjectEvent, ObjectState};

/// Takes what a queue says of which something is unclear.
pub(super) fn found(queues: &mut Queues, index: usize, result: &Result<Output, CommandError>) {
    let Some(object) = queues.object_mut(index) else { return };
    let was_unknown = object.state == ObjectState::Unknown;
    let found = result.as_ref().ok().and_then(|output| object.found(output).ok()).flatten();
    let has_run = was_unknown && object.state == ObjectState::Broken;
    if let Some(found) = found {
        let at = &mut queues.list[index].at;
        // If it has never run, what the VMM or an earlier query said counts more.
        *at = if has_run { Some(found) } else { at.or(Some(found)) };
    }
}

pub(super) fn runs(queues: &mut Queues, gates: &impl Gates, index: usize) {
    if let Some(object) = queues.object_mut(index) {
        object.fields.at = None;
    }
    queues.list[index].at = None;
    gates.open(index);
}

/// Takes the answer to an item of the last batch; the queue and the error, if it failed.
pub(super) fn readied(
    queues: &mut Queues,
    gates: &impl Gates,
    item: Item,
    id: Option<CommandId>,
    result: &Result<Output, CommandError>,
) -> Option<(usize, CommandError)> {
    let Item { index, fields, hold, starts } = item;
    let object = queues.object_mut(index)?;
    match result {
        Ok(_) => {
            if starts {
                object.change(ObjectEvent::Started);
            }
            object.has_fields(&fields, Some(hold));
        }
        Err(error) if error.may_be_done() => {
            if starts {
                object.change(ObjectEvent::Unanswered);
            }
            object.changes_out.extend(id);
            object.may_have_fields(&fields, Some(hold));
        }
        Err(_) => {}
    }
    if !starts {
        // Its second command tells, by being skipped.
        return None;
    }
    let error = result.as_ref().err().cloned();
    if error.is_none() {
        runs(queues, gates, index);
    }
    error.map(|error| (index, error))
}
