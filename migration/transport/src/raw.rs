//! Socket reads and writes on raw memory.
#![allow(unsafe_code)]
// UNSAFETY: guest memory must reach the kernel without ever being a Rust reference, since vCPUs
// write it at the same time; the safe wrappers of the socket calls all want slices.

use martlet_ram::RawSlice;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most parts of one call (`UIO_MAXIOV` of the kernel's uapi/linux/uio.h).
pub(crate) const PARTS_MAX: usize = 1024;

/// A list of memory pieces to send or to fill, and how far that has come.
///
/// The pieces' owner keeps them valid while the list is in use: guest memory lives as long as
/// the `GuestRam`, headers as long as the channel that holds both.
#[derive(Debug)]
pub(crate) struct Parts {
    parts: Vec<libc::iovec>,
    /// First part that is not finished.
    next: usize,
}

// SAFETY: the pointers are moved with the channel that owns or borrows what they point to.
unsafe impl Send for Parts {}

impl Parts {
    pub(crate) fn with_capacity(parts: usize) -> Parts {
        Parts { parts: Vec::with_capacity(parts), next: 0 }
    }

    pub(crate) fn clear(&mut self) {
        self.parts.clear();
        self.next = 0;
    }

    /// Adds a piece; empty ones are left out.
    pub(crate) fn push(&mut self, piece: &RawSlice<'_>) {
        if !piece.is_empty() {
            self.parts.push(piece.to_iovec());
        }
    }

    /// Adds bytes that are only sent. They must not move or change until they are gone.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let base = bytes.as_ptr().cast_mut().cast();
            self.parts.push(libc::iovec { iov_base: base, iov_len: bytes.len() });
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.next == self.parts.len()
    }

    fn pending(&mut self) -> &mut [libc::iovec] {
        let end = self.parts.len().min(self.next + PARTS_MAX);
        &mut self.parts[self.next..end]
    }

    fn advance(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let part = &mut self.parts[self.next];
            if bytes < part.iov_len {
                part.iov_len -= bytes;
                part.iov_base = part.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                return;
            }
            bytes -= part.iov_len;
            self.next += 1;
        }
    }
}

fn message(parts: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain old data for which all zero bytes are a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    message
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sends as much as the socket takes now; `WouldBlock` if that is nothing.
pub(crate) fn send(fd: BorrowedFd<'_>, parts: &mut Parts) -> io::Result<usize> {
    let message = message(parts.pending());
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the pieces are valid for reads as `Parts` requires; the kernel only reads them.
    let sent = check(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })?;
    parts.advance(sent);
    Ok(sent)
}

/// Fills as much as the socket has now; `WouldBlock` if that is nothing, `UnexpectedEof` at the
/// stream's end.
pub(crate) fn receive(fd: BorrowedFd<'_>, parts: &mut Parts) -> io::Result<usize> {
    let mut message = message(parts.pending());
    // SAFETY: the pieces are valid for writes as `Parts` requires, and nothing else in this
    // process relies on their content meanwhile.
    let got =
        check(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })?;
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    parts.advance(got);
    Ok(got)
}
