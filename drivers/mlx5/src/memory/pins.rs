//! Memory that stays pinned for as long as a key may reach it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How much is pinned, over all keys of a device.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pinned: AtomicU64,
}

impl Ledger {
    /// Bytes pinned now.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }
}

/// What keeps the memory of one key pinned.
///
/// The rule: memory is unpinned by [`Pins::unpin`], when its key has surely never been made or is
/// surely destroyed, and in no other way. A value that is merely dropped leaves its memory pinned
/// and its owner alive for ever: memory that is lost until the process ends is
/// better than a device that writes into what someone else has by then.
pub(crate) struct Pins {
    guards: Vec<Box<dyn Any + Send + Sync>>,
    bytes: u64,
    ledger: Arc<Ledger>,
}

impl Pins {
    /// Takes over the guards of `bytes` bytes.
    pub(crate) fn new(
        guards: Vec<Box<dyn Any + Send + Sync>>,
        bytes: u64,
        ledger: &Arc<Ledger>,
    ) -> Pins {
        ledger.pinned.fetch_add(bytes, Ordering::Relaxed);
        Pins { guards, bytes, ledger: Arc::clone(ledger) }
    }

    /// Unpins.
    pub(crate) fn unpin(mut self) {
        self.ledger.pinned.fetch_sub(self.bytes, Ordering::Relaxed);
        self.guards.clear();
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if !self.guards.is_empty() {
            tracing::warn!(bytes = self.bytes, "memory stays pinned for the life of the process");
            std::mem::forget(std::mem::take(&mut self.guards));
        }
    }
}

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pins({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unpin_unpins() {
        let owner = Arc::new(());
        let ledger = Arc::new(Ledger::default());
        let pins = || Pins::new(vec![Box::new(Arc::clone(&owner))], 4096, &ledger);
        let (one, two) = (pins(), pins());
        assert_eq!(ledger.pinned_bytes(), 8192);
        one.unpin();
        assert_eq!(ledger.pinned_bytes(), 4096);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(two);
        assert_eq!(ledger.pinned_bytes(), 4096);
        assert_eq!(Arc::strong_count(&owner), 2);
    }
}
