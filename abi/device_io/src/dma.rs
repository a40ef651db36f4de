//! The driver's side of DMA: memory of its own for the device, and pinned memory of others.
#![allow(unsafe_code)]
// UNSAFETY: DMA memory is a raw pointer, because the device may write it at any moment. All copies
// are bounded by the block they belong to.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// An address as the device uses it: an IOVA of the IOMMU, or with shared virtual addressing the
/// process's own address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BusAddress(pub u64);

impl BusAddress {
    /// The address `bytes` further on; `None` past the end of the address space.
    pub fn checked_add(self, bytes: u64) -> Option<BusAddress> {
        self.0.checked_add(bytes).map(BusAddress)
    }
}

/// A contiguous piece of memory on the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusRun {
    /// Its begin.
    pub at: BusAddress,
    /// Its length, above 0.
    pub bytes: u64,
}

/// A piece of this process's memory that a device may be given, and what keeps it there. Guest
/// memory, usually: the guest and the VMM go on using it.
#[derive(Clone)]
pub struct HostMemory {
    address: u64,
    bytes: u64,
    owner: Arc<dyn Any + Send + Sync>,
}

impl HostMemory {
    /// Names memory.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are mapped and may be read and written, by raw pointers only,
    /// until `owner` is dropped.
    pub unsafe fn new(address: u64, bytes: u64, owner: Arc<dyn Any + Send + Sync>) -> HostMemory {
        assert!(address.checked_add(bytes).is_some(), "memory ends inside of the address space");
        HostMemory { address, bytes, owner }
    }

    /// Its begin in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A little-endian number in it, at a multiple of 2; `None` if it is not inside, or the host has
    /// lost it.
    pub fn load16(&self, offset: u64) -> Option<u16> {
        let mut bytes = [0; 2];
        let inside = offset.checked_add(2).is_some_and(|end| end <= self.bytes);
        if !inside || !offset.is_multiple_of(2) {
            return None;
        }
        let at = usize::try_from(self.address + offset).ok()?;
        let from = std::ptr::with_exposed_provenance(at);
        // SAFETY: inside of memory that is mapped as long as the owner lives, which `self` keeps, and
        // that everybody reaches by raw pointers only.
        unsafe { martlet_raw_memory::read(from, &mut bytes) }.ok()?;
        Some(u16::from_le_bytes(bytes))
    }

    /// A part of it; `None` if it is not inside.
    pub fn slice(&self, offset: u64, bytes: u64) -> Option<HostMemory> {
        let end = offset.checked_add(bytes)?;
        let owner = Arc::clone(&self.owner);
        (end <= self.bytes).then(|| HostMemory { address: self.address + offset, bytes, owner })
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes at {:#x})", self.bytes, self.address)
    }
}

impl PartialEq for HostMemory {
    /// Whether it is the same piece of memory. Two owners keep the same address only one after the
    /// other, so they are compared as well.
    fn eq(&self, other: &HostMemory) -> bool {
        (self.address, self.bytes) == (other.address, other.bytes)
            && Arc::ptr_eq(&self.owner, &other.owner)
    }
}

impl Eq for HostMemory {}

/// Why memory could not be made available to a device. The host's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {action} {bytes} bytes for a device: {reason}")]
pub struct DmaError {
    /// `allocate` or `pin`.
    pub action: &'static str,
    /// How many.
    pub bytes: u64,
    /// What is in the way.
    pub reason: String,
}

/// Memory pinned for a device. Its drop unpins: only after the device can't reach it any more.
pub struct Pinned {
    /// Where the device finds it, in the order of the host's addresses; together as long as the
    /// range that was pinned.
    pub runs: Vec<BusRun>,
    /// What keeps it pinned.
    pub guard: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("runs", &self.runs).finish_non_exhaustive()
    }
}

/// Makes memory available to one device.
pub trait Dma: Send + Sync {
    /// Zeroed memory of `bytes` bytes, contiguous on the bus, at a multiple of `align` there (a
    /// power of two).
    fn alloc(&self, bytes: usize, align: usize) -> Result<DmaBlock, DmaError>;

    /// Pins memory of this process, which stays where it is; the guard keeps its owner. Whole
    /// pages.
    fn pin(&self, memory: &HostMemory) -> Result<Pinned, DmaError>;
}

/// A host that loses memory of the process itself can't be helped.
const OWN_MEMORY: &str = "a block is memory of this process, which the host has";

/// Memory of a driver that its device may read and write at any time.
pub struct DmaBlock {
    memory: NonNull<u8>,
    bytes: usize,
    at: BusAddress,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the block is memory that outlives it by `_owner`, which is Send and Sync itself. Racing
// accesses go through atomics or copies whose bytes nothing is assumed of.
unsafe impl Send for DmaBlock {}
// SAFETY: as above.
unsafe impl Sync for DmaBlock {}

impl DmaBlock {
    /// Wraps memory for a device; for implementations of [`Dma`].
    ///
    /// # Safety
    /// `memory` is valid for reads and writes of `bytes` bytes, at a multiple of 8, and nobody but
    /// the device uses it, until `owner` is dropped.
    pub unsafe fn from_raw(
        memory: NonNull<u8>,
        bytes: usize,
        at: BusAddress,
        owner: Box<dyn Any + Send + Sync>,
    ) -> DmaBlock {
        assert!(memory.as_ptr().addr().is_multiple_of(8), "DMA memory is aligned to words");
        DmaBlock { memory, bytes, at, _owner: owner }
    }

    /// Where the device finds it.
    pub fn at(&self) -> BusAddress {
        self.at
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn pointer(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "a driver stays inside of its block");
        self.memory.as_ptr().wrapping_add(offset)
    }

    fn aligned(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.is_multiple_of(bytes), "words of DMA memory are aligned");
        self.pointer(offset, bytes)
    }

    /// Copies `from` into the block; aligned words of up to 8 bytes are written whole.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.pointer(offset, from.len());
        // SAFETY: `pointer` has checked the bounds.
        unsafe { martlet_raw_memory::write(to, from) }.expect(OWN_MEMORY);
    }

    /// Copies out of the block. What the device writes meanwhile may be seen in part, but no
    /// aligned word of up to 8 bytes.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.pointer(offset, into.len());
        // SAFETY: as in `write`.
        unsafe { martlet_raw_memory::read(from, into) }.expect(OWN_MEMORY);
    }

    /// Sets `bytes` bytes to zero.
    pub fn clear(&self, offset: usize, bytes: usize) {
        let to = self.pointer(offset, bytes);
        // SAFETY: as in `write`.
        unsafe { martlet_raw_memory::clear(to, bytes) }.expect(OWN_MEMORY);
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: in bounds, alive as long as the block; every other access to a byte that is
        // shared by atomics goes through atomics too.
        unsafe { AtomicU8::from_ptr(self.pointer(offset, 1)) }
    }

    /// Reads one byte and acquires what the device wrote before it: an owner bit, a status.
    pub fn load8(&self, offset: usize) -> u8 {
        self.byte(offset).load(Ordering::Acquire)
    }

    /// Writes one byte after everything written before.
    pub fn store8(&self, offset: usize, value: u8) {
        self.byte(offset).store(value, Ordering::Release);
    }

    /// Takes an aligned word and leaves zero: bits that the device sets with `or8` are in the
    /// result or in the next one.
    pub fn take64(&self, offset: usize) -> u64 {
        // SAFETY: in bounds and aligned; see `byte`.
        unsafe { AtomicU64::from_ptr(self.aligned(offset, 8).cast()) }.swap(0, Ordering::AcqRel)
    }
}

impl fmt::Debug for DmaBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaBlock({} bytes at {:#x})", self.bytes, self.at.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block() -> DmaBlock {
        let mut words = vec![0_u64; 8];
        let memory = NonNull::new(words.as_mut_ptr().cast()).unwrap();
        // SAFETY: the vector's buffer stays where it is while the owner lives.
        unsafe { DmaBlock::from_raw(memory, 64, BusAddress(0x1000), Box::new(words)) }
    }

    #[test]
    fn bytes_go_in_and_out() {
        let block = block();
        block.write(3, &[1, 2, 3]);
        let mut read = [0; 4];
        block.read(2, &mut read);
        assert_eq!(read, [0, 1, 2, 3]);
        assert_eq!(block.load8(4), 2);
        block.store8(8, 0x80);
        assert_eq!(block.take64(8), 0x80);
        assert_eq!(block.load8(8), 0);
    }

    #[test]
    #[should_panic(expected = "inside of its block")]
    fn a_driver_that_leaves_its_block_is_stopped() {
        block().write(60, &[0; 5]);
    }
}
