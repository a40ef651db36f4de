//! Memory to test with.
#![allow(unsafe_code)]
// UNSAFETY: the memory is written by a device while it is looked at, so it is never a Rust
// reference; all access is by raw pointers, checked against the mapping.

use crate::error::VerbsError;
use martlet_device_io::HostMemory;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::sync::Arc;

/// A mapping of its own, to register and to look at.
pub struct Arena {
    mapping: Arc<Mapping>,
}

struct Mapping {
    address: usize,
    bytes: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `Arena::new` and nothing refers to it: regions hold the owner.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.address), self.bytes) };
    }
}

impl Arena {
    /// A new one: zeroed, whole pages.
    pub fn new(bytes: usize) -> Result<Arena, VerbsError> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing else.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }
            .map_err(|errno| VerbsError::host("map memory")(errno.into()))?;
        Ok(Arena { mapping: Arc::new(Mapping { address: at.expose_provenance(), bytes }) })
    }

    /// Where it is.
    pub fn address(&self) -> u64 {
        self.mapping.address as u64
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// All of it, or a part, to be registered.
    pub fn memory(&self, offset: usize, bytes: usize) -> HostMemory {
        let at = self.pointer(offset, bytes).expose_provenance() as u64;
        let owner = Arc::clone(&self.mapping);
        // SAFETY: `pointer` has checked the bounds; the owner keeps it mapped.
        unsafe { HostMemory::new(at, bytes as u64, owner) }
    }

    /// Writes one value to all these bytes.
    ///
    /// # Panics
    /// As everything here, if they leave the arena.
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) {
        let at = self.pointer(offset, bytes);
        for index in 0..bytes {
            // SAFETY: in bounds; volatile, because a device may look at it.
            unsafe { at.wrapping_add(index).write_volatile(value) };
        }
    }

    /// Reads these bytes.
    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let at = self.pointer(offset, bytes);
        // SAFETY: in bounds; volatile, because a device may write it.
        (0..bytes).map(|index| unsafe { at.wrapping_add(index).read_volatile() }).collect()
    }

    /// Whether all these bytes have this value.
    pub fn is_all(&self, offset: usize, bytes: usize, value: u8) -> bool {
        let at = self.pointer(offset, bytes);
        // SAFETY: as in `read`.
        (0..bytes).all(|index| unsafe { at.wrapping_add(index).read_volatile() } == value)
    }

    fn pointer(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes()), "inside of the arena");
        std::ptr::with_exposed_provenance_mut(self.mapping.address + offset)
    }
}
