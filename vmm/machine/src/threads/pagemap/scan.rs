//! `PAGEMAP_SCAN`: finds written pages and protects them again.
#![allow(unsafe_code)]
// UNSAFETY: an ioctl that the crates don't have, with a structure that contains addresses.

use super::call::Call;
use super::failed;
use martlet_bitmap::PageBitmap;
use martlet_ram::{RamRegion, TrackError};
use martlet_units::PAGE_SIZE;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use std::io;
use std::os::fd::OwnedFd;

/// Ranges that one scan returns at most; more take another call.
pub(super) const RANGES_MAX: usize = 4096;

// From include/uapi/linux/fs.h of Linux 6.7.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGEMAP_SCAN: Opcode = opcode::read_write::<PmScanArg>(b'f', 16);

#[repr(C)]
#[derive(Default)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`: addresses from `start` to before `end` that are in `categories`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// See the module's comment.
#[derive(Debug)]
pub(super) struct PageScan {
    pagemap: OwnedFd,
    /// Where the kernel puts what it finds; made once, since a scan may be in the blackout.
    found: Box<[PageRegion]>,
}

impl PageScan {
    /// Opens this process's page map.
    pub(super) fn open() -> Result<PageScan, TrackError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let pagemap = rustix::fs::open("/proc/self/pagemap", flags, Mode::empty())
            .map_err(failed(|| "opening /proc/self/pagemap".into()))?;
        let found = vec![PageRegion::default(); RANGES_MAX].into_boxed_slice();
        Ok(PageScan { pagemap, found })
    }

    /// Finds out now, not in the middle of a migration, whether the kernel can scan. The region
    /// must be protected.
    pub(super) fn probe(&mut self, region: &RamRegion) -> Result<(), TrackError> {
        let start = region.host_ptr(0).expose_provenance() as u64;
        // An empty range: nothing that was written is taken from the first sync.
        self.scan(start, start)
            .map(drop)
            .map_err(failed(|| "PAGEMAP_SCAN (needs Linux 6.7)".into()))
    }

    /// Adds the written pages of a region to `into` and protects them. After an error written pages
    /// may be lost; the attempt ends with it.
    pub(super) fn scan_region(&mut self, region: &RamRegion, into: &PageBitmap) -> io::Result<()> {
        let base = region.host_ptr(0).expose_provenance() as u64;
        let end = base + region.len_bytes();
        let mut start = base;
        while start < end {
            let (count, walk_end) = self.scan(start, end)?;
            for range in self.found.iter().take(count) {
                let page = |address: u64| (address.clamp(start, end) - base) / PAGE_SIZE;
                into.set_range(page(range.start)..page(range.end));
            }
            if walk_end <= start {
                return Err(Errno::IO.into());
            }
            start = walk_end;
        }
        Ok(())
    }

    /// Finds and protects written pages between two addresses. Returns the number of ranges
    /// found and where the kernel stopped because there was no room for more.
    fn scan(&mut self, start: u64, end: u64) -> rustix::io::Result<(usize, u64)> {
        let mut argument = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
            start,
            end,
            vec: self.found.as_mut_ptr().expose_provenance() as u64,
            vec_len: self.found.len() as u64,
            // With exactly this category and no other the kernel also reports entries that are
            // empty: pages that were written and then reclaimed (`pagemap_scan_pmd_entry`,
            // fs/proc/task_mmu.c). Untouched ones are not empty, see the module's comment.
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..PmScanArg::default()
        };
        // SAFETY: the argument is `struct pm_scan_arg` and names a buffer of `struct page_region`
        // that lives across the call. The scan changes no memory, only page table bits of a
        // registered range.
        let count =
            unsafe { rustix::ioctl::ioctl(&self.pagemap, Call::<PAGEMAP_SCAN, _>(&mut argument)) }?;
        let count = usize::try_from(count).map_err(|_| Errno::OVERFLOW)?;
        Ok((count.min(self.found.len()), argument.walk_end))
    }
}
