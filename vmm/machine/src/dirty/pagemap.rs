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
#![allow(unsafe_code)]
// UNSAFETY: ioctls that the crates don't have, with structures that contain addresses.

use martlet_ram::{DirtySource, GuestRam, RamBitmap, RegionIndex, TrackError};
use martlet_units::PAGE_SIZE;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use rustix::mm::UserfaultfdFlags;
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Ranges that one scan returns at most; more take another call.
const SCAN_RANGES_MAX: usize = 4096;

/// Pages that are protected in one call at the start, which holds the memory map's lock.
const PROTECT_PAGES_MAX: u64 = 1 << 18;

// From include/uapi/linux/userfaultfd.h of Linux 6.7.
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const USERFAULTFD_IOC_NEW: Opcode = opcode::none(0xaa, 0x00);
const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xaa, 0x00);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(0xaa, 0x06);

// From include/uapi/linux/fs.h of Linux 6.7.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGEMAP_SCAN: Opcode = opcode::read_write::<PmScanArg>(b'f', 16);

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioWriteprotect {
    start: u64,
    len: u64,
    mode: u64,
}

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
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Tracks the writes of this process's threads to a guest's memory, by whatever way they come:
/// instructions, or system calls that store there. At most one at a time for a guest's memory.
///
/// Its drop takes all protection away (`userfaultfd_release`, mm/userfaultfd.c).
#[derive(Debug)]
pub(crate) struct PagemapTracker {
    ram: Arc<GuestRam>,
    pagemap: OwnedFd,
    /// Holds the registration.
    _uffd: OwnedFd,
    /// Where the kernel puts what it finds; made once, since a sync may be in the blackout.
    found: Box<[PageRegion]>,
}

impl std::fmt::Debug for PageRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

impl PagemapTracker {
    /// Protects all pages. The guest may run meanwhile: what it writes before its page is
    /// protected was written before the tracking began.
    pub(crate) fn new(ram: Arc<GuestRam>) -> Result<PagemapTracker, TrackError> {
        let uffd = open()?;
        for (index, region) in ram.regions().iter().enumerate() {
            let start = region.host_ptr(0).expose_provenance() as u64;
            register(&uffd, start, region.len_bytes()).map_err(failed(|| {
                format!("write-protecting region {index} by userfaultfd (needs Linux 6.7)")
            }))?;
            let mut page = 0;
            while page < region.pages() {
                let pages = PROTECT_PAGES_MAX.min(region.pages() - page);
                protect(&uffd, start + page * PAGE_SIZE, pages * PAGE_SIZE)
                    .map_err(failed(|| format!("write-protecting region {index}, page {page}")))?;
                page += pages;
            }
        }
        let pagemap =
            rustix::fs::open("/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(failed(|| "opening /proc/self/pagemap".into()))?;
        let found = vec![PageRegion::default(); SCAN_RANGES_MAX].into_boxed_slice();
        let mut tracker = PagemapTracker { ram, pagemap, _uffd: uffd, found };
        tracker.probe()?;
        Ok(tracker)
    }

    /// Finds out now, not in the middle of a migration, whether the kernel can scan.
    fn probe(&mut self) -> Result<(), TrackError> {
        let Some(region) = self.ram.regions().first() else { return Ok(()) };
        let start = region.host_ptr(0).expose_provenance() as u64;
        // An empty range: nothing that was written is taken from the first sync.
        self.scan(start, start)
            .map(drop)
            .map_err(failed(|| "PAGEMAP_SCAN (needs Linux 6.7)".into()))
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

    fn sync_region(&mut self, index: RegionIndex, into: &RamBitmap) -> rustix::io::Result<()> {
        let Some(region) = self.ram.region(index) else { return Ok(()) };
        let base = region.host_ptr(0).expose_provenance() as u64;
        let end = base + region.len_bytes();
        let mut start = base;
        while start < end {
            let (count, walk_end) = match self.scan(start, end) {
                Err(Errno::INTR | Errno::AGAIN) => continue,
                result => result?,
            };
            let bitmap = into.region(index);
            for range in self.found.iter().take(count) {
                let page = |address: u64| (address.clamp(base, end) - base) / PAGE_SIZE;
                bitmap.set_range(page(range.start)..page(range.end));
            }
            if walk_end <= start {
                return Err(Errno::IO);
            }
            start = walk_end;
        }
        Ok(())
    }
}

impl DirtySource for PagemapTracker {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        for (index, _) in into.iter() {
            self.sync_region(index, into)
                .map_err(failed(|| format!("PAGEMAP_SCAN of region {}", index.0)))?;
        }
        Ok(())
    }

    /// The sync has protected the pages again.
    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}

/// A userfaultfd that protects asynchronously.
fn open() -> Result<OwnedFd, TrackError> {
    let uffd = open_device().or_else(|_| {
        // Not privileged. User-mode-only is no limit here: asynchronous protection is taken away
        // by the kernel's own stores as well (`do_wp_page`, mm/memory.c).
        const UFFD_USER_MODE_ONLY: u32 = 1;
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        // SAFETY: nothing is registered yet.
        unsafe { rustix::mm::userfaultfd(flags) }
    });
    let uffd = uffd.map_err(failed(|| "opening a userfaultfd".into()))?;
    let mut api = UffdioApi {
        api: UFFD_API,
        features: UFFD_FEATURE_PAGEFAULT_FLAG_WP
            | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
            | UFFD_FEATURE_WP_UNPOPULATED
            | UFFD_FEATURE_WP_ASYNC,
        ioctls: 0,
    };
    // SAFETY: the argument is `struct uffdio_api`.
    unsafe { rustix::ioctl::ioctl(&uffd, Call::<UFFDIO_API, _>(&mut api)) }
        .map_err(failed(|| "userfaultfd's asynchronous write protection (Linux 6.7)".into()))?;
    Ok(uffd)
}

fn open_device() -> rustix::io::Result<OwnedFd> {
    let device =
        rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
    // SAFETY: the device takes flags and makes a userfaultfd, with nothing registered yet.
    unsafe { rustix::ioctl::ioctl(&device, NewFd(flags)) }
}

fn register(uffd: impl AsFd, start: u64, len: u64) -> rustix::io::Result<()> {
    let mut range = UffdioRegister { start, len, mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
    // SAFETY: the argument is `struct uffdio_register`; asynchronous protection changes no
    // behaviour of the memory.
    unsafe { rustix::ioctl::ioctl(uffd, Call::<UFFDIO_REGISTER, _>(&mut range)) }.map(drop)
}

fn protect(uffd: impl AsFd, start: u64, len: u64) -> rustix::io::Result<()> {
    let mut range = UffdioWriteprotect { start, len, mode: UFFDIO_WRITEPROTECT_MODE_WP };
    loop {
        // SAFETY: the argument is `struct uffdio_writeprotect`; asynchronous protection changes
        // no behaviour of the memory.
        match unsafe { rustix::ioctl::ioctl(&uffd, Call::<UFFDIO_WRITEPROTECT, _>(&mut range)) } {
            // Somebody changes the memory map just now (`mwriteprotect_range`).
            Err(Errno::AGAIN) => std::thread::yield_now(),
            result => return result.map(drop),
        }
    }
}

fn failed(operation: impl FnOnce() -> String) -> impl FnOnce(Errno) -> TrackError {
    move |errno| TrackError { operation: operation(), source: io::Error::from(errno) }
}

/// An ioctl that reads and writes a structure; its result is the ioctl's.
struct Call<'a, const OPCODE: Opcode, T>(&'a mut T);

// SAFETY: the opcode and the structure belong together wherever one is made, in this module.
unsafe impl<const OPCODE: Opcode, T> Ioctl for Call<'_, OPCODE, T> {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut *self.0).cast()
    }

    unsafe fn output_from_ptr(
        output: IoctlOutput,
        _: *mut c_void,
    ) -> rustix::io::Result<IoctlOutput> {
        Ok(output)
    }
}

/// `USERFAULTFD_IOC_NEW`: its argument is a number, its result a file descriptor.
struct NewFd(OFlags);

// SAFETY: the kernel takes the pointer for flags and does not follow it (`new_userfaultfd`).
unsafe impl Ioctl for NewFd {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        USERFAULTFD_IOC_NEW
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0.bits() as usize)
    }

    unsafe fn output_from_ptr(fd: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "few pages")]
mod tests {
    use super::*;
    use martlet_units::{Gfn, PageCount, PageRange};
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn ram(layout: &[(u64, u64)]) -> Arc<GuestRam> {
        let range = |(start, pages): &(u64, u64)| {
            PageRange::try_new(Gfn(*start), PageCount(*pages)).unwrap()
        };
        Arc::new(GuestRam::create(&layout.iter().map(range).collect::<Vec<_>>()).unwrap())
    }

    fn tracker(ram: &Arc<GuestRam>) -> Option<PagemapTracker> {
        match PagemapTracker::new(Arc::clone(ram)) {
            Ok(tracker) => Some(tracker),
            Err(error) => {
                println!("skipped: {error}: {}", error.source);
                None
            }
        }
    }

    fn store(ram: &GuestRam, region: usize, page: u64) {
        // SAFETY: the page is in the region.
        unsafe { ram.regions()[region].host_ptr(page).write_volatile(1) };
    }

    fn read(ram: &GuestRam, region: usize, page: u64) {
        // SAFETY: the page is in the region.
        unsafe { ram.regions()[region].host_ptr(page).read_volatile() };
    }

    fn synced(tracker: &mut PagemapTracker) -> Vec<BTreeSet<u64>> {
        let bitmap = RamBitmap::new(&tracker.ram);
        tracker.sync(&bitmap).unwrap();
        bitmap.iter().map(|(_, region)| region.runs().flatten().collect()).collect()
    }

    #[test]
    fn written_pages_are_reported_once_and_no_others() {
        let ram = ram(&[(0, 3000), (1 << 20, 1500)]);
        for page in 0..100 {
            store(&ram, 0, page);
            read(&ram, 0, 1000 + page);
        }
        let Some(mut tracker) = tracker(&ram) else { return };
        assert_eq!(synced(&mut tracker), [BTreeSet::new(), BTreeSet::new()]);
        // Written before, never touched, only read before, alone in its page table, the last one.
        for page in [7, 500, 1003, 2000, 2999] {
            store(&ram, 0, page);
        }
        store(&ram, 1, 1499);
        for page in [8, 600, 1004, 2001] {
            read(&ram, 0, page);
        }
        let expected = [BTreeSet::from([7, 500, 1003, 2000, 2999]), BTreeSet::from([1499])];
        assert_eq!(synced(&mut tracker), expected);
        assert_eq!(synced(&mut tracker), [BTreeSet::new(), BTreeSet::new()]);
        store(&ram, 0, 500);
        assert_eq!(synced(&mut tracker)[0], BTreeSet::from([500]));
    }

    #[test]
    fn more_ranges_than_fit_one_scan() {
        let pages = 3 * SCAN_RANGES_MAX as u64;
        let ram = ram(&[(0, pages)]);
        let Some(mut tracker) = tracker(&ram) else { return };
        let odd: BTreeSet<u64> = (0..pages).filter(|page| page % 2 == 1).collect();
        for page in &odd {
            store(&ram, 0, *page);
        }
        assert_eq!(synced(&mut tracker), [odd]);
    }

    #[test]
    fn what_the_kernel_stores_is_reported() {
        let ram = ram(&[(0, 64)]);
        let Some(mut tracker) = tracker(&ram) else { return };
        let zero = rustix::fs::open("/dev/zero", OFlags::RDONLY, Mode::empty()).unwrap();
        let to = ram.regions()[0].host_ptr(10);
        // SAFETY: two pages of guest memory that nobody else uses.
        let buffer = unsafe { std::slice::from_raw_parts_mut(to, 8192) };
        assert_eq!(rustix::io::read(zero, buffer).unwrap(), 8192);
        assert_eq!(synced(&mut tracker), [BTreeSet::from([10, 11])]);
    }

    #[test]
    fn a_reclaimed_page_is_not_forgotten() {
        let ram = ram(&[(0, 1024)]);
        store(&ram, 0, 5);
        let Some(mut tracker) = tracker(&ram) else { return };
        store(&ram, 0, 5);
        store(&ram, 0, 600);
        for page in [5, 600] {
            let address = ram.regions()[0].host_ptr(page).cast();
            // What reclaim does to a page table entry of shared memory, at once: the page stays
            // in the file, its entry becomes empty.
            // SAFETY: shared memory keeps its content.
            unsafe {
                rustix::mm::madvise(address, 4096, rustix::mm::Advice::LinuxDontNeed).unwrap();
            }
        }
        assert_eq!(synced(&mut tracker), [BTreeSet::from([5, 600])]);
    }

    #[test]
    fn dropping_ends_the_tracking_and_another_can_begin() {
        let ram = ram(&[(0, 64)]);
        for _ in 0..3 {
            let Some(mut tracker) = tracker(&ram) else { return };
            store(&ram, 0, 3);
            assert_eq!(synced(&mut tracker), [BTreeSet::from([3])]);
        }
    }

    /// What a migration does: copies what each sync reports, while writers run. At the end the
    /// copy must be the memory.
    #[test]
    fn no_write_is_lost_while_writers_run() {
        const PAGES: u64 = 256;
        let ram = ram(&[(0, PAGES)]);
        let Some(mut tracker) = tracker(&ram) else { return };
        let end = AtomicBool::new(false);
        let counter = |page: u64| {
            let word = ram.regions()[0].host_ptr(page).cast::<std::sync::atomic::AtomicU64>();
            // SAFETY: aligned, in the region, only used as an atomic word.
            unsafe { &*word }
        };
        let mut copy = vec![0; PAGES as usize];
        let mut sync_and_copy = || {
            for page in &synced(&mut tracker)[0] {
                copy[*page as usize] = counter(*page).load(Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (end, counter) = (&end, &counter);
                scope.spawn(move || {
                    let mut page = writer;
                    while !end.load(Ordering::Relaxed) {
                        counter(page).fetch_add(1, Ordering::Relaxed);
                        page = (page * 5 + 3) % PAGES;
                    }
                });
            }
            let mut syncs = 0;
            while syncs < 300 || counter(PAGES - 1).load(Ordering::Relaxed) < 100 {
                sync_and_copy();
                syncs += 1;
                std::thread::yield_now();
            }
            end.store(true, Ordering::Relaxed);
        });
        sync_and_copy();
        let memory: Vec<u64> = (0..PAGES).map(|p| counter(p).load(Ordering::Relaxed)).collect();
        assert_eq!(copy, memory);
    }
}
