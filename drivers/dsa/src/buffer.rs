//! Pages of a driver's own that a device reads or writes, and that the driver sees as bytes.
#![allow(unsafe_code)]
// UNSAFETY: the bytes are shown as a slice, while no device writes them.

use crate::process_memory::Mapping;
use martlet_device_io::{BusAddress, Dma, DmaError, HostMemory, Pinned};
use std::sync::Arc;

/// Pages that a device reaches at one address.
///
/// Whoever gives their address to a device takes no slice of them before the device is done; if it
/// never says that it is, they are leaked.
pub(crate) struct Buffer {
    mapping: Arc<Mapping>,
    at: BusAddress,
    pinned: Option<Pinned>,
}

impl Buffer {
    /// Zeroed pages. An error if the bus scatters them.
    pub(crate) fn new(dma: &dyn Dma, bytes: usize) -> Result<Buffer, DmaError> {
        let mapping = Arc::new(Mapping::new(bytes.next_multiple_of(4096).max(4096))?);
        let length = u64::try_from(mapping.bytes()).expect("a length of memory");
        let owner = Arc::clone(&mapping);
        // SAFETY: the mapping is there as long as its owner, and is used by raw pointers, but for
        // the slices of this type.
        let memory = unsafe { HostMemory::new(mapping.address(), length, owner) };
        let pinned = dma.pin(&memory)?;
        let [run] = pinned.runs[..] else {
            let reason = "the bus has no address for all of it".to_owned();
            return Err(DmaError { action: "pin", bytes: length, reason });
        };
        Ok(Buffer { mapping, at: run.at, pinned: Some(pinned) })
    }

    /// Where the device finds byte `offset`.
    pub(crate) fn at(&self, offset: usize) -> u64 {
        assert!(offset <= self.mapping.bytes(), "inside of the buffer");
        self.at.0 + u64::try_from(offset).expect("a length of memory")
    }

    /// Its bytes.
    ///
    /// # Safety
    /// No device writes them while the slice is used.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, initialised, and by the caller's promise not written.
        unsafe { std::slice::from_raw_parts(self.mapping.pointer().as_ptr(), self.mapping.bytes()) }
    }

    /// Its bytes, to be written.
    ///
    /// # Safety
    /// No device reads or writes them while the slice is used.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        let (pointer, bytes) = (self.mapping.pointer().as_ptr(), self.mapping.bytes());
        // SAFETY: mapped, initialised, borrowed exclusively, and by the caller's promise left alone.
        unsafe { std::slice::from_raw_parts_mut(pointer, bytes) }
    }

    /// Never gives the pages back: a device may still write to them.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(self.pinned.take());
        std::mem::forget(Arc::clone(&self.mapping));
    }
}
