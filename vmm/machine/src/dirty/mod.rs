//! Dirty tracking: which pages the guest wrote.

mod devices;
mod log;
pub(crate) mod pagemap;
mod ring;

pub(crate) use devices::WithDevices;
pub(crate) use log::KvmLog;
pub(crate) use ring::{KvmRing, RING_ENTRIES, RingShare, Rings, open_rings};

use crate::kvm::KvmCore;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use martlet_ram::TrackError;
use std::sync::Arc;

/// Switches logging on for all memory of a VM; the drop switches it off.
struct Logging(Arc<KvmCore>);

impl Logging {
    fn start(core: &Arc<KvmCore>) -> Result<Logging, TrackError> {
        // Made first, so that slots that were switched on are switched off at an error.
        let logging = Logging(Arc::clone(core));
        logging.0.set_slot_flags(KVM_MEM_LOG_DIRTY_PAGES).map_err(|source| TrackError {
            operation: "KVM_SET_USER_MEMORY_REGION with dirty logging".into(),
            source,
        })?;
        Ok(logging)
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        if let Err(error) = self.0.set_slot_flags(0) {
            // The guest is correct with logging on, just slower.
            tracing::warn!(%error, "dirty logging could not be switched off");
        }
    }
}
