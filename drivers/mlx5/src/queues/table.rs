//! The table over which received frames are spread.
//!
//! A queue must be ready before the table names it, and must not be named any more when it stops:
//! so a table shrinks before its queues do, and grows after them.

use super::set::{Queues, batch};
use crate::command::{CommandError, Output, Request};
use crate::firmware::Firmware;
use crate::options::Pace;
use martlet_mlx5_abi::message::{InHeader, ShortIn, ShortOut};
use martlet_mlx5_abi::rqt::{LIST_OF_VIRTQUEUES, MODIFY_LIST, RqtIn};
use martlet_mlx5_abi::{CommandStatus, Opcode, U16, U24, U64};
use zerocopy::{FromZeros, IntoBytes};

/// How often a step is tried: after one that was not answered, the second finds out what has
/// happened.
pub(super) const TABLE_TRIES_MAX: u32 = 2;

/// A table in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    rqtn: u32,
    /// The receive queues that it names. `None` while a change of it is not known to have
    /// happened.
    list: Option<Vec<u32>>,
}

/// What has to be done so that the table names exactly these queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableStep {
    Create,
    Modify,
    Destroy,
}

impl Queues {
    /// The next step, if the table is not as it shall be.
    pub(crate) fn table_step(&self, receivers: &[u32]) -> Option<TableStep> {
        match &self.table {
            None if receivers.is_empty() => None,
            None => Some(TableStep::Create),
            Some(_) if receivers.is_empty() => Some(TableStep::Destroy),
            Some(table) if table.list.as_deref() == Some(receivers) => None,
            Some(_) => Some(TableStep::Modify),
        }
    }

    /// The command for a step.
    pub(crate) fn table_request(&self, step: TableStep, receivers: &[u32]) -> Request {
        let rqtn = self.table.as_ref().map_or(0, |table| table.rqtn);
        let opcode = match step {
            TableStep::Create => Opcode::CREATE_RQT,
            TableStep::Modify => Opcode::MODIFY_RQT,
            TableStep::Destroy => {
                let input = ShortIn::new(Opcode::DESTROY_RQT, 0, rqtn);
                return Request::new::<ShortOut>(Opcode::DESTROY_RQT, &input);
            }
        };
        let pairs = self.list.len() / 2;
        let power = |count: usize| {
            u16::try_from(count.next_power_of_two()).expect("a table has fewer entries")
        };
        let actual = power(receivers.len());
        let mut input = RqtIn::new_zeroed();
        input.header = InHeader::new(opcode, 0);
        input.rqtn = U24::new(rqtn);
        if step == TableStep::Modify {
            input.modify_bitmask = U64::new(MODIFY_LIST);
        }
        input.context.list_q_type = LIST_OF_VIRTQUEUES;
        input.context.max_size = U16::new(power(pairs));
        input.context.actual_size = U16::new(actual);
        let mut bytes = input.as_bytes().to_vec();
        // Lists are powers of two long: some queues come twice.
        for number in receivers.iter().cycle().take(usize::from(actual)) {
            bytes.extend(number.to_be_bytes());
        }
        Request::new::<ShortOut>(opcode, &*bytes)
    }

    /// Takes the answer to a step.
    pub(crate) fn table_answer(
        &mut self,
        step: TableStep,
        receivers: &[u32],
        result: &Result<Output, CommandError>,
    ) -> Result<(), CommandError> {
        let list = Some(receivers.to_vec());
        match (step, result) {
            (TableStep::Create, Ok(output)) => {
                let rqtn = output.read::<ShortOut>()?.object.get();
                self.table = Some(Table { rqtn, list });
            }
            (TableStep::Modify, Ok(_)) => {
                if let Some(table) = &mut self.table {
                    table.list = list;
                }
            }
            (TableStep::Destroy, Ok(_)) => self.table = None,
            // A destruction that was not answered has happened after all.
            (_, Err(CommandError::Status { status: CommandStatus::BAD_RESOURCE, .. })) => {
                self.table = None;
                if step == TableStep::Destroy {
                    return Ok(());
                }
            }
            (TableStep::Destroy, Err(CommandError::Gone { .. })) => {
                self.table = None;
                return Ok(());
            }
            (TableStep::Modify | TableStep::Destroy, Err(error)) if error.may_be_done() => {
                if let Some(table) = &mut self.table {
                    table.list = None;
                }
            }
            (TableStep::Create | TableStep::Modify | TableStep::Destroy, Err(_)) => {}
        }
        result.as_ref().map(|_| ()).map_err(CommandError::clone)
    }

    /// Makes the table name exactly these queues, and waits for it.
    pub(crate) fn set_table(
        &mut self,
        firmware: &Firmware,
        receivers: &[u32],
    ) -> Result<(), CommandError> {
        let mut outcome = Ok(());
        for _ in 0..TABLE_TRIES_MAX {
            let Some(step) = self.table_step(receivers) else { return Ok(()) };
            let mut batch = batch(firmware, Pace::Serial);
            batch.push(self.table_request(step, receivers));
            firmware.run(&mut batch);
            outcome = match batch.result(0) {
                Some(result) => self.table_answer(step, receivers, result),
                None => Ok(()),
            };
        }
        outcome
    }
}
