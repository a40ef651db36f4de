//! The VMM's own access to guest memory.
#![cfg_attr(test, allow(unsafe_code))]
// UNSAFETY: devices of tests are given raw memory.

use martlet_ram::{
    DirtyMarker, GuestRam, MarkedPages, RamBitmap, RamRegion, RegionIndex, mark_touched,
};
use martlet_units::{Gfn, Gpa, PAGE_SIZE};
#[cfg(test)]
use martlet_vdpa::HostMemory;
use martlet_vdpa::{Access, Iova, MapRun};
use std::sync::Arc;

/// Bytes of a page, as a length.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Reads and writes guest memory, and remembers which pages it wrote. An access is whole or not:
/// where there is no memory, or the host lost it, a device of a guest has nothing to say to that.
pub(crate) struct GuestMemory {
    marker: DirtyMarker,
    /// How many regions the guest is told of. A last one may hold what it boots from.
    guest_regions: usize,
}

impl GuestMemory {
    /// All of it is the guest's.
    pub(crate) fn new(ram: Arc<GuestRam>) -> GuestMemory {
        let guest_regions = ram.regions().len();
        GuestMemory { marker: DirtyMarker::new(ram), guest_regions }
    }

    /// The last region, of at least two, is for what the guest boots from.
    pub(crate) fn with_image(ram: Arc<GuestRam>) -> GuestMemory {
        assert!(ram.regions().len() > 1, "a guest has memory of its own");
        let mut memory = GuestMemory::new(ram);
        memory.guest_regions -= 1;
        memory
    }

    /// All regions, as they are moved.
    pub(crate) fn ram(&self) -> &Arc<GuestRam> {
        self.marker.ram()
    }

    /// Those that the guest is told of.
    pub(crate) fn guest(&self) -> &[RamRegion] {
        &self.ram().regions()[..self.guest_regions]
    }

    /// The one that holds what the guest boots from.
    pub(crate) fn image(&self) -> Option<&RamRegion> {
        self.ram().regions().get(self.guest_regions)
    }

    /// Fills `bytes` from guest memory; `false`, and an unspecified part of it filled, if it can't
    /// be read everywhere.
    pub(crate) fn read(&self, from: Gpa, bytes: &mut [u8]) -> bool {
        self.ram().read(from, bytes).is_ok()
    }

    /// Writes `bytes` to guest memory; `false`, and an unspecified part of them written, if it
    /// can't be written everywhere.
    #[must_use]
    pub(crate) fn write(&self, to: Gpa, bytes: &[u8]) -> bool {
        self.marker.write(to, bytes).is_ok()
    }

    /// What it writes from now on.
    pub(crate) fn written(&self) -> MarkedPages {
        self.marker.source()
    }

    /// Remembers that pages were written by somebody else: bit `b` of `word` is page `first + b`.
    pub(crate) fn mark_written(&self, first: u64, word: u64) {
        self.marker.mark_word(Gfn(first), word);
    }

    /// Makes all of the guest's memory zero, as it is at the power-on; `false` if a page can't be
    /// written. Pages that nobody ever touched stay so. The others are written, not dropped: a
    /// device may have them pinned.
    #[must_use]
    pub(crate) fn clear(&self) -> bool {
        let touched = RamBitmap::new(self.ram());
        let regions = self.guest().iter().zip(touched.iter());
        regions.into_iter().all(|(region, (_, bitmap))| {
            let first = region.range().start().0;
            mark_touched(region, bitmap).is_ok()
                && (0..region.pages())
                    .filter(|page| bitmap.get(*page))
                    .all(|page| self.write(Gpa((first + page) * PAGE_SIZE), &[0; PAGE_BYTES]))
        })
    }

    /// The map of a device that reaches all guest memory by the guest's own addresses.
    pub(crate) fn device_map(&self) -> Vec<MapRun> {
        let regions = (0..).map(RegionIndex).zip(self.ram().regions());
        regions
            .map(|(index, region)| MapRun {
                iova: Iova(region.range().start().0 * PAGE_SIZE),
                memory: self.ram().host_memory(index),
                access: Access::ReadWrite,
            })
            .collect()
    }
}

/// Fills `into` from memory that a device was given: for devices of tests.
#[cfg(test)]
pub(crate) fn copy_from(memory: &HostMemory, into: &mut [u8]) {
    assert_eq!(memory.bytes(), into.len() as u64);
    let from = std::ptr::with_exposed_provenance::<u8>(usize::try_from(memory.address()).unwrap());
    // SAFETY: the memory has this length and lives.
    unsafe { martlet_raw_memory::read(from, into) }.unwrap();
}

/// Writes `from` to memory that a device was given.
#[cfg(test)]
pub(crate) fn copy_to(memory: &HostMemory, from: &[u8]) {
    assert_eq!(memory.bytes(), from.len() as u64);
    let to =
        std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(memory.address()).unwrap());
    // SAFETY: as in `copy_from`.
    unsafe { martlet_raw_memory::write(to, from) }.unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_ram::DirtySource;
    use martlet_units::PageCount;
    use martlet_units::PageRange;

    #[test]
    fn a_power_on_clears_what_was_touched_and_no_more() {
        let range = |start, pages| PageRange::try_new(Gfn(start), PageCount(pages)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range(0, 3), range(10, 1)]).unwrap());
        let memory = GuestMemory::new(ram);
        assert!(memory.write(Gpa(100), &[7; 9000]));
        assert!(!memory.write(Gpa(3 * 4096 - 1), &[1, 2]));
        assert!(!memory.read(Gpa(5 * 4096), &mut [0]));
        let mut written = memory.written();
        assert!(memory.clear());
        let mut read = [1; 9000];
        assert!(memory.read(Gpa(100), &mut read));
        assert_eq!(read, [0; 9000]);
        let cleared = RamBitmap::new(memory.ram());
        written.sync(&cleared).unwrap();
        assert_eq!(cleared.count(), 3, "the page in the other region was never touched");
    }
}
