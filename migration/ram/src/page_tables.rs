//! Which pages this process's page tables have.

use crate::RamRegion;
use martlet_bitmap::PageBitmap;
use martlet_units::PAGE_SIZE;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of `/proc/self/pagemap` for a page (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_BYTES: usize = 8;
/// Entries that are read at once, for 32 MiB of memory.
const ENTRIES: usize = 8192;
/// The page is in memory, or in swap space. Also what is between the two has one of these.
const PRESENT_OR_SWAPPED: u64 = 1 << 63 | 1 << 62;

/// Sets the bit of each page of `region` that page tables have; returns how many these are.
pub(crate) fn mark_mapped(region: &RamRegion, into: &PageBitmap) -> io::Result<u64> {
    let file = File::open("/proc/self/pagemap")?;
    let first = region.host_ptr(0).addr() as u64 / PAGE_SIZE;
    let mut buffer = vec![0; ENTRIES * ENTRY_BYTES];
    let mut found = 0;
    let mut page = 0;
    while page < region.pages() {
        let count = usize::try_from(region.pages() - page).unwrap_or(ENTRIES).min(ENTRIES);
        let entries = &mut buffer[..count * ENTRY_BYTES];
        file.read_exact_at(entries, (first + page) * ENTRY_BYTES as u64)?;
        for (entry, at) in entries.as_chunks::<ENTRY_BYTES>().0.iter().zip(page..) {
            if u64::from_ne_bytes(*entry) & PRESENT_OR_SWAPPED != 0 {
                into.set(at);
                found += 1;
            }
        }
        page += count as u64;
    }
    Ok(found)
}
