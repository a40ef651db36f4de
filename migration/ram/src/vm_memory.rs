//! Guest memory of the crate `vm-memory`, which most VMMs in Rust have.
#![allow(unsafe_code)]
// UNSAFETY: memory that vm-memory mapped is taken over by its address.

use crate::{
    Backing, DirtySource, GuestRam, RamBitmap, RamError, RamRegion, RegionIndex, TrackError,
};
use martlet_units::{Gpa, PAGE_SIZE, PageCount, PageRange};
use std::sync::Arc;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MmapRegion};

impl GuestRam {
    /// Takes the memory of a VMM as it is; both go on to use it, and it stays mapped as long as
    /// either lives. What holds each region is seen from how it was mapped; nothing is known of
    /// mappings that vm-memory was given ready-made.
    ///
    /// # Errors
    /// If a region is not whole pages, or may not be read and written.
    pub fn from_vm_memory<B>(memory: &GuestMemoryMmap<B>) -> Result<GuestRam, RamError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        let regions = memory.iter().map(|region| {
            let start = Gpa(region.start_addr().0);
            adopt(start, region.get_mmap())
        });
        GuestRam::from_regions(regions.collect::<Result<_, _>>()?)
    }
}

fn adopt<B>(start: Gpa, mapping: Arc<MmapRegion<B>>) -> Result<RamRegion, RamError>
where
    B: Bitmap + Send + Sync + 'static,
{
    const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
    if mapping.prot() & READ_WRITE != READ_WRITE {
        return Err(RamError::Unusable { reason: "may not be read and written" });
    }
    let bytes = mapping.size() as u64;
    if !start.0.is_multiple_of(PAGE_SIZE) || !bytes.is_multiple_of(PAGE_SIZE) {
        return Err(RamError::Unusable { reason: "is not whole pages of the guest" });
    }
    let range = PageRange::try_new(start.to_gfn(), PageCount(bytes / PAGE_SIZE));
    let (host, backing) = (mapping.as_ptr(), backing(&mapping)?);
    // SAFETY: the owner keeps the mapping, and gives no references to its memory but atomic ones
    // (vm-memory's DESIGN.md). It is readable and writable, as checked; who gave it a ready-made
    // mapping has promised that that is true.
    unsafe { RamRegion::adopt(range.ok_or(RamError::Layout)?, host, backing, mapping) }
}

fn backing<B: Bitmap>(mapping: &MmapRegion<B>) -> Result<Backing, RamError> {
    let has = |flag| mapping.flags() & flag == flag;
    let file = mapping.file_offset();
    Ok(match file {
        _ if !mapping.owned() => Backing::Other,
        Some(part) if has(libc::MAP_SHARED) => {
            let unusable =
                |_| RamError::Unusable { reason: "is a file that can't be opened twice" };
            let file = part.file().try_clone().map_err(unusable)?;
            Backing::File { file, offset: part.start() }
        }
        None if has(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) => Backing::PrivateAnonymous,
        Some(_) | None => Backing::Other,
    })
}

/// The pages that were written through vm-memory, for a [`Tracker`](crate::Tracker).
#[derive(Debug)]
pub struct VmMemoryPages {
    regions: Vec<Arc<MmapRegion<AtomicBitmap>>>,
}

impl VmMemoryPages {
    /// From now on: what was written before is whatever the first round sends. The regions are
    /// those of [`GuestRam::from_vm_memory`]; nobody else may reset their bitmaps.
    pub fn new(memory: &GuestMemoryMmap<AtomicBitmap>) -> VmMemoryPages {
        let regions: Vec<_> = memory.iter().map(|region| region.get_mmap()).collect();
        regions.iter().for_each(|region| region.bitmap().reset());
        VmMemoryPages { regions }
    }
}

impl DirtySource for VmMemoryPages {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        for (index, region) in (0..).map(RegionIndex).zip(&self.regions) {
            let (bitmap, pages) = (region.bitmap(), into.region(index));
            let has_bit_for_each = bitmap.len() as u64 == pages.pages();
            for (word, bits) in bitmap.get_and_reset().into_iter().enumerate() {
                if bits != 0 && !has_bit_for_each {
                    // Made for pages of another size, which it does not tell.
                    pages.set_range(0..pages.pages());
                } else {
                    pages.or_word(word, bits);
                }
            }
        }
        Ok(())
    }

    /// A write after the sync is marked again by itself.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}
