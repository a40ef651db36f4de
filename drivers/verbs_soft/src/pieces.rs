//! Lists of memory pieces that a socket call fills or sends.
#![allow(unsafe_code)]
// UNSAFETY: the pieces are registered memory that the guest writes meanwhile, so they reach the
// kernel as raw pointers and are never Rust references.

use crate::regions::Table;
use martlet_raw_memory::MemoryFault;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most pieces of one call (`UIO_MAXIOV` of the kernel's uapi/linux/uio.h).
const PIECES_MAX: usize = 1024;

/// Pieces of memory in order, and how far they are done.
pub(super) struct Pieces {
    list: Vec<libc::iovec>,
    next: usize,
}

// SAFETY: the pointers are only followed in `send`, `receive` and `fill`, whose callers prove by
// the table that the memory is there.
unsafe impl Send for Pieces {}

impl Pieces {
    pub(super) fn with_capacity(pieces: usize) -> Pieces {
        Pieces { list: Vec::with_capacity(pieces), next: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.next = 0;
    }

    /// Adds a piece, joined with the last one if it follows that in memory.
    pub(super) fn push(&mut self, at: *mut u8, bytes: usize) {
        if bytes == 0 {
            return;
        }
        if let Some(last) = self.list.last_mut()
            && last.iov_base.addr() + last.iov_len == at.addr()
        {
            last.iov_len += bytes;
            return;
        }
        self.list.push(libc::iovec { iov_base: at.cast(), iov_len: bytes });
    }

    pub(super) fn is_done(&self) -> bool {
        self.next == self.list.len()
    }

    fn advance(&mut self, mut bytes: usize) -> usize {
        while bytes > 0 {
            let Some(piece) = self.list.get_mut(self.next) else { break };
            let part = bytes.min(piece.iov_len);
            piece.iov_len -= part;
            piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(part).cast();
            bytes -= part;
            self.next += usize::from(piece.iov_len == 0);
        }
        bytes
    }

    /// Sends what the socket takes now. `head` goes before the pieces, from byte `head_sent`,
    /// which is moved on. `WouldBlock` if nothing is taken.
    ///
    /// # Safety
    /// The pieces were resolved in the generation of `_held`.
    pub(super) unsafe fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        head: &[u8],
        head_sent: &mut usize,
        _held: &Table,
    ) -> io::Result<()> {
        let rest = head.get(*head_sent..).unwrap_or_default();
        let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
        list[0].iov_base = rest.as_ptr().cast_mut().cast();
        list[0].iov_len = rest.len();
        let count = self.fill_list(&mut list[1..]) + 1;
        let message = message(&mut list[..count]);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `head` is borrowed; the pieces are registered as long as the table is held. The
        // kernel only reads them.
        let sent = check(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })?;
        let of_head = sent.min(rest.len());
        *head_sent += of_head;
        self.advance(sent - of_head);
        Ok(())
    }

    /// Fills the pieces with what the socket has now, and `behind` with what follows them; tells
    /// how many bytes of `behind` are filled. `WouldBlock` if there is nothing, `UnexpectedEof` at
    /// the stream's end.
    ///
    /// # Safety
    /// The pieces were resolved for writing in the generation of `_held`.
    pub(super) unsafe fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        behind: &mut [u8],
        _held: &Table,
    ) -> io::Result<Received> {
        let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
        let mut count = self.fill_list(&mut list[1..]);
        // If some pieces don't fit into the call, what follows them isn't there yet.
        if count == self.list.len() - self.next {
            count += 1;
            list[count].iov_base = behind.as_mut_ptr().cast();
            list[count].iov_len = behind.len();
        }
        let mut message = message(&mut list[1..=count]);
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: `behind` is borrowed; the pieces are registered for writing as long as the table
        // is held, and nothing in this process relies on their content meanwhile.
        let got = check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let behind = self.advance(got);
        Ok(Received { placed: got - behind, behind })
    }

    /// Copies into the pieces; tells how many bytes of `from` they took.
    ///
    /// # Errors
    /// If the host lost the memory. Some of it may be written.
    ///
    /// # Safety
    /// The pieces were resolved for writing in the generation of `_held`.
    pub(super) unsafe fn fill(&mut self, from: &[u8], _held: &Table) -> Result<usize, MemoryFault> {
        let mut rest = from;
        while let Some(piece) = self.list.get(self.next)
            && !rest.is_empty()
        {
            let bytes = rest.len().min(piece.iov_len);
            // SAFETY: the piece is registered for writing as long as the table is held.
            unsafe { martlet_raw_memory::write(piece.iov_base.cast(), &rest[..bytes]) }?;
            rest = &rest[bytes..];
            self.advance(bytes);
        }
        Ok(from.len() - rest.len())
    }

    /// Leaves one place free at the end of `list`.
    fn fill_list(&self, list: &mut [libc::iovec]) -> usize {
        let pending = &self.list[self.next..];
        let count = pending.len().min(list.len() - 1);
        list[..count].copy_from_slice(&pending[..count]);
        count
    }
}

/// Where received bytes went.
pub(super) struct Received {
    pub(super) placed: usize,
    pub(super) behind: usize,
}

fn message(list: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain old data for which all zero bytes are a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len();
    message
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
