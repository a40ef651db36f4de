//! What devices wrote by themselves, as a part of a machine's dirty tracking.

use super::Nics;
use crate::memory::GuestMemory;
use martlet_ram::{DirtySource, RamBitmap, RegionIndex, TrackError};
use std::sync::Arc;

/// The logs of all network cards. Its drop ends them.
pub(crate) struct NicPages {
    nics: Arc<Nics>,
    memory: Arc<GuestMemory>,
}

impl NicPages {
    pub(crate) fn start(
        nics: &Arc<Nics>,
        memory: &Arc<GuestMemory>,
    ) -> Result<NicPages, TrackError> {
        // Made first, so that logs that were begun end at an error.
        let pages = NicPages { nics: Arc::clone(nics), memory: Arc::clone(memory) };
        nics.set_dirty_log(true)?;
        Ok(pages)
    }
}

impl DirtySource for NicPages {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        self.nics.take_dirty(self.memory.ram(), into);
        Ok(())
    }

    /// A page that a device writes after the sync is in the device's next log.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}

impl Drop for NicPages {
    fn drop(&mut self) {
        if let Err(error) = self.nics.set_dirty_log(false) {
            // The device is correct with its log on, just slower.
            tracing::warn!(%error, "a device's dirty log could not be switched off");
        }
    }
}
