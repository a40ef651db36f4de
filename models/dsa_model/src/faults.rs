//! What may go wrong in a device.

use martlet_dsa_abi::{Opcode, Status};
use martlet_fault_plan::FaultPlan;
use std::time::Duration;

/// Where a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// At the portal, for each submission to any queue.
    Submit,
    /// At the start of each batch.
    Batch,
    /// At the start of each operation, alone or in a batch.
    Operation,
    /// At the start of each operation of this kind.
    Only(Opcode),
}

/// What goes wrong. A fault at a point where it has no meaning does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Submit: the queue says it is full. Many in a row are a retry storm.
    Retry,
    /// Submit: the device is unplugged now, with everything it holds.
    Gone,
    /// Submit: the device halts: its state says so, it takes nothing more and finishes nothing.
    Halt,
    /// Batch: its descriptor list faults behind this many descriptors.
    ListFault {
        /// How many are read well.
        after: u32,
    },
    /// Batch: its descriptors run from the last to the first, as engines may choose.
    Reverse,
    /// Batch, operation: ends with this status and does nothing.
    Status(Status),
    /// Operation: its memory is not mapped from here on.
    PageFault {
        /// How many bytes are worked on before.
        after: u32,
    },
    /// Batch, operation: never ends, and holds its engine for ever.
    Hang,
    /// Batch, operation: is done, but its completion record is never written.
    NoRecord,
    /// Batch, operation: its completion record comes this much later.
    Late(Duration),
    /// Batch, operation: its completion record is written a second time, this much later.
    Twice(Duration),
}

/// Faults of a device.
pub type Faults = FaultPlan<FaultPoint, Fault>;

/// Asks the plan at the start of an operation.
pub(crate) fn at_operation(faults: &mut Faults, opcode: Opcode) -> Option<Fault> {
    faults.strike_where(|point| match point {
        FaultPoint::Operation => true,
        FaultPoint::Only(only) => *only == opcode,
        FaultPoint::Submit | FaultPoint::Batch => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_for_one_operation_leaves_the_others_alone() {
        let mut faults = Faults::once(FaultPoint::Only(Opcode::COMPVAL), 1, Fault::Hang);
        let kinds = [Opcode::COMPVAL, Opcode::DRAIN, Opcode::COMPVAL, Opcode::COMPVAL];
        let struck = kinds.map(|kind| at_operation(&mut faults, kind));
        assert_eq!(struck, [None, None, Some(Fault::Hang), None]);
        let mut faults = Faults::once(FaultPoint::Operation, 0, Fault::NoRecord);
        assert_eq!(faults.strike(&FaultPoint::Submit), None);
        assert_eq!(at_operation(&mut faults, Opcode::NOOP), Some(Fault::NoRecord));
    }
}
