//! Regions of guest memory: sealed memfds, mapped shared.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is mapped and handed out as raw pointers; this module owns the mappings,
// so it is the place that can promise that a pointer it gives stays valid as long as the region.

use martlet_device_io::HostMemory;
use martlet_raw_memory::Guarded;
use martlet_units::{ByteCount, Gfn, PAGE_SIZE, PageCount, PageRange};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

/// Number of a region in its [`GuestRam`], in ascending order of guest address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(pub u16);

/// Most regions a guest may have.
pub const REGIONS_MAX: usize = 64;

/// Why guest memory could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// No regions, more than 64, or two that overlap or are out of order.
    #[error("guest memory regions are empty, too many, overlapping or out of order")]
    Layout,
    /// The host would not give the memory.
    #[error("cannot {operation} {size} of guest memory")]
    Host {
        /// `create`, `size`, `seal` or `map`.
        operation: &'static str,
        /// How much was asked for.
        size: ByteCount,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// A run of guest frames backed by one sealed memfd, mapped for reading and writing.
///
/// Pages that nobody touched are holes: they take no memory and read as zero. The file's size is
/// sealed; a page can still be lost, see [`LostPage`](crate::LostPage).
#[derive(Debug)]
pub struct RamRegion {
    range: PageRange,
    host: *mut u8,
    file: File,
    /// Taken before the mapping goes.
    guarded: Option<Guarded>,
}

// SAFETY: the region owns its mapping; the pointer is valid from every thread until the drop.
unsafe impl Send for RamRegion {}
// SAFETY: as above; a shared region only hands out raw pointers, whose users say how they share.
unsafe impl Sync for RamRegion {}

impl RamRegion {
    /// Makes and maps an empty region. Nothing is allocated before it is touched.
    pub fn create(range: PageRange) -> Result<RamRegion, RamError> {
        RamRegion::map(range, None)
    }

    /// As [`RamRegion::create`], at this host address or not at all, and executable: for a guest
    /// whose instructions the host's own threads execute, so that its pointers stay true.
    pub fn create_at(range: PageRange, host_address: usize) -> Result<RamRegion, RamError> {
        RamRegion::map(range, Some(host_address))
    }

    fn map(range: PageRange, host_address: Option<usize>) -> Result<RamRegion, RamError> {
        let size = range.pages().to_bytes();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("martlet-guest-ram", flags)
            .map_err(host_error("create", size))?;
        rustix::fs::ftruncate(&fd, size.0).map_err(host_error("size", size))?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(host_error("seal", size))?;
        RamRegion::map_file(range, fd.into(), host_address)
    }

    /// Maps a file of the range's length.
    pub(crate) fn map_file(
        range: PageRange,
        file: File,
        host_address: Option<usize>,
    ) -> Result<RamRegion, RamError> {
        let size = range.pages().to_bytes();
        let length = usize::try_from(size.0).map_err(|_| RamError::Layout)?;
        let mut protection = ProtFlags::READ | ProtFlags::WRITE;
        let mut flags = MapFlags::SHARED | MapFlags::NORESERVE;
        if host_address.is_some() {
            protection |= ProtFlags::EXEC;
            flags |= MapFlags::FIXED_NOREPLACE;
        }
        let hint = ptr::without_provenance_mut(host_address.unwrap_or(0));
        // SAFETY: a new mapping that replaces no other one harms nobody.
        let host = unsafe { rustix::mm::mmap(hint, length, protection, flags, &file, 0) }
            .map_err(host_error("map", size))?;
        let guarded = Some(martlet_raw_memory::guard(host.addr(), length));
        let region = RamRegion { range, host: host.cast(), file, guarded };
        if host_address.is_some_and(|wanted| wanted != host.addr()) {
            // A kernel before 4.17 takes the address for a wish.
            return Err(host_error("map", size)(rustix::io::Errno::EXIST));
        }
        // Guest memory is large and need not be in this process's core dumps.
        // SAFETY: the range is the mapping made above.
        let _ = unsafe { rustix::mm::madvise(host, length, Advice::LinuxDontDump) };
        Ok(region)
    }

    /// The frames it covers.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.range.pages().0
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.pages() * PAGE_SIZE
    }

    /// The first byte of page `page` of this region in the host's address space. The pointer and
    /// the rest of the region behind it are valid while the region lives. The guest may write
    /// there at any moment, and the page may be lost: hand it to the kernel, or use
    /// [`martlet_raw_memory`].
    ///
    /// # Panics
    /// If `page` is not in the region.
    #[expect(clippy::cast_possible_truncation, reason = "the mapping's length fits usize")]
    pub fn host_ptr(&self, page: u64) -> *mut u8 {
        assert!(page < self.pages(), "page {page} of region {}", self.range);
        // SAFETY: below the mapping's length, as asserted.
        unsafe { self.host.add((page * PAGE_SIZE) as usize) }
    }

    /// Whether a page can be read now.
    pub(crate) fn is_reachable(&self, page: u64) -> bool {
        // SAFETY: a byte of the mapping, which lives as long as the region.
        unsafe { martlet_raw_memory::is_reachable(self.host_ptr(page)) }
    }

    /// The memfd behind the region: for KVM, for `SEEK_DATA`, for handing to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for RamRegion {
    fn drop(&mut self) {
        self.guarded = None;
        let length = usize::try_from(self.len_bytes()).expect("was mapped with this length");
        // SAFETY: the mapping is this region's own and no pointer may outlive the region.
        let _ = unsafe { rustix::mm::munmap(self.host.cast(), length) };
    }
}

fn host_error(operation: &'static str, size: ByteCount) -> impl Fn(rustix::io::Errno) -> RamError {
    move |error| RamError::Host { operation, size, source: error.into() }
}

/// All memory of a guest, in ascending order of address.
#[derive(Debug)]
pub struct GuestRam {
    regions: Box<[RamRegion]>,
}

impl GuestRam {
    /// Makes empty memory for these ranges, which must ascend and not overlap.
    pub fn create(layout: &[PageRange]) -> Result<GuestRam, RamError> {
        GuestRam::create_each(layout, RamRegion::create)
    }

    /// As [`GuestRam::create`], with guest physical address `x` at host address `base + x` and
    /// executable; see [`RamRegion::create_at`]. Fails if something else is mapped there.
    pub fn create_at(layout: &[PageRange], base: usize) -> Result<GuestRam, RamError> {
        GuestRam::create_each(layout, |range| {
            let offset = range.start().checked_to_gpa().and_then(|gpa| usize::try_from(gpa.0).ok());
            let host_address = offset.and_then(|offset| base.checked_add(offset));
            RamRegion::create_at(range, host_address.ok_or(RamError::Layout)?)
        })
    }

    fn create_each(
        layout: &[PageRange],
        create: impl Fn(PageRange) -> Result<RamRegion, RamError>,
    ) -> Result<GuestRam, RamError> {
        let ascending = layout.windows(2).all(|pair| pair[0].end() <= pair[1].start());
        if layout.is_empty() || layout.len() > REGIONS_MAX || !ascending {
            return Err(RamError::Layout);
        }
        let regions = layout.iter().map(|range| create(*range)).collect::<Result<_, _>>();
        Ok(GuestRam { regions: regions? })
    }

    /// One region on a file of its length.
    #[cfg(test)]
    pub(crate) fn on_file(range: PageRange, file: File) -> GuestRam {
        GuestRam { regions: Box::new([RamRegion::map_file(range, file, None).unwrap()]) }
    }

    /// The regions; a [`RegionIndex`] is a place in this slice.
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    /// The region with this number; `None` if the number is a peer's invention.
    pub fn region(&self, index: RegionIndex) -> Option<&RamRegion> {
        self.regions.get(usize::from(index.0))
    }

    /// A region as memory that a device may be given; it stays mapped as long as the result, or a
    /// clone of it, lives.
    ///
    /// # Panics
    /// If there is no such region.
    pub fn host_memory(self: &Arc<Self>, index: RegionIndex) -> HostMemory {
        let region = self.region(index).expect("a region of this guest");
        let address = region.host.expose_provenance() as u64;
        // SAFETY: the region's mapping has this length, lives as long as the owner, and is used by
        // raw pointers only.
        unsafe { HostMemory::new(address, region.len_bytes(), Arc::clone(self) as _) }
    }

    /// The ranges it was made with.
    pub fn layout(&self) -> Vec<PageRange> {
        self.regions.iter().map(RamRegion::range).collect()
    }

    /// Pages in all regions.
    pub fn pages(&self) -> PageCount {
        PageCount(self.regions.iter().map(RamRegion::pages).sum())
    }

    /// The region that holds a frame, and the frame's page number in it.
    pub fn find(&self, gfn: Gfn) -> Option<(RegionIndex, u64)> {
        let index = self.regions.partition_point(|r| r.range.end() <= gfn);
        let region = self.regions.get(index)?;
        let page = gfn.0.checked_sub(region.range.start().0)?;
        Some((RegionIndex(u16::try_from(index).ok()?), page))
    }
}
