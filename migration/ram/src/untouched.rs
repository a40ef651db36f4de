//! Which pages were ever touched, found in bulk.
//!
//! A 64 GiB guest that uses 64 MiB must not cost the reading of 64 GiB, and reading a page of
//! shared memory that nobody touched even allocates it (`shmem_fault`, mm/shmem.c).

use crate::RamRegion;
use martlet_bitmap::PageBitmap;
use martlet_units::{PAGE_SIZE, PageCount};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs;
use std::io;

/// Most walks over a region's file; see [`mark_touched`].
const WALKS_MAX: u32 = 4;

/// Sets the bit of each page of `region` that may hold data, and returns how many these are. The
/// others are holes: never written, so zero, and they take no memory. Pages behind the end of a
/// file that was cut short may have held data: who sends them finds that they are lost.
///
/// The answer is the file's, by `SEEK_DATA` and `SEEK_HOLE`, not the page tables'. In shared
/// memory a page can hold data without any page table entry: once swapped out, its entry may be
/// empty, and khugepaged drops whole page tables (`retract_page_tables`, mm/khugepaged.c).
/// `PAGEMAP_SCAN` and `mincore` of the mapping would call such pages untouched, and the guest would
/// lose them; the file counts swapped-out pages as data (`mapping_seek_hole_data`, mm/filemap.c).
/// It also costs a call per run of data rather than a look at each page.
///
/// The guest may run and touch more pages meanwhile, if dirty tracking was started before: a page
/// that this walk is too early to see is then in the next dirty sync.
///
/// One thing can hide a page from a walk: while the kernel moves a page in memory, its new place
/// is in the file for some microseconds before it counts as data (`folio_migrate_flags`,
/// mm/migrate.c). So the walk is compared with the number of pages that the file says it has
/// (`st_blocks`, swapped-out ones included) and repeated if it found fewer, a few times: a running
/// guest that touches pages all the time makes the numbers differ without harm. Kernels before 6.4
/// hide 2 MiB for the length of a khugepaged collapse (fixed by "mm/khugepaged: maintain page
/// cache uptodate flag"); there, if the host gives huge pages to shared memory unasked and the
/// numbers differ to the end, every page counts as touched.
///
/// # Panics
/// If `into` is not as long as the region.
pub fn mark_touched(region: &RamRegion, into: &PageBitmap) -> io::Result<u64> {
    assert_eq!(into.pages(), region.pages(), "a bitmap of another region");
    let end = u64::try_from(rustix::fs::fstat(region.fd())?.st_size).unwrap_or(0) / PAGE_SIZE;
    let cut = end.min(region.pages())..region.pages();
    into.set_range(cut.clone());
    let lost = cut.end - cut.start;
    let mut found = 0;
    for _ in 0..WALKS_MAX {
        found = walk(region, into)?;
        if found >= pages_of_file(region)?.0 {
            return Ok(found + lost);
        }
    }
    if collapse_hides_data() {
        into.set_range(0..region.pages());
        return Ok(region.pages());
    }
    Ok(found + lost)
}

/// One pass over the file, from data to hole to data.
fn walk(region: &RamRegion, into: &PageBitmap) -> io::Result<u64> {
    let mut found = 0;
    let mut page = 0;
    while page < region.pages() {
        let start = match rustix::fs::seek(region.fd(), SeekFrom::Data(page * PAGE_SIZE)) {
            Ok(byte) => (byte / PAGE_SIZE).max(page),
            // No data from here on (lseek(2)).
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = match rustix::fs::seek(region.fd(), SeekFrom::Hole(start * PAGE_SIZE)) {
            // The end of the file is a hole. A hole that came right after the first call, because
            // somebody punched it, is passed over.
            Ok(byte) => byte.div_ceil(PAGE_SIZE).clamp(start + 1, region.pages()),
            Err(error) => return Err(error.into()),
        };
        into.set_range(start..end);
        found += end - start;
        page = end;
    }
    Ok(found)
}

/// Pages that the file holds, in memory or swapped out (`shmem_recalc_inode`, mm/shmem.c).
fn pages_of_file(region: &RamRegion) -> io::Result<PageCount> {
    /// `st_blocks` counts these whatever the block size (stat(3type)).
    const BLOCK_BYTES: u64 = 512;
    let blocks = u64::try_from(rustix::fs::fstat(region.fd())?.st_blocks).unwrap_or(0);
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
