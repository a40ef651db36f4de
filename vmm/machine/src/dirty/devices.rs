//! Dirty tracking of a machine with devices: what vCPUs wrote, and what devices wrote by
//! themselves.

use crate::devices::virtio::Nics;
use crate::memory::GuestMemory;
use martlet_ram::{DirtySource, RamBitmap, RegionIndex, TrackError};
use std::sync::Arc;

/// Adds the devices' pages to another source. Its drop ends their logging.
pub(crate) struct WithDevices {
    inner: Box<dyn DirtySource>,
    nics: Arc<Nics>,
    memory: Arc<GuestMemory>,
}

impl WithDevices {
    /// The devices' writes are logged before `start` begins to track those of the vCPUs.
    pub(crate) fn start(
        nics: &Arc<Nics>,
        memory: &Arc<GuestMemory>,
        start: impl FnOnce() -> Result<Box<dyn DirtySource>, TrackError>,
    ) -> Result<WithDevices, TrackError> {
        let logging = Logging(nics);
        nics.set_dirty_log(true)?;
        let inner = start()?;
        std::mem::forget(logging);
        Ok(WithDevices { inner, nics: Arc::clone(nics), memory: Arc::clone(memory) })
    }
}

/// Ends the logging that was begun, if what follows fails.
struct Logging<'a>(&'a Nics);

impl Drop for Logging<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.set_dirty_log(false) {
            // The device is correct with its log on, just slower.
            tracing::warn!(%error, "a device's dirty log could not be switched off");
        }
    }
}

impl DirtySource for WithDevices {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        self.nics.take_dirty(&self.memory, into);
        self.inner.sync(into)?;
        // Not every source looks at what came from outside of its vCPUs.
        self.memory.take_written(into);
        Ok(())
    }

    /// A page that a device writes after the sync is in the device's next log.
    fn rearm(
        &mut self,
        region: RegionIndex,
        first_page: u64,
        words: &[u64],
    ) -> Result<(), TrackError> {
        self.inner.rearm(region, first_page, words)
    }
}

impl Drop for WithDevices {
    fn drop(&mut self) {
        drop(Logging(&self.nics));
    }
}
