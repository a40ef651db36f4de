//! userfaultfd's asynchronous write protection.
#![allow(unsafe_code)]
// UNSAFETY: ioctls that the crates don't have.

use super::call::Call;
use super::failed;
use martlet_ram::{RamRegion, TrackError};
use martlet_units::PAGE_SIZE;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::UserfaultfdFlags;
use std::os::fd::{AsFd, OwnedFd};

/// Pages that are protected in one call, which holds the memory map's lock.
const PROTECT_PAGES_MAX: u64 = 1 << 18;

// From include/uapi/linux/userfaultfd.h of Linux 6.7.
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xaa, 0x00);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(0xaa, 0x06);

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

/// A userfaultfd that protects asynchronously.
pub(super) fn open() -> Result<OwnedFd, TrackError> {
    // User-mode-only needs no privilege and is no limit here: asynchronous protection is taken away
    // by the kernel's own stores as well (`do_wp_page`, mm/memory.c).
    const UFFD_USER_MODE_ONLY: u32 = 1;
    let flags = UserfaultfdFlags::CLOEXEC
        | UserfaultfdFlags::NONBLOCK
        | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
    // SAFETY: nothing is registered yet.
    let uffd = unsafe { rustix::mm::userfaultfd(flags) };
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

/// Registers a region and protects all of its pages.
pub(super) fn protect_region(
    uffd: impl AsFd,
    index: usize,
    region: &RamRegion,
) -> Result<(), TrackError> {
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
    Ok(())
}
