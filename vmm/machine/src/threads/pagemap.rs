//! Dirty tracking without KVM: the guest's writes are those of this process's threads, and the
//! kernel's page tables know of them.
//!
//! userfaultfd write-protects the pages; in its asynchronous mode (`UFFD_FEATURE_WP_ASYNC`) the
//! first write to one takes the protection away inside the page fault and wakes nobody. The ioctl
//! `PAGEMAP_SCAN` finds the pages without protection and protects them again, page by page under
//! the page table's lock: no write falls between the two. Both came with Linux 6.7 and are
//! described in the kernel's Documentation/admin-guide/mm/pagemap.rst and userfaultfd.rst.
//!
//! At the start every page gets its protection, also those that were never touched
//! (`PTE_MARKER_UFFD_WP`). Otherwise a scan could not tell these from pages that were written and
//! then reclaimed, and would report all neighbours of a touched page. It costs the page tables of
//! the whole guest: 2 MiB for each GiB.

mod call;
mod scan;
#[cfg(test)]
mod tests;
mod uffd;

use martlet_ram::{DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError};
use rustix::io::Errno;
use scan::PageScan;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Tracks the writes of this process's threads to a guest's memory, by whatever way they come:
/// instructions, or system calls that store there. At most one at a time for a guest's memory.
///
/// Its drop takes all protection away (`userfaultfd_release`, mm/userfaultfd.c).
#[derive(Debug)]
pub(crate) struct PagemapTracker {
    ram: Arc<GuestRam>,
    scan: PageScan,
    /// Holds the registration.
    _uffd: OwnedFd,
}

impl PagemapTracker {
    /// Protects all pages. The guest may run meanwhile: what it writes before its page is
    /// protected was written before the tracking began.
    pub(crate) fn new(ram: Arc<GuestRam>) -> Result<PagemapTracker, TrackError> {
        let uffd = uffd::open()?;
        let mut scan = PageScan::open()?;
        for (index, region) in ram.regions().iter().enumerate() {
            uffd::protect_region(&uffd, index, region)?;
            scan.probe(region)?;
        }
        Ok(PagemapTracker { ram, scan, _uffd: uffd })
    }
}

impl DirtySource for PagemapTracker {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        for (region, (index, bitmap)) in self.ram.regions().iter().zip(into.iter()) {
            self.scan.scan_region(region, bitmap).map_err(|source| {
                TrackError::host(format!("PAGEMAP_SCAN of region {}", index.0), source)
            })?;
        }
        Ok(())
    }

    /// The sync has protected the pages again.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}

/// Says what was being done when the kernel refused.
fn failed(operation: impl FnOnce() -> String) -> impl FnOnce(Errno) -> TrackError {
    move |errno| TrackError::host(operation(), errno)
}
