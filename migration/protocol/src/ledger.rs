//! What a destination process remembers of attempts that are over.

use crate::limits::{LEDGER_ABANDONED_MAX, LEDGER_REFUSED_MAX};
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
    /// Abandoned after their commit had come: a source may be waiting for this very answer.
    refused: VecDeque<MigrationId>,
    /// Abandoned before. Anybody can make such entries, so they push out only each other.
    abandoned: VecDeque<MigrationId>,
}

impl Ledger {
    /// The empty ledger of a process that just started. `instance` must be random.
    pub fn new(instance: InstanceId) -> Ledger {
        let (refused, abandoned) = (VecDeque::new(), VecDeque::new());
        Ledger { instance, arrived: Vec::new(), refused, abandoned }
    }

    /// The process's name.
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// What became of an attempt.
    pub fn fate(&self, migration: MigrationId) -> Fate {
        if self.arrived.contains(&migration) {
            Fate::Committed
        } else if self.refused.contains(&migration) || self.abandoned.contains(&migration) {
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

    /// `saw_commit` if the right to run the guest had been sent here.
    pub(crate) fn record_abandoned(&mut self, migration: MigrationId, saw_commit: bool) {
        assert_eq!(self.fate(migration), Fate::Unknown, "an attempt ends once");
        let (list, most) = if saw_commit {
            (&mut self.refused, LEDGER_REFUSED_MAX)
        } else {
            (&mut self.abandoned, LEDGER_ABANDONED_MAX)
        };
        if list.len() == most {
            list.pop_front();
        }
        list.push_back(migration);
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
            ledger.record_abandoned(id(n), false);
        }
        assert_eq!(ledger.fate(id(200)), Fate::Committed);
        assert_eq!(ledger.fate(id(0)), Fate::Unknown);
        assert_eq!(ledger.fate(id(1)), Fate::Abandoned);
    }

    #[test]
    fn attempts_without_a_commit_push_out_no_refused_one() {
        let mut ledger = Ledger::new(InstanceId([0; 16]));
        let id = |n: usize| MigrationId([u8::try_from(n).unwrap(); 16]);
        ledger.record_abandoned(id(200), true);
        for n in 0..=2 * LEDGER_ABANDONED_MAX {
            ledger.record_abandoned(id(n), false);
        }
        assert_eq!(ledger.fate(id(200)), Fate::Abandoned);
    }
}
