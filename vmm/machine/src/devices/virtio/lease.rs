//! Who uses the devices: one machine at a time.

use martlet_vdpa::VdpaDevice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The devices of a machine, or of a factory, which gives them to one attempt after the other.
#[derive(Clone)]
pub(crate) struct Devices(Arc<Pool>);

struct Pool {
    devices: Vec<Arc<dyn VdpaDevice>>,
    is_lent: AtomicBool,
}

impl Devices {
    pub(crate) fn new(devices: Vec<Arc<dyn VdpaDevice>>) -> Devices {
        Devices(Arc::new(Pool { devices, is_lent: AtomicBool::new(false) }))
    }

    /// All devices until the lease is dropped; `None` while somebody else has them. Having none is
    /// no reason to wait.
    pub(crate) fn lend(&self) -> Option<Lease> {
        let free = self.0.devices.is_empty() || !self.0.is_lent.swap(true, Ordering::AcqRel);
        free.then(|| Lease(self.clone()))
    }
}

/// The right to use the devices. Its drop resets them, so that the next user finds them as new.
pub(crate) struct Lease(Devices);

impl Lease {
    pub(crate) fn devices(&self) -> &[Arc<dyn VdpaDevice>] {
        &self.0.0.devices
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for (number, device) in self.devices().iter().enumerate() {
            if let Err(error) = device.reset() {
                tracing::warn!(number, %error, "a vDPA device could not be reset");
            }
        }
        self.0.0.is_lent.store(false, Ordering::Release);
    }
}
