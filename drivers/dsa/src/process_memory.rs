//! DMA by process addresses: shared virtual addressing.
#![allow(unsafe_code)]
// UNSAFETY: memory for a device is mapped, and handed out as raw memory.

use martlet_device_io::{BusAddress, BusRun, Dma, DmaBlock, DmaError, HostMemory, Pinned};
use rustix::mm::{MapFlags, ProtFlags};
use std::any::Any;
use std::ptr::NonNull;

/// Memory of a device that shares the process's address space (SVA, through the PASID that the
/// kernel binds when a work queue is opened): a bus address is the process's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessMemory;

/// Anonymous memory, of whole pages, there from the start.
struct Mapping {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is freed once, by its drop; who uses the memory says how.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps zeroed memory. Its pages are made now, and locked as far as this process may, so that the
    /// device does not fault on them: a record that can't be written is lost.
    fn new(bytes: usize) -> Result<Mapping, DmaError> {
        let length = u64::try_from(bytes).unwrap_or(u64::MAX);
        let error = |reason: String| DmaError { action: "allocate", bytes: length, reason };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping that replaces no other one harms nobody.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) };
        let memory = mapped.map_err(|errno| error(errno.to_string()))?;
        let memory: NonNull<u8> =
            NonNull::new(memory.cast()).ok_or_else(|| error("mapped at 0".to_owned()))?;
        // Beyond RLIMIT_MEMLOCK it is refused. A lost record then costs a deadline and a drain.
        // SAFETY: the range is the mapping made above.
        let _ = unsafe { rustix::mm::mlock(memory.as_ptr().cast(), bytes) };
        Ok(Mapping { memory, bytes })
    }

    fn pointer(&self) -> NonNull<u8> {
        self.memory
    }

    fn address(&self) -> u64 {
        u64::try_from(self.memory.as_ptr().expose_provenance()).expect("64-bit addresses")
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and not used any more by the promise of its users.
        let _ = unsafe { rustix::mm::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

/// Blocks and runs are aligned to no more than this.
const PAGE_BYTES: usize = 4096;

impl Dma for ProcessMemory {
    fn alloc(&self, bytes: usize, align: usize) -> Result<DmaBlock, DmaError> {
        if bytes == 0 || align > PAGE_BYTES {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            let reason = format!("empty, or aligned to {align}");
            return Err(DmaError { action: "allocate", bytes, reason });
        }
        let mapping = Mapping::new(bytes)?;
        let (pointer, at) = (mapping.pointer(), BusAddress(mapping.address()));
        let owner: Box<dyn Any + Send + Sync> = Box::new(mapping);
        // SAFETY: the mapping lives as long as its owner, is page aligned, and nobody else has it.
        Ok(unsafe { DmaBlock::from_raw(pointer, bytes, at, owner) })
    }

    /// Keeps the memory's owner. Pages may be swapped out: the device then faults, and the CPU does
    /// what it did not.
    fn pin(&self, memory: &HostMemory) -> Result<Pinned, DmaError> {
        let run = BusRun { at: BusAddress(memory.address()), bytes: memory.bytes() };
        Ok(Pinned { runs: vec![run], guard: Box::new(memory.clone()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_where_the_process_sees_it() {
        let block = ProcessMemory.alloc(100, 64).unwrap();
        assert!(block.at().0.is_multiple_of(4096));
        block.write(10, &[7]);
        let address = usize::try_from(block.at().0 + 10).unwrap();
        // SAFETY: inside of the block, which nobody else writes.
        let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() };
        assert_eq!(byte, 7);
        assert!(ProcessMemory.alloc(0, 64).is_err());
        assert!(ProcessMemory.alloc(64, 8192).is_err());
    }
}
