//! Guest memory as threads of the VMM write it, and which pages those were.

use crate::{AccessError, DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError};
use martlet_bitmap::WORD_BITS;
use martlet_units::{Gfn, Gpa};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes guest memory and remembers which pages it wrote: KVM's dirty tracking does not see writes
/// that come from outside of its vCPUs. For the threads of a VMM, all clones are the same; marking
/// never waits.
///
/// A device that writes in another way (by `readv`, by a library) marks the pages itself, after it
/// has written them. Before the guest's last pages are sent all of its writes must be marked: see
/// [`SourceVmm`](https://docs.rs/martlet-engine), suspend.
#[derive(Clone, Debug)]
pub struct DirtyMarker {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ram: Arc<GuestRam>,
    written: RamBitmap,
    has_written: AtomicBool,
}

impl DirtyMarker {
    /// Nothing is marked yet.
    pub fn new(ram: Arc<GuestRam>) -> DirtyMarker {
        let written = RamBitmap::new(&ram);
        DirtyMarker { shared: Arc::new(Shared { ram, written, has_written: false.into() }) }
    }

    /// The memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.shared.ram
    }

    /// Writes `bytes` to guest memory and marks their pages; after an error some are written, and
    /// marked. Aligned words of up to 8 bytes are written whole.
    pub fn write(&self, to: Gpa, bytes: &[u8]) -> Result<(), AccessError> {
        // Marked after it was written: a sync in between reports it the next time.
        self.shared.ram.write_pages(to, bytes, |region, page| {
            self.shared.written.region(region).set(page);
            self.tell();
        })
    }

    /// Marks the pages of `bytes` bytes that somebody else has written. What is not in guest memory
    /// is passed over.
    pub fn mark(&self, start: Gpa, bytes: u64) {
        let Some(last) = bytes.checked_sub(1).map(|more| Gpa(start.0.saturating_add(more))) else {
            return;
        };
        let frames = start.to_gfn().0..last.to_gfn().0 + 1;
        let regions = (0..).map(RegionIndex).zip(self.shared.ram.regions());
        for (index, region) in regions {
            let own = region.range();
            let first = frames.start.max(own.start().0);
            let end = frames.end.min(own.end().0);
            if first < end {
                let base = own.start().0;
                self.shared.written.region(index).set_range(first - base..end - base);
            }
        }
        self.tell();
    }

    /// Marks pages that somebody else has written: bit `b` of `word` is page `first + b`.
    pub fn mark_word(&self, first: Gfn, word: u64) {
        self.shared.ram.mark_word(&self.shared.written, first, word);
        self.tell();
    }

    /// The marks as a part of a [`Tracker`](crate::Tracker), from now on: what was written before
    /// is whatever the first round sends.
    pub fn source(&self) -> MarkedPages {
        let source = MarkedPages { shared: Arc::clone(&self.shared) };
        source.take(|_, _, _| {});
        source
    }

    fn tell(&self) {
        // Release: who sees it sees the mark.
        self.shared.has_written.store(true, Ordering::Release);
    }
}

/// The pages that were marked; see [`DirtyMarker::source`].
#[derive(Debug)]
pub struct MarkedPages {
    shared: Arc<Shared>,
}

impl MarkedPages {
    fn take(&self, mut each: impl FnMut(RegionIndex, usize, u64)) {
        if !self.shared.has_written.swap(false, Ordering::AcqRel) {
            return;
        }
        for (region, bitmap) in self.shared.written.iter() {
            let mut from = 0;
            while let Some(word) = bitmap.next_nonzero_word(from) {
                each(region, word, bitmap.take_word(word));
                from = word + 1;
            }
        }
    }
}

impl DirtySource for MarkedPages {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        self.take(|region, word, bits| into.region(region).or_word(word, bits));
        Ok(())
    }

    /// A write after the sync is marked again by itself.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}

impl GuestRam {
    /// Sets the bits of a word of frames in the bitmaps of their regions: bit `b` of `word` is
    /// frame `first + b`. What is not in guest memory is passed over.
    pub fn mark_word(&self, into: &RamBitmap, first: Gfn, word: u64) {
        let find = |frame: u64| self.find(Gfn(first.0.saturating_add(frame)));
        if let (Some((region, page)), Some((last, _))) = (find(0), find(WORD_BITS - 1))
            && region == last
            && page.is_multiple_of(WORD_BITS)
            && let Ok(place) = usize::try_from(page / WORD_BITS)
        {
            into.region(region).or_word(place, word);
            return;
        }
        for bit in (0..WORD_BITS).filter(|bit| word >> bit & 1 == 1) {
            if let Some((region, page)) = find(bit) {
                into.region(region).set(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LostPage;
    use crate::testing::Spoiled;
    use crate::tests::regions;
    use martlet_units::PAGE_SIZE;

    fn dirty(source: &mut MarkedPages, ram: &GuestRam) -> Vec<(u16, u64)> {
        let into = RamBitmap::new(ram);
        source.sync(&into).unwrap();
        let pages = into.iter().flat_map(|(region, bitmap)| {
            bitmap.runs().flatten().map(move |page| (region.0, page)).collect::<Vec<_>>()
        });
        pages.collect()
    }

    #[test]
    fn copies_across_pages_but_not_into_a_hole() {
        let ram = Arc::new(regions(&[3, 1]));
        let marker = DirtyMarker::new(Arc::clone(&ram));
        marker.write(Gpa(0), &[9]).unwrap();
        let mut source = marker.source();
        assert!(dirty(&mut source, &ram).is_empty(), "written before the tracking");
        let bytes: Vec<u8> = (0..=255).cycle().take(9000).collect();
        marker.write(Gpa(100), &bytes).unwrap();
        let mut read = vec![0; 9000];
        ram.read(Gpa(100), &mut read).unwrap();
        assert_eq!(read, bytes);
        assert_eq!(dirty(&mut source, &ram), [(0, 0), (0, 1), (0, 2)]);
        assert!(dirty(&mut source, &ram).is_empty());
        let hole = Gpa(3 * PAGE_SIZE);
        let refused = marker.write(Gpa(hole.0 - 1), &[1, 2]);
        assert_eq!(refused, Err(AccessError::NoMemory(hole)));
        assert_eq!(dirty(&mut source, &ram), [(0, 2)], "a byte of it is in the guest's memory");
        assert_eq!(ram.read(hole, &mut [0]), Err(AccessError::NoMemory(hole)));
        assert!(ram.read(Gpa(u64::MAX), &mut [0; 2]).is_err());
    }

    #[test]
    fn a_lost_page_is_no_memory() {
        let ram = Arc::new(regions(&[3]));
        let marker = DirtyMarker::new(Arc::clone(&ram));
        let spoiled = Spoiled::new(&ram, RegionIndex(0), 1);
        let lost = AccessError::Lost(LostPage { region: 0, page: 1, gfn: Gfn(1) });
        for (at, bytes) in [(4096, 2), (4095, 2), (8191, 1), (100, 9000)] {
            assert_eq!(ram.read(Gpa(at), &mut vec![0; bytes]), Err(lost), "{at}");
            assert_eq!(marker.write(Gpa(at), &vec![0; bytes]), Err(lost), "{at}");
        }
        assert_eq!(marker.write(Gpa(8192), &[1; 4096]), Ok(()));
        drop(spoiled);
        assert_eq!(marker.write(Gpa(4096), &[1; 4096]), Ok(()));
    }

    #[test]
    fn others_mark_what_they_wrote() {
        let ram = Arc::new(regions(&[70, 200]));
        let marker = DirtyMarker::new(Arc::clone(&ram));
        let mut source = marker.source();
        marker.mark(Gpa(PAGE_SIZE - 1), 2);
        // The second region begins behind a hole, at frame 77.
        marker.mark(Gpa(69 * PAGE_SIZE), 9 * PAGE_SIZE);
        marker.mark(Gpa(75 * PAGE_SIZE), 0);
        marker.mark(Gpa(u64::MAX - 5), 100);
        assert_eq!(dirty(&mut source, &ram), [(0, 0), (0, 1), (0, 69), (1, 0)]);
        marker.mark_word(Gfn(77 + 64), 0b101);
        marker.mark_word(Gfn(60), u64::MAX);
        let mut expected: Vec<_> = (60..70).map(|page| (0, page)).collect();
        expected.extend((0..47).map(|page| (1, page)).chain([(1, 64), (1, 66)]));
        assert_eq!(dirty(&mut source, &ram), expected);
    }
}
