//! Which receive queue a frame goes to: receive queue tables (PRM, "RQT Context").

use super::Nic;
use super::queue::Queue;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

/// The receive queue tables of a device. Which of them frames go through is chosen by flow rules
/// and TIRs in hardware, which this model does not have: it is the table that was made first of
/// those that exist. Without a table, a frame of pair `k` goes to the receive queue of pair `k`.
#[derive(Debug, Default)]
pub(crate) struct Steering {
    tables: BTreeMap<u32, Vec<u32>>,
}

impl Nic {
    /// Makes or replaces a table: ids of virtqueue objects.
    pub(crate) fn set_table(&self, number: u32, list: Vec<u32>) {
        let mut steering = self.steering.write().unwrap_or_else(PoisonError::into_inner);
        steering.tables.insert(number, list);
        drop(steering);
        self.room_came();
    }

    /// Drops a table.
    pub(crate) fn remove_table(&self, number: u32) {
        let mut steering = self.steering.write().unwrap_or_else(PoisonError::into_inner);
        steering.tables.remove(&number);
        drop(steering);
        self.room_came();
    }

    /// The receive queue for frames of a pair of queues: one flow, with the pair's number. So tables
    /// that list all pairs in order keep pairs together.
    pub(super) fn receiver(&self, pair: u16) -> Option<Arc<Queue>> {
        let steering = self.steering.read().unwrap_or_else(PoisonError::into_inner);
        let table = steering.tables.values().next().filter(|list| !list.is_empty());
        let Some(list) = table else { return self.queue(pair.checked_mul(2)?) };
        let object = *list.get(usize::from(pair) % list.len())?;
        let queues = self.queues();
        queues.iter().step_by(2).flatten().find(|queue| queue.object == object).cloned()
    }
}
