//! The VMM's own access to guest memory.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is a raw pointer, because the guest may write it at any moment; the
// copies in here are bounded by the region that the pointer came from.

use martlet_bitmap::WORD_BITS;
use martlet_ram::{GuestRam, RamBitmap, RegionIndex, mark_touched};
use martlet_units::{Gfn, Gpa, PAGE_SIZE};
#[cfg(test)]
use martlet_vdpa::HostMemory;
use martlet_vdpa::{Access, Iova, MapRun};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a page, as a length.
const PAGE_BYTES: usize = 4096;

/// Reads and writes guest memory, and remembers which pages it wrote: KVM's dirty tracking does
/// not see writes that come from outside of its vCPUs.
pub(crate) struct GuestMemory {
    ram: Arc<GuestRam>,
    written: RamBitmap,
    has_written: AtomicBool,
}

impl GuestMemory {
    pub(crate) fn new(ram: Arc<GuestRam>) -> GuestMemory {
        let written = RamBitmap::new(&ram);
        GuestMemory { ram, written, has_written: AtomicBool::new(false) }
    }

    pub(crate) fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Fills `bytes` from guest memory; `false`, and an unspecified part of it filled, if there is
    /// not memory everywhere, or the host lost it. What the guest writes meanwhile may be seen in
    /// part, but no aligned word of up to 8 bytes.
    pub(crate) fn read(&self, from: Gpa, bytes: &mut [u8]) -> bool {
        let mut gpa = from.0;
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some((host, length)) = self.piece(gpa, rest.len()) else { return false };
            let (now, later) = rest.split_at_mut(length);
            // SAFETY: `piece` promises `length` bytes of a live mapping.
            if unsafe { martlet_raw_memory::read(host, now) }.is_err() {
                return false;
            }
            (gpa, rest) = (gpa + length as u64, later);
        }
        true
    }

    /// Writes `bytes` to guest memory; `false`, and an unspecified part of them written, if there
    /// is not memory everywhere, or the host lost it.
    #[must_use]
    pub(crate) fn write(&self, to: Gpa, bytes: &[u8]) -> bool {
        let mut gpa = to.0;
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some((host, length)) = self.piece(gpa, rest.len()) else { return false };
            let (now, later) = rest.split_at(length);
            // SAFETY: as in `read`.
            let written = unsafe { martlet_raw_memory::write(host, now) };
            // Marked after it was written, all of it or not: a sync in between reports it the next
            // time.
            if let Some((region, page)) = self.ram.find(Gpa(gpa).to_gfn()) {
                self.written.region(region).set(page);
                self.has_written.store(true, Ordering::Release);
            }
            if written.is_err() {
                return false;
            }
            (gpa, rest) = (gpa + length as u64, later);
        }
        true
    }

    /// Makes all memory zero, as it is at the power-on; `false` if a page can't be written. Pages
    /// that nobody ever touched stay so. The others are written, not dropped: a device may have
    /// them pinned.
    #[must_use]
    pub(crate) fn clear(&self) -> bool {
        let touched = RamBitmap::new(&self.ram);
        let regions = self.ram.regions().iter().zip(touched.iter());
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
        let regions = (0..).map(RegionIndex).zip(self.ram.regions());
        regions
            .map(|(index, region)| MapRun {
                iova: Iova(region.range().start().0 * PAGE_SIZE),
                memory: self.ram.host_memory(index),
                access: Access::ReadWrite,
            })
            .collect()
    }

    /// Remembers that pages were written by somebody else: bit `b` of `word` is page `first + b`.
    pub(crate) fn mark_written(&self, first: u64, word: u64) {
        self.mark(&self.written, first, word);
        self.has_written.store(true, Ordering::Release);
    }

    /// Sets the bits of a word in the bitmaps of the regions that the pages are in.
    pub(crate) fn mark(&self, into: &RamBitmap, first: u64, word: u64) {
        let find = |page| self.ram.find(Gfn(page));
        let whole = (find(first), find(first.saturating_add(WORD_BITS - 1)));
        if let (Some((region, page)), Some((last, _))) = whole
            && region == last
            && page.is_multiple_of(WORD_BITS)
            && let Ok(place) = usize::try_from(page / WORD_BITS)
        {
            into.region(region).or_word(place, word);
            return;
        }
        for bit in (0..WORD_BITS).filter(|bit| word >> bit & 1 == 1) {
            if let Some((region, page)) = find(first.saturating_add(bit)) {
                into.region(region).set(page);
            }
        }
    }

    /// Adds the pages that were written since the last call, or since `forget_written`.
    pub(crate) fn take_written(&self, into: &RamBitmap) {
        if !self.has_written.swap(false, Ordering::AcqRel) {
            return;
        }
        for (region, bitmap) in self.written.iter() {
            let mut from = 0;
            while let Some(word) = bitmap.next_nonzero_word(from) {
                into.region(region).or_word(word, bitmap.take_word(word));
                from = word + 1;
            }
        }
    }

    /// Forgets what was written so far: a new guest's memory is sent as a whole.
    pub(crate) fn forget_written(&self) {
        self.take_written(&RamBitmap::new(&self.ram));
    }

    /// The longest piece of at most `length` bytes at `gpa` that is inside of one page.
    fn piece(&self, gpa: u64, length: usize) -> Option<(*mut u8, usize)> {
        let (region, page) = self.ram.find(Gpa(gpa).to_gfn())?;
        let offset = usize::try_from(gpa % PAGE_SIZE).ok()?;
        let to_page_end = usize::try_from(PAGE_SIZE).ok()? - offset;
        let host = self.ram.region(region)?.host_ptr(page).wrapping_add(offset);
        Some((host, length.min(to_page_end)))
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
    use martlet_ram::testing::Spoiled;
    use martlet_units::{Gfn, PageCount, PageRange};

    #[test]
    fn copies_across_pages_but_not_into_a_hole() {
        let range = |start, pages| PageRange::try_new(Gfn(start), PageCount(pages)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range(0, 2), range(2, 1), range(10, 1)]).unwrap());
        let memory = GuestMemory::new(ram);
        let bytes: Vec<u8> = (0..=255).cycle().take(9000).collect();
        assert!(memory.write(Gpa(100), &bytes));
        let mut read = vec![0; 9000];
        assert!(memory.read(Gpa(100), &mut read));
        assert_eq!(read, bytes);
        assert!(!memory.write(Gpa(3 * 4096 - 1), &[1, 2]));
        assert!(!memory.read(Gpa(5 * 4096), &mut [0]));

        let dirty = RamBitmap::new(memory.ram());
        memory.take_written(&dirty);
        assert_eq!(dirty.count(), 3);
        memory.take_written(&RamBitmap::new(memory.ram()));
        assert_eq!(dirty.count(), 3);

        assert!(memory.clear());
        assert!(memory.read(Gpa(100), &mut read));
        assert_eq!(read, vec![0; 9000]);
        // The page in the other region was never touched.
        let cleared = RamBitmap::new(memory.ram());
        memory.take_written(&cleared);
        assert_eq!(cleared.count(), 3);
    }

    #[test]
    fn what_was_written_before_a_hole_is_remembered() {
        let range = PageRange::try_new(Gfn(0), PageCount(2)).unwrap();
        let memory = GuestMemory::new(Arc::new(GuestRam::create(&[range]).unwrap()));
        assert!(!memory.write(Gpa(2 * 4096 - 1), &[1, 2]));
        let dirty = RamBitmap::new(memory.ram());
        memory.take_written(&dirty);
        assert_eq!(dirty.count(), 1, "a byte of it is in the guest's memory");
    }

    #[test]
    fn a_lost_page_is_no_memory() {
        let range = PageRange::try_new(Gfn(0), PageCount(3)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range]).unwrap());
        let memory = GuestMemory::new(Arc::clone(&ram));
        let spoiled = Spoiled::new(&ram, RegionIndex(0), 1);
        for (at, bytes) in [(4096, 2), (4095, 2), (8191, 1), (100, 9000)] {
            assert!(!memory.read(Gpa(at), &mut vec![0; bytes]), "{at}");
            assert!(!memory.write(Gpa(at), &vec![0; bytes]), "{at}");
        }
        assert!(memory.write(Gpa(0), &[1; 4096]) && memory.write(Gpa(8192), &[1; 4096]));
        drop(spoiled);
        assert!(memory.write(Gpa(4096), &[1; 4096]));
    }
}
