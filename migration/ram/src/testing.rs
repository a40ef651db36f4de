//! Pages that are lost on purpose.
#![allow(unsafe_code)]
// UNSAFETY: puts an empty file in the place of a page of guest memory.

#[cfg(test)]
use crate::RamRegion;
use crate::{GuestRam, PAGE_BYTES, RegionIndex};
use martlet_units::PAGE_SIZE;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::AsFd;
use std::sync::Arc;

/// A page that this process can't reach through its mapping, until the drop heals it: every touch
/// is a bus error, as if the file had been cut short. The file itself keeps the page.
#[derive(Debug)]
pub struct Spoiled {
    ram: Arc<GuestRam>,
    region: RegionIndex,
    page: u64,
}

impl Spoiled {
    /// Spoils a page.
    pub fn new(ram: &Arc<GuestRam>, region: RegionIndex, page: u64) -> Spoiled {
        let empty = rustix::fs::memfd_create("lost", MemfdFlags::CLOEXEC).expect("a memfd");
        let spoiled = Spoiled { ram: Arc::clone(ram), region, page };
        spoiled.map(&empty, 0);
        spoiled
    }

    fn map(&self, file: impl AsFd, offset: u64) {
        let at = self.ram.regions()[usize::from(self.region.0)].host_ptr(self.page);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: one page of the region's mapping gets another file's. Guest memory is only
        // reached by raw pointers, whose users must expect that anything is there.
        unsafe { rustix::mm::mmap(at.cast(), PAGE_BYTES, protection, flags, file, offset) }
            .expect("a page is mapped");
    }
}

impl Drop for Spoiled {
    fn drop(&mut self) {
        let region = &self.ram.regions()[usize::from(self.region.0)];
        let file = region.file().expect("spoiled memory is this crate's own");
        self.map(file.fd, self.page * PAGE_SIZE);
    }
}

#[cfg(test)]
impl RamRegion {
    /// Poisons the memory of a page, for all processes.
    pub(crate) fn poison(&self, page: u64) -> std::io::Result<()> {
        // SAFETY: a page of this region, whose users must expect that it is lost.
        let result =
            unsafe { libc::madvise(self.host_ptr(page).cast(), PAGE_BYTES, libc::MADV_HWPOISON) };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }
}
