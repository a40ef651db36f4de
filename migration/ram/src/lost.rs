//! Pages that the host can't give any more.

use crate::{GuestRam, RegionIndex};
use martlet_units::{Gfn, PAGE_SIZE};
use std::io;

/// A page of guest memory that can't be read or written. Always this host's fault. The guest may
/// never touch it and runs on; but it can't be moved, and nothing can be moved there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "guest page {gfn} (page {page} of memory region {region}) can't be read or written: the \
     hardware memory is poisoned, or what backs it was cut short or is full; see the host's kernel \
     log"
)]
pub struct LostPage {
    /// The region.
    pub region: u16,
    /// The page's number in the region.
    pub page: u64,
    /// The page's number as the guest sees it.
    pub gfn: Gfn,
}

impl LostPage {
    /// The lost page that an error of a send is about, if it is.
    pub fn of(error: &io::Error) -> Option<LostPage> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<LostPage> for io::Error {
    fn from(page: LostPage) -> io::Error {
        io::Error::other(page)
    }
}

impl GuestRam {
    /// The first of these pages that can't be read, if there is one: for when the kernel said that
    /// memory is bad and not where. Pages outside of the region are passed over.
    pub fn first_lost(&self, region: RegionIndex, first_page: u64, count: u32) -> Option<LostPage> {
        let memory = self.region(region)?;
        let end = first_page.saturating_add(u64::from(count)).min(memory.pages());
        let page = (first_page..end).find(|page| !memory.is_reachable(*page))?;
        Some(self.lost(region, page))
    }

    /// Names the page at an address of this process, if it is one of this guest's.
    pub fn lost_at(&self, address: usize) -> Option<LostPage> {
        let regions = (0..).map(RegionIndex).zip(self.regions());
        regions.into_iter().find_map(|(index, region)| {
            let offset = address.checked_sub(region.host_ptr(0).addr())? as u64;
            (offset < region.len_bytes()).then(|| self.lost(index, offset / PAGE_SIZE))
        })
    }

    /// Names a page.
    ///
    /// # Panics
    /// If there is no such region.
    pub fn lost(&self, region: RegionIndex, page: u64) -> LostPage {
        let start = self.regions()[usize::from(region.0)].range().start();
        LostPage { region: region.0, page, gfn: Gfn(start.0.saturating_add(page)) }
    }
}

#[cfg(test)]
#[path = "lost_tests.rs"]
mod tests;
