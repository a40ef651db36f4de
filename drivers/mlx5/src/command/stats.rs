//! What the command queue counts.

use martlet_mlx5_abi::Opcode;
use std::collections::BTreeMap;

/// Figures of one opcode (Linux keeps the like in `struct mlx5_cmd_stats`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpcodeStats {
    /// Commands issued.
    pub issued: u64,
    /// Commands that the device has now.
    pub in_flight: u32,
    /// The most that it had at a time: how deep the window was.
    pub in_flight_max: u32,
}

impl OpcodeStats {
    /// A command was issued, or has ended.
    pub(super) fn count(&mut self, is_issued: bool) {
        if is_issued {
            self.issued += 1;
            self.in_flight += 1;
            self.in_flight_max = self.in_flight_max.max(self.in_flight);
        } else {
            self.in_flight -= 1;
        }
    }
}

/// Figures of the whole queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// By opcode.
    pub opcodes: BTreeMap<Opcode, OpcodeStats>,
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
