//! Which pages were ever touched, found in bulk.
//!
//! A 64 GiB guest that uses 64 MiB must not cost the reading of 64 GiB, and reading a page of
//! shared memory that nobody touched even allocates it (`shmem_fault`, mm/shmem.c).

use crate::RamRegion;
use crate::backing::Held;
use crate::page_tables::mark_mapped;
use core::ops::Range;
use martlet_bitmap::PageBitmap;
use martlet_units::{PAGE_SIZE, PageCount};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;

/// Most walks over a region's file that find too little; see [`mark_file`].
const WALKS_MAX: u32 = 4;

/// Sets the bit of each page of `region` that may hold data, and returns how many these are. The
/// others were never written: they are zero, and take no memory. What the answer is taken from
/// depends on what holds the memory, see [`Backing`](crate::Backing); where nothing can tell, every
/// page may hold data.
///
/// The guest may run and touch more pages meanwhile, if dirty tracking was started before: a page
/// that is touched too late to be seen is then in the next dirty sync.
///
/// # Panics
/// If `into` is not as long as the region.
pub fn mark_touched(region: &RamRegion, into: &PageBitmap) -> io::Result<u64> {
    assert_eq!(into.pages(), region.pages(), "a bitmap of another region");
    match region.held() {
        Held::Pages { file, offset, .. } => mark_file(file, *offset, into),
        Held::HugePages { file } => mark_huge(region, file, into),
        // A process that the kernel hides its page tables from may not ask.
        Held::Anonymous => Ok(mark_mapped(region, into).unwrap_or_else(|_| mark_all(into))),
        Held::Other => Ok(mark_all(into)),
    }
}

fn mark_all(into: &PageBitmap) -> u64 {
    into.set_range(0..into.pages());
    into.pages()
}

/// Files of huge pages know no holes, and reading a page that nobody touched takes one that the
/// host may not have. Page tables know those that were touched here: all that the file has, if
/// their numbers are equal (`st_blocks`, hugetlb_add_to_page_cache in mm/hugetlb.c). They keep
/// them, because the kernel neither swaps huge pages out nor drops their page tables.
fn mark_huge(region: &RamRegion, file: &File, into: &PageBitmap) -> io::Result<u64> {
    match mark_mapped(region, into) {
        Ok(found) if found == pages_of_file(file)?.0 => Ok(found),
        Ok(_) | Err(_) => Ok(mark_all(into)),
    }
}

/// Asks a file in memory for the pages from its byte `offset` on. Pages behind the end of a file
/// that was cut short may have held data: who sends them finds that they are lost.
///
/// The answer is the file's, by `SEEK_DATA` and `SEEK_HOLE`, not the page tables'. In shared
/// memory a page can hold data without any page table entry: once swapped out, its entry may be
/// empty, and khugepaged drops whole page tables (`retract_page_tables`, mm/khugepaged.c).
/// `PAGEMAP_SCAN` and `mincore` of the mapping would call such pages untouched, and the guest would
/// lose them; the file counts swapped-out pages as data (`mapping_seek_hole_data`, mm/filemap.c).
/// It also costs a call per run of data rather than a look at each page.
///
/// One thing can hide a page from a walk: while the kernel moves a page in memory, its new place
/// is in the file for some microseconds before it counts as data (`folio_migrate_flags`,
/// mm/migrate.c). So the walk is compared with the number of pages that the file says it has
/// (`st_blocks`, swapped-out ones included) and repeated if it found fewer, a few times: a running
/// guest that touches pages all the time makes the numbers differ without harm. Kernels before 6.4
/// hide 2 MiB for the length of a khugepaged collapse (fixed by "mm/khugepaged: maintain page
/// cache uptodate flag"); there, if the host gives huge pages to shared memory unasked and the
/// numbers differ to the end, every page counts as touched.
fn mark_file(file: &File, offset: u64, into: &PageBitmap) -> io::Result<u64> {
    let part = Part { first: offset / PAGE_SIZE, into };
    let end = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0) / PAGE_SIZE;
    let cut = part.mark(end..u64::MAX);
    let mut found = Found::default();
    for _ in 0..WALKS_MAX {
        found = walk(file, &part)?;
        if found.in_file >= pages_of_file(file)?.0 {
            return Ok(found.in_part + cut);
        }
    }
    Ok(if collapse_hides_data() { mark_all(into) } else { found.in_part + cut })
}

/// A region's part of its file.
struct Part<'a> {
    /// Page of the file that the region begins with.
    first: u64,
    into: &'a PageBitmap,
}

impl Part<'_> {
    /// Marks those of these pages of the file that are in the region; how many these are.
    fn mark(&self, pages: Range<u64>) -> u64 {
        let place = |page: u64| page.saturating_sub(self.first).min(self.into.pages());
        let own = place(pages.start)..place(pages.end);
        self.into.set_range(own.clone());
        own.end - own.start
    }
}

#[derive(Default)]
struct Found {
    in_part: u64,
    in_file: u64,
}

/// One pass over the whole file, from data to hole to data: its other parts, which may be other
/// regions, are counted too.
fn walk(file: &File, part: &Part<'_>) -> io::Result<Found> {
    let mut found = Found::default();
    let mut page = 0;
    loop {
        let start = match rustix::fs::seek(file, SeekFrom::Data(page * PAGE_SIZE)) {
            Ok(byte) => (byte / PAGE_SIZE).max(page),
            // No data from here on (lseek(2)).
            Err(Errno::NXIO) => return Ok(found),
            Err(error) => return Err(error.into()),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start * PAGE_SIZE)) {
            // The end of the file is a hole. A hole that came right after the first call, because
            // somebody punched it, is passed over.
            Ok(byte) => byte.div_ceil(PAGE_SIZE).max(start + 1),
            Err(error) => return Err(error.into()),
        };
        found.in_part += part.mark(start..end);
        found.in_file += end - start;
        page = end;
    }
}

/// Pages that the file holds, in memory or swapped out (`shmem_recalc_inode`, mm/shmem.c).
fn pages_of_file(file: &File) -> io::Result<PageCount> {
    /// `st_blocks` counts these whatever the block size (stat(3type)).
    const BLOCK_BYTES: u64 = 512;
    let blocks = u64::try_from(rustix::fs::fstat(file)?.st_blocks).unwrap_or(0);
    Ok(PageCount(blocks / (PAGE_SIZE / BLOCK_BYTES)))
}

/// Whether this kernel hides data during a khugepaged collapse and collapses shared memory that
/// nobody gave advice for. Unknown means yes.
fn collapse_hides_data() -> bool {
    if !collapse_is_flawed() {
        return false;
    }
    match fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled") {
        // `advise` needs advice, which nobody here gives.
        Ok(text) => !["[never]", "[deny]", "[advise]"].iter().any(|calm| text.contains(calm)),
        // A kernel without transparent huge pages has no such file.
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Whether this kernel, were it to collapse shared memory, would hide data meanwhile.
fn collapse_is_flawed() -> bool {
    const FIXED_IN: (u32, u32) = (6, 4);
    let name = rustix::system::uname();
    parse_release(&name.release().to_string_lossy()).is_none_or(|release| release < FIXED_IN)
}

/// `6.18.44-anything` is (6, 18).
fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
#[path = "untouched_tests.rs"]
mod tests;
