//! Waking a thread that waits in `poll`.

use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A level that threads raise and one thread lowers; readable while it is up.
#[derive(Debug)]
pub struct Wake {
    fd: OwnedFd,
}

impl Wake {
    /// Makes one that is down.
    pub fn new() -> io::Result<Wake> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Wake { fd: rustix::event::eventfd(0, flags)? })
    }

    /// Raises it. Never blocks; raising it twice is raising it once.
    pub fn raise(&self) {
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Lowers it.
    pub fn lower(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
