//! Guest memory as linux-loader wants it.
#![allow(unsafe_code)]
// UNSAFETY: vm-memory is handed mappings that it does not own.

use crate::MachineError;
use crate::memory::GuestMemory;
use martlet_units::PAGE_SIZE;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Calls `with` with a view of the memory that must not, and can't, outlive it.
pub(super) fn view<T>(
    memory: &GuestMemory,
    with: impl FnOnce(&GuestMemoryMmap<()>) -> Result<T, MachineError>,
) -> Result<T, MachineError> {
    let impossible =
        |what: String| MachineError::Config { reason: format!("load a kernel: {what}") };
    let regions = memory
        .guest()
        .iter()
        .map(|region| {
            let bytes =
                usize::try_from(region.len_bytes()).map_err(|e| impossible(e.to_string()))?;
            // SAFETY: the region's mapping has this length and lives as long as `memory`, whose
            // borrow outlives the view. A view made of raw pointers does not unmap.
            let mapping =
                unsafe { MmapRegionBuilder::new(bytes).with_raw_mmap_pointer(region.host_ptr(0)) }
                    .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                    .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                    .build()
                    .map_err(|error| impossible(error.to_string()))?;
            let start = GuestAddress(region.range().start().0 * PAGE_SIZE);
            GuestRegionMmap::new(mapping, start)
                .ok_or_else(|| impossible("memory ends above the address space".into()))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let view =
        GuestMemoryMmap::from_regions(regions).map_err(|error| impossible(error.to_string()))?;
    with(&view)
}
