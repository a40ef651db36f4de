//! Where descriptors come in.

use crate::DsaModel;
use martlet_device_io::{DESCRIPTOR_BYTES, Portal, Submission};
use std::sync::Arc;

/// The portal of a work queue, as a process maps it. A shared queue's submission is ENQCMD, a
/// dedicated one's MOVDIR64B.
#[derive(Debug)]
pub struct QueuePortal {
    model: Arc<DsaModel>,
    queue: usize,
}

impl QueuePortal {
    pub(crate) fn new(model: Arc<DsaModel>, queue: usize) -> QueuePortal {
        QueuePortal { model, queue }
    }
}

impl Portal for QueuePortal {
    fn submit(&self, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Submission {
        // The model's lock orders what the caller wrote before against the device's reads.
        self.model.submit(self.queue, descriptor)
    }
}
