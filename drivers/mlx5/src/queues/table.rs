//! The table over which received frames are spread.
//!
//! A queue must be ready before the table names it, and must not be named any more when it stops:
//! so a table shrinks before its queues do, and grows after them.

use super::set::Queues;
use crate::command::{CommandError, Output, Request};
use crate::firmware::Firmware;
use martlet_mlx5_abi::message::{InHeader, ShortIn, ShortOut};
use martlet_mlx5_abi::rqt::{LIST_OF_VIRTQUEUES, MODIFY_LIST, RqtIn};
use martlet_mlx5_abi::{Opcode, U16, U24, U64};
use zerocopy::{FromZeros, IntoBytes};

/// A table in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    rqtn: u32,
    /// The receive queues that it names.
    list: Vec<u32>,
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
            Some(table) if table.list == receivers => None,
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
        let output = result.as_ref().map_err(CommandError::clone)?;
        let list = receivers.to_vec();
        match (step, &mut self.table) {
            (TableStep::Create, _) => {
                let rqtn = output.read::<ShortOut>()?.object.get();
                self.table = Some(Table { rqtn, list });
            }
            (TableStep::Modify, Some(table)) => table.list = list,
            (TableStep::Modify | TableStep::Destroy, _) => self.table = None,
        }
        Ok(())
    }

    /// Makes the table name exactly these queues, and waits for it.
    pub(crate) fn set_table(
        &mut self,
        firmware: &Firmware,
        receivers: &[u32],
    ) -> Result<(), CommandError> {
        let Some(step) = self.table_step(receivers) else { return Ok(()) };
        let request = self.table_request(step, receivers);
        let result = firmware.call(firmware.options().deadlines.queues, request);
        self.table_answer(step, receivers, &result)
    }
}
