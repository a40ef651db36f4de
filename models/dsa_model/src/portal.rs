//! Where descriptors come in.

use crate::DsaModel;
use martlet_device_io::{DESCRIPTOR_BYTES, Portal, Submission};
use martlet_dsa_abi::Descriptor;
use rustix::io::Errno;
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

/// The device file of a work queue, `/dev/dsa/wqN.M`, to write descriptors to: what is left to a
/// process without CAP_SYS_RAWIO on devices that are not safe for user submission (CVE-2024-21823).
#[derive(Debug)]
pub struct QueueFile {
    model: Arc<DsaModel>,
    queue: usize,
}

/// How often the kernel tries ENQCMDS before it gives up (`enqcmds_retries`, its default).
const ENQCMDS_RETRIES: u32 = 64;

impl QueueFile {
    pub(crate) fn new(model: Arc<DsaModel>, queue: usize) -> QueueFile {
        QueueFile { model, queue }
    }

    /// As `write`: submits whole descriptors one after the other until one is refused, and says how
    /// many bytes were taken, or why not even the first was.
    ///
    /// `EINVAL` for a length that is no multiple of 64, for batches on version 1 devices and for
    /// completion records that are not aligned; `EAGAIN` if the queue stays full; `ENODEV` if the
    /// device is gone.
    pub fn write(&self, descriptors: &[u8]) -> Result<usize, Errno> {
        let (whole, rest) = descriptors.as_chunks::<DESCRIPTOR_BYTES>();
        if whole.is_empty() || !rest.is_empty() {
            return Err(Errno::INVAL);
        }
        for (index, descriptor) in whole.iter().enumerate() {
            match (self.submit(descriptor), index) {
                (Ok(()), _) => {}
                (Err(error), 0) => return Err(error),
                (Err(_), taken) => return Ok(taken * DESCRIPTOR_BYTES),
            }
        }
        Ok(descriptors.len())
    }

    fn submit(&self, bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<(), Errno> {
        if self.model.file_refuses(&Descriptor::from_bytes(bytes)) {
            return Err(Errno::INVAL);
        }
        for _ in 0..ENQCMDS_RETRIES {
            match self.model.submit(self.queue, bytes) {
                Submission::Accepted => return Ok(()),
                Submission::Retry => {}
                Submission::Gone => return Err(Errno::NODEV),
            }
        }
        Err(Errno::AGAIN)
    }
}
