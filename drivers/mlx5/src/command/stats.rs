//! What the command queue counts.

use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use std::collections::BTreeMap;
use std::time::Duration;

/// Figures of one opcode (Linux keeps the like in `struct mlx5_cmd_stats`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpcodeStats {
    /// Commands issued.
    pub issued: u64,
    /// Commands answered with success.
    pub succeeded: u64,
    /// Commands answered with an error, of either kind.
    pub failed: u64,
    /// Commands given up.
    pub timed_out: u64,
    /// Commands answered after they had been given up.
    pub late: u64,
    /// Times that there was no slot or no permit.
    pub busy: u64,
    /// Time from issue to answer, of all that were answered in time.
    pub latency: Duration,
    /// The longest such time.
    pub latency_max: Duration,
    /// Commands that the device has now.
    pub in_flight: u32,
    /// The most that it had at a time: how deep the window was.
    pub in_flight_max: u32,
    /// Why the last one was not delivered that was not.
    pub last_delivery: Option<DeliveryStatus>,
    /// The firmware's answer to the last one that failed.
    pub last_status: Option<CommandStatus>,
    /// And its own code.
    pub last_syndrome: u32,
}

impl OpcodeStats {}

/// Figures of the whole queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// By opcode.
    pub opcodes: BTreeMap<Opcode, OpcodeStats>,
    /// Values written to the doorbell: each may start several commands.
    pub doorbells: u64,
    /// Answers that an event told of.
    pub by_event: u64,
    /// Answers that were found by looking, because no event told of them in time.
    pub by_probe: u64,
    /// Bits of events for slots that were not answered, or not in use.
    pub spurious: u64,
    /// Slots that wait for a late answer now.
    pub quarantined: u32,
    /// The most mailboxes in use at a time.
    pub mailboxes_max: usize,
}

impl QueueStats {
    /// The figures of one opcode.
    pub fn of(&self, opcode: Opcode) -> OpcodeStats {
        self.opcodes.get(&opcode).copied().unwrap_or_default()
    }

    /// Commands issued, of all opcodes.
    pub fn issued(&self) -> u64 {
        self.opcodes.values().map(|stats| stats.issued).sum()
    }
}
