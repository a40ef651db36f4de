//! Regions of guest memory: sealed memfds of this crate, or memory that a VMM has already.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is mapped and handed out as raw pointers; this module keeps the mappings'
// owners, so it is the place that can promise that a pointer it gives stays valid as long as the
// region.

use crate::backing::Held;
use crate::tracker::Lease;
use crate::{Backing, PAGE_BYTES, RegionFile};
use martlet_device_io::HostMemory;
use martlet_raw_memory::Guarded;
use martlet_units::{ByteCount, Gfn, PAGE_SIZE, PageCount, PageRange};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
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
    /// Memory that was handed over can't be a guest's.
    #[error("memory of the VMM can't be guest memory: it {reason}")]
    Unusable {
        /// What it does or is.
        reason: &'static str,
    },
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

/// A run of guest frames, mapped for reading and writing.
///
/// Pages that nobody touched take no memory and read as zero. A page can be lost, see
/// [`LostPage`](crate::LostPage).
pub struct RamRegion {
    range: PageRange,
    host: *mut u8,
    held: Held,
    /// Before the owner: taken before the mapping goes.
    _guarded: Guarded,
    /// Keeps the mapping.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the region keeps its mapping; the pointer is valid from every thread until the drop.
unsafe impl Send for RamRegion {}
// SAFETY: as above; a shared region only hands out raw pointers, whose users say how they share.
unsafe impl Sync for RamRegion {}

impl fmt::Debug for RamRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RamRegion({} at {:p}, {:?})", self.range, self.host, self.held)
    }
}

/// Unmaps memory that this crate mapped.
struct Mapping {
    start: usize,
    length: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let start = ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: made by `RamRegion::map_file`, and no pointer may outlive the region.
        let _ = unsafe { rustix::mm::munmap(start, self.length) };
    }
}

impl RamRegion {
    /// Makes and maps an empty region: a memfd whose size is sealed. Nothing is allocated before it
    /// is touched.
    pub fn create(range: PageRange) -> Result<RamRegion, RamError> {
        RamRegion::map(range, None)
    }

    /// As [`RamRegion::create`], at this host address or not at all, and executable: for a guest
    /// whose instructions the host's own threads execute, so that its pointers stay true.
    pub fn create_at(range: PageRange, host_address: usize) -> Result<RamRegion, RamError> {
        RamRegion::map(range, Some(host_address))
    }

    /// Takes memory that the VMM has mapped at `host`, from the first of the frames to the last.
    /// Memory that is to receive a guest must be zero. `owner` is kept until the region goes.
    ///
    /// # Errors
    /// If it does not begin with a page.
    ///
    /// # Safety
    /// The memory is mapped for reading and writing until `owner` is dropped, and nobody has a Rust
    /// reference to it but of atomics. `backing` is what holds it: guest memory is lost if it is
    /// not.
    pub unsafe fn adopt(
        range: PageRange,
        host: *mut u8,
        backing: Backing,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<RamRegion, RamError> {
        if !host.addr().is_multiple_of(PAGE_BYTES) {
            return Err(RamError::Unusable { reason: "does not begin with a page" });
        }
        Ok(RamRegion::new(range, host, Held::of(backing)?, owner))
    }

    fn new(
        range: PageRange,
        host: *mut u8,
        held: Held,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> RamRegion {
        let length = usize::try_from(range.pages().to_bytes().0).expect("is mapped");
        let guarded = martlet_raw_memory::guard(host.addr(), length);
        RamRegion { range, host, held, _guarded: guarded, _owner: owner }
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

    /// Maps a memfd of the range's length.
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
        let owner = Arc::new(Mapping { start: host.expose_provenance(), length });
        if host_address.is_some_and(|wanted| wanted != host.addr()) {
            // A kernel before 4.17 takes the address for a wish.
            return Err(host_error("map", size)(rustix::io::Errno::EXIST));
        }
        // Guest memory is large and need not be in this process's core dumps.
        // SAFETY: the range is the mapping made above.
        let _ = unsafe { rustix::mm::madvise(host, length, Advice::LinuxDontDump) };
        let held = Held::Pages { file, offset: 0, is_own: true };
        Ok(RamRegion::new(range, host.cast(), held, owner))
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

    /// The file that is this memory: for `SEEK_DATA`, for content that goes there without a page
    /// fault, for handing to another process. `None` if pages can't be reached by a file.
    pub fn file(&self) -> Option<RegionFile<'_>> {
        self.held.file()
    }

    /// The page at a byte of [`RamRegion::file`]; the region's last one past its end.
    pub fn page_of_file(&self, byte: u64) -> u64 {
        let begin = self.file().map_or(0, |file| file.offset);
        (byte.saturating_sub(begin) / PAGE_SIZE).min(self.pages() - 1)
    }

    pub(crate) fn held(&self) -> &Held {
        &self.held
    }
}

fn host_error(operation: &'static str, size: ByteCount) -> impl Fn(rustix::io::Errno) -> RamError {
    move |error| RamError::Host { operation, size, source: error.into() }
}

/// All memory of a guest, in ascending order of address.
#[derive(Debug)]
pub struct GuestRam {
    regions: Box<[RamRegion]>,
    lease: Arc<Lease>,
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
        check_layout(layout.iter().copied())?;
        let regions = layout.iter().map(|range| create(*range)).collect::<Result<_, _>>();
        Ok(GuestRam { regions: regions?, lease: Arc::default() })
    }

    /// Puts regions together, which must ascend and not overlap.
    pub fn from_regions(regions: Vec<RamRegion>) -> Result<GuestRam, RamError> {
        check_layout(regions.iter().map(RamRegion::range))?;
        Ok(GuestRam { regions: regions.into_boxed_slice(), lease: Arc::default() })
    }

    pub(crate) fn tracking_lease(&self) -> &Arc<Lease> {
        &self.lease
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

fn check_layout(mut layout: impl ExactSizeIterator<Item = PageRange>) -> Result<(), RamError> {
    let is_sized = (1..=REGIONS_MAX).contains(&layout.len());
    let mut end = Gfn(0);
    let ascends = layout.all(|range| range.start() >= std::mem::replace(&mut end, range.end()));
    if is_sized && ascends { Ok(()) } else { Err(RamError::Layout) }
}
