//! A copy of pages that others go on writing, with a checksum of what was copied.
#![allow(unsafe_code)]
// UNSAFETY: the copy is shown as bytes once the device is done with it.

use crate::buffer::Buffer;
use crate::cpu::{self, PAGE_BYTES, crc32c};
use crate::gate::Gate;
use crate::operate::{Operator, Ran};
use crate::{PageRun, SharedMemory, WorkQueue};
use martlet_device_io::{Dma, DmaError};
use martlet_dsa_abi::{Descriptor, Status};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A copy, until the next one is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied<'a> {
    /// The content: what was read, each word whole.
    pub bytes: &'a [u8],
    /// Its CRC-32C (CRC-32/ISCSI), of exactly these bytes.
    pub crc: u32,
}

/// Copies pages of a running guest in one pass with their checksum, for a channel that sends both.
/// What a checksum of live memory could not be: right whatever the guest writes meanwhile.
pub struct StableCopy {
    operator: Operator,
    memory: Arc<SharedMemory>,
    /// What the device writes to.
    staging: Buffer,
    /// What the CPU writes to: never the device's, which may be late.
    own: Vec<u8>,
}

impl StableCopy {
    /// For copies of up to `pages_max` pages, by the queues and with the gate as for
    /// [`ZeroEngine`](crate::ZeroEngine::new).
    pub fn new(
        pages_max: u32,
        queues: Vec<Arc<WorkQueue>>,
        gate: Arc<dyn Gate>,
        memory: Arc<SharedMemory>,
        dma: &dyn Dma,
        deadline: Duration,
    ) -> Result<StableCopy, DmaError> {
        let bytes = pages_max as usize * PAGE_BYTES;
        Ok(StableCopy {
            operator: Operator::new(queues, gate, dma, deadline, 0)?,
            memory,
            staging: Buffer::new(dma, bytes)?,
            own: vec![0; bytes],
        })
    }

    /// Copies a run of pages.
    ///
    /// # Panics
    /// If it is longer than `pages_max`.
    pub fn copy(&mut self, run: PageRun) -> Copied<'_> {
        let bytes = run.pages() as usize * PAGE_BYTES;
        assert!(bytes <= self.own.len(), "at most as many pages as this was made for");
        match self.by_device(run) {
            Some(crc) => {
                // SAFETY: the device has written the record of its only operation, so it writes
                // nothing more, and the next one begins after this borrow.
                let staged = unsafe { self.staging.bytes() };
                Copied { bytes: &staged[..bytes], crc }
            }
            None => {
                let own = &mut self.own[..bytes];
                cpu::copy_from(run, own);
                Copied { bytes: own, crc: crc32c(0, own) }
            }
        }
    }

    /// The checksum, if the device has copied all of it.
    fn by_device(&mut self, run: PageRun) -> Option<u32> {
        let bytes = u64::from(run.pages()) * martlet_units::PAGE_SIZE;
        let (from, left) = self.memory.on_bus(run.address())?;
        if bytes == 0 || left < bytes || bytes > self.operator.transfer_bytes_max() {
            return None;
        }
        let (to, length) = (self.staging.at(0), u32::try_from(bytes).ok()?);
        let copy = |record| Descriptor::copy_crc(from.0, to, length, 0, record);
        match self.operator.run(run.pages(), copy) {
            Ran::Done(record) if record.status() == Status::SUCCESS => Some(record.crc()),
            Ran::Done(_) | Ran::Not | Ran::Late => None,
        }
    }
}

impl Drop for StableCopy {
    fn drop(&mut self) {
        if !self.operator.is_settled() {
            self.staging.leak();
        }
    }
}

impl fmt::Debug for StableCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StableCopy").field("bytes_max", &self.own.len()).finish_non_exhaustive()
    }
}
