//! Memory whose pages are checked.
#![allow(unsafe_code)]
// UNSAFETY: a run of pages is an address that the CPU will read from; only its maker knows that it
// is mapped.

use martlet_device_io::{BusAddress, Dma, DmaError, HostMemory, Pinned};
use martlet_units::PAGE_SIZE;
use std::sync::Arc;

/// A run of pages in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    address: u64,
    pages: u32,
}

impl PageRun {
    /// A run of pages.
    ///
    /// # Safety
    /// `pages` pages at `address`, a multiple of 4096, are mapped and may be read through raw
    /// pointers until the job that the run is given to is over. Others may write them at any time.
    pub unsafe fn new(address: u64, pages: u32) -> PageRun {
        assert!(address.is_multiple_of(PAGE_SIZE), "pages begin at multiples of 4096");
        let bytes = u64::from(pages) * PAGE_SIZE;
        assert!(address.checked_add(bytes).is_some(), "pages end inside of the address space");
        PageRun { address, pages }
    }

    /// Where it begins.
    pub fn address(self) -> u64 {
        self.address
    }

    /// How many pages it has.
    pub fn pages(self) -> u32 {
        self.pages
    }
}

/// Memory that a device reaches: guest memory, pinned once for all engines. Pages outside of it are
/// the CPU's.
pub struct SharedMemory {
    /// By host address.
    mapped: Vec<Mapped>,
    _pins: Vec<Pinned>,
}

struct Mapped {
    host: u64,
    bytes: u64,
    bus: BusAddress,
}

impl SharedMemory {
    /// Pins the pieces, which don't overlap. With SVA that costs nothing, and they need not even
    /// stay in memory.
    pub fn pin(dma: &dyn Dma, pieces: &[HostMemory]) -> Result<Arc<SharedMemory>, DmaError> {
        let mut mapped = Vec::new();
        let mut pins = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let pinned = dma.pin(piece)?;
            let mut host = piece.address();
            for run in &pinned.runs {
                mapped.push(Mapped { host, bytes: run.bytes, bus: run.at });
                host += run.bytes;
            }
            pins.push(pinned);
        }
        mapped.sort_by_key(|mapped| mapped.host);
        Ok(Arc::new(SharedMemory { mapped, _pins: pins }))
    }

    /// Where the device finds this address, and how many bytes are in one piece from there.
    pub(crate) fn on_bus(&self, host: u64) -> Option<(BusAddress, u64)> {
        let after = self.mapped.partition_point(|mapped| mapped.host <= host);
        let mapped = self.mapped.get(after.checked_sub(1)?)?;
        let offset = host - mapped.host;
        let left = mapped.bytes.checked_sub(offset).filter(|left| *left > 0)?;
        Some((mapped.bus.checked_add(offset)?, left))
    }
}

impl std::fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedMemory({} pieces)", self.mapped.len())
    }
}
