//! An IOMMU in software.
#![allow(unsafe_code)]
// UNSAFETY: the table maps bus addresses to raw memory. An entry is removed, under the write lock,
// before its memory goes; every access holds the read lock.

use martlet_device_io::{
    BusAddress, BusFault, BusMemory, BusRun, Dma, DmaBlock, DmaError, HostMemory, Pinned,
};
use martlet_raw_memory::MemoryFault;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

/// Where a bus with addresses of its own begins: nothing lies at 0, so a forgotten address faults.
const FIRST_ADDRESS: u64 = 1 << 32;

/// Between two pieces of memory nothing lies, so that an access past an end faults.
const GAP: u64 = 4096;

/// How memory gets its bus addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// The process's own addresses: shared virtual addressing.
    Process,
    /// Addresses of the IOMMU; a piece of memory stays in one piece.
    Iommu,
    /// As without an IOMMU: pinned memory is scattered in runs of at most this many bytes, whole
    /// pages, none next to its neighbour.
    Scattered {
        /// Longest run.
        run_bytes: u64,
    },
}

/// Gives memory bus addresses, and lets devices reach what has one.
pub struct SoftBus {
    addressing: Addressing,
    table: RwLock<Table>,
    this: Weak<SoftBus>,
}

struct Table {
    entries: BTreeMap<u64, Entry>,
    next: u64,
}

struct Entry {
    bytes: u64,
    host: u64,
    /// Keeps pinned memory where it is; a block of the bus's own is kept by its `DmaBlock`.
    _owner: Option<HostMemory>,
}

impl SoftBus {
    /// A bus without memory.
    pub fn new(addressing: Addressing) -> Arc<SoftBus> {
        if let Addressing::Scattered { run_bytes } = addressing {
            assert!(run_bytes > 0 && run_bytes.is_multiple_of(4096), "runs are whole pages");
        }
        let table = RwLock::new(Table { entries: BTreeMap::new(), next: FIRST_ADDRESS });
        Arc::new_cyclic(|this| SoftBus { addressing, table, this: Weak::clone(this) })
    }

    /// How many pieces of memory have an address: what is pinned or allocated and not freed.
    pub fn entries(&self) -> usize {
        self.read_table().entries.len()
    }

    fn read_table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_table(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn strong(&self) -> Arc<SoftBus> {
        self.this.upgrade().expect("a bus that is called is alive")
    }

    /// Calls `body` with a pointer to `bytes` bytes at `at`, if one piece of memory has them all.
    /// Memory that the host lost is none.
    fn reach<T>(
        &self,
        at: BusAddress,
        bytes: usize,
        body: impl FnOnce(*mut u8) -> Result<T, MemoryFault>,
    ) -> Result<T, BusFault> {
        let fault = BusFault { at, bytes };
        let table = self.read_table();
        let (start, entry) = table.entries.range(..=at.0).next_back().ok_or(fault)?;
        let offset = at.0 - start;
        let end = offset.checked_add(u64::try_from(bytes).map_err(|_| fault)?).ok_or(fault)?;
        if end > entry.bytes {
            return Err(fault);
        }
        let host = usize::try_from(entry.host + offset).map_err(|_| fault)?;
        // The lock is held until the access is over.
        body(std::ptr::with_exposed_provenance_mut(host)).map_err(|MemoryFault| fault)
    }
}

/// A byte that a driver and its device hand over to each other: of a driver's own block, which the
/// host does not lose.
///
/// # Safety
/// What `reach` gives, within its body.
unsafe fn byte<'a>(at: *mut u8) -> &'a AtomicU8 {
    // SAFETY: the caller's promise; a byte is always aligned.
    unsafe { AtomicU8::from_ptr(at) }
}

impl Table {
    fn insert(
        &mut self,
        addressing: Addressing,
        entry: Entry,
        align: u64,
    ) -> Result<BusAddress, &'static str> {
        let at = match addressing {
            Addressing::Process => entry.host,
            Addressing::Iommu | Addressing::Scattered { .. } => {
                let at = self.next.next_multiple_of(align.max(4096));
                self.next = at.checked_add(entry.bytes + GAP).ok_or("no address left")?;
                at
            }
        };
        let before = self.entries.range(..at.saturating_add(entry.bytes)).next_back();
        if before.is_some_and(|(start, other)| start + other.bytes > at) {
            return Err("part of it has an address already");
        }
        self.entries.insert(at, entry);
        Ok(BusAddress(at))
    }
}

/// Entries that go with their owner.
struct Guard {
    bus: Arc<SoftBus>,
    starts: Vec<u64>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut table = self.bus.write_table();
        for start in &self.starts {
            table.entries.remove(start);
        }
    }
}

/// Memory of a block. Its guard goes first.
struct Allocation {
    guard: Option<Guard>,
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is only freed through this, once.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: allocated with this layout; the table's entry is gone, so nobody uses it.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

impl Dma for SoftBus {
    fn alloc(&self, bytes: usize, align: usize) -> Result<DmaBlock, DmaError> {
        let length = u64::try_from(bytes).unwrap_or(u64::MAX);
        let error = |reason: &str| DmaError {
            action: "allocate",
            bytes: length,
            reason: reason.to_owned(),
        };
        let layout = Layout::from_size_align(bytes, align.max(8))
            .map_err(|_| error("no such size and alignment"))?;
        if bytes == 0 {
            return Err(error("it is empty"));
        }
        // SAFETY: the layout is not empty.
        let Some(memory) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        let mut owner = Allocation { guard: None, memory, layout };
        let host = u64::try_from(memory.as_ptr().expose_provenance()).unwrap_or(0);
        let entry = Entry { bytes: length, host, _owner: None };
        let align = u64::try_from(layout.align()).unwrap_or(1);
        let at = self.write_table().insert(self.addressing, entry, align).map_err(error)?;
        owner.guard = Some(Guard { bus: self.strong(), starts: vec![at.0] });
        // SAFETY: the allocation lives as long as its owner, and only the bus knows it.
        Ok(unsafe { DmaBlock::from_raw(memory, bytes, at, Box::new(owner)) })
    }

    fn pin(&self, memory: &HostMemory) -> Result<Pinned, DmaError> {
        let error = |reason: &str| DmaError {
            action: "pin",
            bytes: memory.bytes(),
            reason: reason.to_owned(),
        };
        let whole = memory.address().is_multiple_of(4096) && memory.bytes().is_multiple_of(4096);
        if !whole || memory.bytes() == 0 {
            return Err(error("it is not whole pages"));
        }
        let run_bytes = match self.addressing {
            Addressing::Process | Addressing::Iommu => memory.bytes(),
            Addressing::Scattered { run_bytes } => run_bytes,
        };
        let mut guard = Guard { bus: self.strong(), starts: Vec::new() };
        let mut runs = Vec::new();
        let mut offset = 0;
        while offset < memory.bytes() {
            let bytes = run_bytes.min(memory.bytes() - offset);
            let piece = memory.slice(offset, bytes).expect("inside of the memory");
            let entry = Entry { bytes, host: piece.address(), _owner: Some(piece) };
            let align = run_bytes.min(1 << 30).next_power_of_two();
            let inserted = self.write_table().insert(self.addressing, entry, align);
            let at = inserted.map_err(error)?;
            guard.starts.push(at.0);
            runs.push(BusRun { at, bytes });
            offset += bytes;
        }
        Ok(Pinned { runs, guard: Box::new(guard) })
    }
}

impl BusMemory for SoftBus {
    fn read(&self, at: BusAddress, into: &mut [u8]) -> Result<(), BusFault> {
        // SAFETY: `reach` gives a pointer to as many bytes, alive during the call; `into` is the
        // caller's own.
        self.reach(at, into.len(), |from| unsafe { martlet_raw_memory::read(from, into) })
    }

    fn write(&self, at: BusAddress, from: &[u8]) -> Result<(), BusFault> {
        // SAFETY: as in `read`.
        self.reach(at, from.len(), |to| unsafe { martlet_raw_memory::write(to, from) })
    }

    fn load8(&self, at: BusAddress) -> Result<u8, BusFault> {
        // Pairs with the driver's `DmaBlock::store8`.
        // SAFETY: within `reach`.
        self.reach(at, 1, |from| Ok(unsafe { byte(from) }.load(Ordering::Acquire)))
    }

    fn store8(&self, at: BusAddress, value: u8) -> Result<(), BusFault> {
        // Pairs with the driver's `DmaBlock::load8`.
        self.reach(at, 1, |to| {
            // SAFETY: within `reach`.
            unsafe { byte(to) }.store(value, Ordering::Release);
            Ok(())
        })
    }

    fn or8(&self, at: BusAddress, bits: u8) -> Result<(), BusFault> {
        // Pairs with the driver's `DmaBlock::take64`.
        self.reach(at, 1, |to| {
            // SAFETY: within `reach`.
            unsafe { byte(to) }.fetch_or(bits, Ordering::AcqRel);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host_memory(bytes: usize) -> HostMemory {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: not empty.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        let address = u64::try_from(memory.as_ptr().expose_provenance()).unwrap();
        let owner = Arc::new(Allocation { guard: None, memory, layout });
        // SAFETY: alive as long as the owner.
        unsafe { HostMemory::new(address, u64::try_from(bytes).unwrap(), owner) }
    }

    #[test]
    fn a_block_is_reached_by_its_address_only() {
        for addressing in [Addressing::Process, Addressing::Iommu] {
            let bus = SoftBus::new(addressing);
            let block = bus.alloc(4096, 4096).unwrap();
            assert!(block.at().0.is_multiple_of(4096));
            block.write(8, &[1, 2, 3, 4]);
            let mut read = [0; 4];
            bus.read(BusAddress(block.at().0 + 8), &mut read).unwrap();
            assert_eq!(read, [1, 2, 3, 4]);
            let last = BusAddress(block.at().0 + 4094);
            assert_eq!(bus.write(last, &[0; 3]), Err(BusFault { at: last, bytes: 3 }));
            let at = block.at();
            drop(block);
            assert_eq!(bus.entries(), 0);
            assert!(bus.load8(at).is_err());
        }
    }

    #[test]
    fn scattered_memory_is_in_runs_and_stays_until_it_is_unpinned() {
        let bus = SoftBus::new(Addressing::Scattered { run_bytes: 8192 });
        let memory = host_memory(5 * 4096);
        let pinned = bus.pin(&memory).unwrap();
        drop(memory);
        assert_eq!(pinned.runs.iter().map(|run| run.bytes).collect::<Vec<_>>(), [8192, 8192, 4096]);
        for run in &pinned.runs {
            bus.or8(run.at, 0x10).unwrap();
            assert_eq!(bus.load8(run.at), Ok(0x10));
            assert!(bus.load8(BusAddress(run.at.0 + run.bytes)).is_err());
        }
        drop(pinned);
        assert_eq!(bus.entries(), 0);
    }

    proptest! {
        #[test]
        fn bytes_cross_the_bus_unchanged(offset in 0_usize..64, bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let bus = SoftBus::new(Addressing::Iommu);
            let block = bus.alloc(512, 8).unwrap();
            let at = BusAddress(block.at().0 + u64::try_from(offset).unwrap());
            bus.write(at, &bytes).unwrap();
            let mut read = vec![0; bytes.len()];
            block.read(offset, &mut read);
            prop_assert_eq!(&read, &bytes);
            let mut back = vec![0; bytes.len()];
            bus.read(at, &mut back).unwrap();
            prop_assert_eq!(back, bytes);
        }
    }
}
