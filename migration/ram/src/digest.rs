//! A digest of a guest's memory.
#![allow(unsafe_code)]
// UNSAFETY: memory that is no file is read through raw pointers.

use crate::{GuestRam, RamRegion, RegionFile, RegionIndex, mark_touched};
use core::ops::Range;
use martlet_bitmap::PageBitmap;
use martlet_units::PAGE_SIZE;
use rustix::io::Errno;
use std::io;

const PAGE: usize = crate::PAGE_BYTES;
/// Read and hashed at once: long enough for blake3 to use its widest vectors, short enough for a
/// core's own cache.
const BUFFER_BYTES: usize = 512 << 10;

impl GuestRam {
    /// A digest that two guests share exactly if their layout and every byte of their memory are
    /// equal. Whether a zero page is a hole, was touched or was swapped out makes no difference.
    ///
    /// Reads the memory through its files where it can, so nothing is allocated or mapped by it, and
    /// passes over what nobody touched. Takes about the time that it takes to read the touched memory twice. The
    /// guest must be stopped, and its devices too: a page that is written meanwhile makes the
    /// digest worthless, though not unsafe.
    ///
    /// # Errors
    /// A [`LostPage`](crate::LostPage) if the host can't read a page, else what the host refused.
    pub fn digest(&self) -> io::Result<[u8; 32]> {
        self.digest_while(|| true)
    }

    /// As [`GuestRam::digest`], as long as somebody wants it, which is asked about every half
    /// megabyte.
    ///
    /// # Errors
    /// Besides: `Interrupted` if nobody does any more.
    pub fn digest_while(&self, is_wanted: impl Fn() -> bool) -> io::Result<[u8; 32]> {
        let mut digest = Digest {
            pages: blake3::Hasher::new(),
            content: blake3::Hasher::new(),
            buffer: vec![0; BUFFER_BYTES],
        };
        for (index, region) in (0..).map(RegionIndex).zip(self.regions()) {
            digest.add_region(self, index, region, &is_wanted)?;
        }
        Ok(digest.finish())
    }
}

/// Two hashes side by side: which pages are not all zero, and what these hold. Each is fed long
/// stretches; page numbers between the pages would cut them up.
struct Digest {
    pages: blake3::Hasher,
    content: blake3::Hasher,
    buffer: Vec<u8>,
}

impl Digest {
    fn add_region(
        &mut self,
        ram: &GuestRam,
        index: RegionIndex,
        region: &RamRegion,
        is_wanted: &impl Fn() -> bool,
    ) -> io::Result<()> {
        let range = region.range();
        for number in [u64::from(index.0), range.start().0, range.pages().0] {
            self.pages.update(&number.to_le_bytes());
        }
        let touched = PageBitmap::new(region.pages());
        mark_touched(region, &touched)?;
        let step = (BUFFER_BYTES / PAGE) as u64;
        for run in touched.runs() {
            let mut next = run.start;
            while next < run.end {
                if !is_wanted() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let end = run.end.min(next + step);
                self.add_pages(region, next..end)
                    .map_err(|page| io::Error::from(ram.lost(index, page.min(end - 1))))?;
                next = end;
            }
        }
        // Ends the list: no page has this number.
        self.pages.update(&u64::MAX.to_le_bytes());
        Ok(())
    }

    /// Hashes those of `pages`, at most a buffer full, that are not all zero. The error is a page
    /// that can't be read.
    #[expect(clippy::cast_possible_truncation, reason = "no longer than the buffer")]
    fn add_pages(&mut self, region: &RamRegion, pages: Range<u64>) -> Result<(), u64> {
        let bytes = ((pages.end - pages.start) * PAGE_SIZE) as usize;
        let buffer = &mut self.buffer[..bytes];
        read_pages(region, pages.start, buffer)?;
        let mut kept = 0;
        for (number, at) in pages.zip((0..bytes).step_by(PAGE)) {
            let page = at..at + PAGE;
            if buffer[page.clone()] == ZERO_PAGE {
                continue;
            }
            self.pages.update(&number.to_le_bytes());
            if kept != at {
                buffer.copy_within(page, kept);
            }
            kept += PAGE;
        }
        self.content.update(&buffer[..kept]);
        Ok(())
    }

    fn finish(&self) -> [u8; 32] {
        let mut whole = blake3::Hasher::new_derive_key("martlet guest memory digest 1");
        whole.update(self.pages.finalize().as_bytes());
        whole.update(self.content.finalize().as_bytes());
        *whole.finalize().as_bytes()
    }
}

static ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// Fills the buffer, whole pages, from page `page` on. The error is a page that can't be read.
fn read_pages(region: &RamRegion, mut page: u64, buffer: &mut [u8]) -> Result<(), u64> {
    if let Some(file) = region.file() {
        return read_file(file, page * PAGE_SIZE, buffer).map_err(|byte| region.page_of_file(byte));
    }
    for bytes in buffer.chunks_mut(PAGE) {
        // SAFETY: a page of the region, as `host_ptr` checks, mapped while the region lives.
        unsafe { martlet_raw_memory::read(region.host_ptr(page), bytes) }.map_err(|_| page)?;
        page += 1;
    }
    Ok(())
}

/// Fills the buffer. The error is the byte of the file that can't be read: reading a file in memory
/// has no other.
fn read_file(file: RegionFile<'_>, offset: u64, mut buffer: &mut [u8]) -> Result<(), u64> {
    let mut byte = file.offset + offset;
    while !buffer.is_empty() {
        match rustix::io::pread(file.fd, &mut *buffer, byte) {
            Ok(count @ 1..) => {
                byte += count as u64;
                buffer = &mut buffer[count..];
            }
            Err(Errno::INTR) => {}
            Ok(0) | Err(_) => return Err(byte),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{page_is_zero, regions, write_page};
    use martlet_units::{Gfn, PageCount, PageRange};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const LENGTHS: [u64; 2] = [400, 70];

    fn with_pages(pages: &BTreeMap<(u16, u64), u8>) -> GuestRam {
        let ram = regions(&LENGTHS);
        pages.iter().for_each(|((region, page), byte)| write_page(&ram, *region, *page, *byte));
        ram
    }

    fn pages() -> impl Strategy<Value = BTreeMap<(u16, u64), u8>> {
        let page = (0..2u16).prop_flat_map(|r| (Just(r), 0..LENGTHS[usize::from(r)]));
        prop::collection::btree_map(page, 0..3u8, 0..20)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn equal_exactly_if_the_memory_is(a in pages(), b in pages(), peeked in 0..400u64) {
            let (ram_a, ram_b, ram_a_again) = (with_pages(&a), with_pages(&b), with_pages(&a));
            // Reading touches a page and leaves it zero; the digest must not care.
            let _ = page_is_zero(&ram_a_again, 0, peeked);
            let content = |pages: &BTreeMap<(u16, u64), u8>| -> BTreeMap<(u16, u64), u8> {
                pages.iter().filter(|(_, byte)| **byte != 0).map(|(k, v)| (*k, *v)).collect()
            };
            let digest = ram_a.digest().unwrap();
            prop_assert_eq!(digest, ram_a_again.digest().unwrap());
            prop_assert_eq!(digest == ram_b.digest().unwrap(), content(&a) == content(&b));
        }
    }

    #[test]
    fn a_single_bit_and_the_place_of_a_page_matter() {
        let empty = regions(&[2000]).digest().unwrap();
        let mut seen = vec![empty];
        for (page, byte) in [(0, 1), (0, 2), (1, 1), (127, 1), (128, 1), (1999, 1)] {
            let ram = regions(&[2000]);
            rustix::io::pwrite(
                ram.regions()[0].file().unwrap().fd,
                &[byte],
                page * PAGE_SIZE + 4095,
            )
            .unwrap();
            let digest = ram.digest().unwrap();
            assert!(!seen.contains(&digest), "page {page} byte {byte}");
            seen.push(digest);
        }
        let elsewhere = PageRange::try_new(Gfn(1 << 20), PageCount(2000)).unwrap();
        let other_layout = GuestRam::create(&[elsewhere]).unwrap().digest().unwrap();
        assert!(!seen.contains(&other_layout));
    }

    #[test]
    fn content_behind_a_touched_zero_page_counts() {
        let with_last = |byte| {
            let ram = regions(&[8]);
            [(0, 0), (1, 1), (2, 0), (3, byte)]
                .iter()
                .for_each(|(p, b)| write_page(&ram, 0, *p, *b));
            ram.digest().unwrap()
        };
        assert_ne!(with_last(1), with_last(2));
    }

    #[test]
    fn a_digest_that_nobody_wants_any_more_ends() {
        let ram = regions(&[400]);
        (0..400).for_each(|page| write_page(&ram, 0, page, 1));
        let asked = std::cell::Cell::new(0);
        let wanted = |times| {
            asked.set(0);
            ram.digest_while(|| asked.replace(asked.get() + 1) < times)
        };
        assert_eq!(wanted(2).unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(asked.get(), 3);
        assert_eq!(wanted(100).unwrap(), ram.digest().unwrap());
    }

    #[test]
    fn holes_are_neither_read_nor_allocated() {
        let ram = regions(&[1 << 24]);
        write_page(&ram, 0, 1 << 23, 1);
        ram.digest().unwrap();
        let region = &ram.regions()[0];
        assert_eq!(mark_touched(region, &PageBitmap::new(region.pages())).unwrap(), 1);
    }
}
