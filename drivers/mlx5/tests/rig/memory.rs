//! Guest memory that a device may be given.
#![allow(unsafe_code)]
// UNSAFETY: `HostMemory` names memory by address. The bytes are atomics, so that guest and device
// may both write them.

use martlet_device_io::HostMemory;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const PAGE: usize = 4096;

/// Memory of a guest, zeroed, at a page's begin.
#[derive(Clone)]
pub(crate) struct GuestMemory {
    bytes: Arc<Vec<AtomicU8>>,
    begin: usize,
    length: usize,
}

impl GuestMemory {
    pub(crate) fn new(length: usize) -> GuestMemory {
        let bytes: Vec<AtomicU8> = (0..length + PAGE).map(|_| AtomicU8::new(0)).collect();
        let begin = bytes.as_ptr().align_offset(PAGE);
        GuestMemory { bytes: Arc::new(bytes), begin, length }
    }

    pub(crate) fn host(&self) -> HostMemory {
        let at = self.bytes[self.begin..].as_ptr().expose_provenance() as u64;
        // SAFETY: the vector is not changed while the owner lives, and its bytes are atomics.
        unsafe { HostMemory::new(at, self.length as u64, Arc::clone(&self.bytes) as _) }
    }

    pub(crate) fn write(&self, at: u64, from: &[u8]) {
        let at = self.begin + usize::try_from(at).unwrap();
        for (to, byte) in self.bytes[at..][..from.len()].iter().zip(from) {
            to.store(*byte, Ordering::Release);
        }
    }

    pub(crate) fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let at = self.begin + usize::try_from(at).unwrap();
        std::array::from_fn(|n| self.bytes[at + n].load(Ordering::Acquire))
    }

    pub(crate) fn read_vec(&self, at: u64, bytes: usize) -> Vec<u8> {
        let at = self.begin + usize::try_from(at).unwrap();
        self.bytes[at..][..bytes].iter().map(|byte| byte.load(Ordering::Acquire)).collect()
    }
}
