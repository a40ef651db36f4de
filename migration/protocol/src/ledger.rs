//! What a destination process remembers of attempts that are over.

use crate::limits::LEDGER_ABANDONED_MAX;
use martlet_wire::control::{Answer, Fate, InstanceId, MigrationId};
use std::collections::VecDeque;

/// A destination process's memory of past attempts. It lives as long as the process: hand it to
/// each [`Destination`](crate::Destination) and take it back when that is done.
///
/// An attempt in it as abandoned is a promise: its number is never accepted again.
#[derive(Clone, Debug)]
pub struct Ledger {
    instance: InstanceId,
    arrived: Vec<MigrationId>,
    abandoned: VecDeque<MigrationId>,
}

impl Ledger {
    /// The empty ledger of a process that just started. `instance` must be random.
    pub fn new(instance: InstanceId) -> Ledger {
        Ledger { instance, arrived: Vec::new(), abandoned: VecDeque::new() }
    }

    /// The process's name.
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// What became of an attempt.
    pub fn fate(&self, migration: MigrationId) -> Fate {
        if self.arrived.contains(&migration) {
            Fate::Committed
        } else if self.abandoned.contains(&migration) {
            Fate::Abandoned
        } else {
            Fate::Unknown
        }
    }

    /// The answer to a query that comes while no attempt is under way.
    pub fn answer(&self, migration: MigrationId) -> Answer {
        Answer { instance: self.instance, fate: self.fate(migration) }
    }

    pub(crate) fn record_arrived(&mut self, migration: MigrationId) {
        assert_eq!(self.fate(migration), Fate::Unknown, "an attempt ends once");
        self.arrived.push(migration);
    }

    pub(crate) fn record_abandoned(&mut self, migration: MigrationId) {
        assert_eq!(self.fate(migration), Fate::Unknown, "an attempt ends once");
        if self.abandoned.len() == LEDGER_ABANDONED_MAX {
            self.abandoned.pop_front();
        }
        self.abandoned.push_back(migration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_old_failures_and_no_arrival() {
        let mut ledger = Ledger::new(InstanceId([0; 16]));
        let id = |n: usize| MigrationId([u8::try_from(n).unwrap(); 16]);
        ledger.record_arrived(id(200));
        for n in 0..=LEDGER_ABANDONED_MAX {
            ledger.record_abandoned(id(n));
        }
        assert_eq!(ledger.fate(id(200)), Fate::Committed);
        assert_eq!(ledger.fate(id(0)), Fate::Unknown);
        assert_eq!(ledger.fate(id(1)), Fate::Abandoned);
    }
}
