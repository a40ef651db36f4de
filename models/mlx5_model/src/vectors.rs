//! Interrupt vectors that go to a guest.

use crate::stats;
use martlet_device_io::{Notify, Vectors};
use std::sync::atomic::AtomicU64;
use std::sync::{PoisonError, RwLock};

/// The vectors of a device.
pub(crate) struct VectorTable(RwLock<Vec<Option<Notify>>>);

impl VectorTable {
    pub(crate) fn new(count: u16) -> VectorTable {
        VectorTable(RwLock::new((0..count).map(|_| None).collect()))
    }

    /// Fires one, if somebody is connected; counts it.
    pub(crate) fn fire(&self, vector: u16, fired: &AtomicU64) {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let notify = table.get(usize::from(vector)).and_then(Option::clone);
        drop(table);
        if let Some(notify) = notify {
            stats::add(fired, 1);
            notify();
        }
    }
}

impl Vectors for VectorTable {
    fn count(&self) -> u16 {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        u16::try_from(table.len()).unwrap_or(u16::MAX)
    }

    fn connect(&self, vector: u16, notify: Option<Notify>) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = table.get_mut(usize::from(vector)) {
            *slot = notify;
        }
    }
}
