//! A page of guest memory that this process finds as a test wants it.
#![allow(unsafe_code)]
// UNSAFETY: userfaultfd's requests, which the crates have no call for.

use super::PAGE_BYTES;
use martlet_ram::GuestRam;
use martlet_units::PAGE_SIZE;
use rustix::mm::{Advice, UserfaultfdFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// What a touch of the page finds (linux/userfaultfd.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// No page, or poison.
    Missing,
    /// A page that is in the file and can't be had yet.
    Minor,
}

/// A page of the first region that was taken from this process's mapping; as ever after the drop.
pub(super) struct Userfault {
    fd: OwnedFd,
    at: u64,
}

impl Userfault {
    pub(super) fn take_away(ram: &GuestRam, page: u64, way: Way) -> io::Result<Userfault> {
        const API: u64 = 0xc018_aa3f;
        const REGISTER: u64 = 0xc020_aa00;
        const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
        const FEATURE_POISON: u64 = 1 << 14;
        const MODE_MISSING: u64 = 1;
        const MODE_MINOR: u64 = 1 << 2;
        let (feature, mode) = match way {
            Way::Missing => (FEATURE_POISON, MODE_MISSING),
            Way::Minor => (FEATURE_MINOR_SHMEM, MODE_MINOR),
        };
        // SAFETY: nothing is registered yet.
        let fd = unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) }?;
        let host = ram.regions()[0].host_ptr(page);
        let taken = Userfault { fd, at: host.expose_provenance() as u64 };
        taken.call(API, &mut [0xaa, feature, 0])?;
        taken.call(REGISTER, &mut [taken.at, PAGE_SIZE, mode, 0])?;
        // SAFETY: guest memory is reached by raw pointers only; its content is the file's.
        unsafe { rustix::mm::madvise(host.cast(), PAGE_BYTES, Advice::LinuxDontNeed) }?;
        Ok(taken)
    }

    pub(super) fn poison(&self) -> io::Result<()> {
        const POISON: u64 = 0xc020_aa08;
        self.call(POISON, &mut [self.at, PAGE_SIZE, 0, 0])
    }

    /// Whoever waits for the page of the file has it.
    pub(super) fn give_back(&self) -> io::Result<()> {
        const CONTINUE: u64 = 0xc020_aa07;
        self.call(CONTINUE, &mut [self.at, PAGE_SIZE, 0, 0])
    }

    fn call(&self, request: u64, argument: &mut [u64]) -> io::Result<()> {
        // SAFETY: the requests' structures have as many words as are given.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, argument.as_mut_ptr()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
