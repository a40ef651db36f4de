//! Socket reads and writes on raw memory.
#![allow(unsafe_code)]
// UNSAFETY: guest memory must reach the kernel without ever being a Rust reference, since vCPUs
// write it at the same time; the safe wrappers of the socket calls all want slices.

use martlet_ram::RawSlice;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most pieces of one call (`UIO_MAXIOV` of the kernel's uapi/linux/uio.h).
const PIECES_MAX: usize = 1024;

/// Room for the pieces of a call, kept so that no call allocates. Between calls it is empty.
#[derive(Debug)]
pub(crate) struct Room(Vec<libc::iovec>);

// SAFETY: addresses are only in it while a list of pieces borrows it, and not followed otherwise.
unsafe impl Send for Room {}

impl Room {
    pub(crate) fn with_capacity(pieces: usize) -> Room {
        Room(Vec::with_capacity(pieces))
    }

    /// Begins a list of memory to send.
    pub(crate) fn outgoing(&mut self) -> Outgoing<'_> {
        self.0.clear();
        Outgoing { list: &mut self.0, next: 0, _memory: PhantomData }
    }

    /// Begins a list of memory to fill.
    pub(crate) fn incoming(&mut self) -> Incoming<'_> {
        self.0.clear();
        Incoming { list: &mut self.0, _memory: PhantomData }
    }
}

fn push<'a>(list: &mut Vec<libc::iovec>, piece: &RawSlice<'a>) {
    if !piece.is_empty() {
        list.push(piece.to_iovec());
    }
}

/// Memory to send, and how far that has come. Borrows all of its pieces: none can go away, and no
/// header can change, while they are sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    list: &'a mut Vec<libc::iovec>,
    /// First piece that is not finished.
    next: usize,
    _memory: PhantomData<&'a [u8]>,
}

impl<'a> Outgoing<'a> {
    /// Adds guest memory.
    pub(crate) fn push(&mut self, piece: &RawSlice<'a>) {
        push(self.list, piece);
    }

    /// Adds bytes of this process.
    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) {
        if !bytes.is_empty() {
            let base = bytes.as_ptr().cast_mut().cast();
            self.list.push(libc::iovec { iov_base: base, iov_len: bytes.len() });
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.next == self.list.len()
    }

    /// Leaves out the first bytes, which went before. At most as many as there are.
    pub(crate) fn skip(&mut self, bytes: usize) {
        self.advance(bytes);
    }

    /// Sends as much as the socket takes now; `WouldBlock` if that is nothing.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let end = self.list.len().min(self.next + PIECES_MAX);
        let message = message(&mut self.list[self.next..end]);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the pieces are borrowed for longer than the call; the kernel only reads them.
        let sent = check(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })?;
        self.advance(sent);
        Ok(sent)
    }

    /// As sending, into memory of this process: as much as there is room for.
    ///
    /// # Errors
    /// `EFAULT`, as the kernel says it, if a page can't be read.
    pub fn copy_to(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while let Some(piece) = self.list.get(self.next).filter(|_| filled < buffer.len()) {
            let bytes = piece.iov_len.min(buffer.len() - filled);
            let into = &mut buffer[filled..filled + bytes];
            // SAFETY: within the piece, which is borrowed for longer than the call.
            unsafe { martlet_raw_memory::read(piece.iov_base.cast_const().cast(), into) }
                .map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))?;
            self.advance(bytes);
            filled += bytes;
        }
        Ok(filled)
    }

    fn advance(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let piece = &mut self.list[self.next];
            if bytes < piece.iov_len {
                piece.iov_len -= bytes;
                piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                return;
            }
            bytes -= piece.iov_len;
            self.next += 1;
        }
    }
}

/// Guest memory to fill by one call.
#[derive(Debug)]
pub struct Incoming<'a> {
    list: &'a mut Vec<libc::iovec>,
    _memory: PhantomData<RawSlice<'a>>,
}

impl<'a> Incoming<'a> {
    /// Adds guest memory.
    pub(crate) fn push(&mut self, piece: &RawSlice<'a>) {
        push(self.list, piece);
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Fills as much as there are bytes of this process; how many were used.
    ///
    /// # Errors
    /// `EFAULT`, as the kernel says it, if a page can't be written.
    pub fn copy_from(self, bytes: &[u8]) -> io::Result<usize> {
        let mut used = 0;
        for piece in self.list.iter() {
            let from = &bytes[used..bytes.len().min(used + piece.iov_len)];
            // SAFETY: within the piece, which is guest memory borrowed for longer than the call.
            unsafe { martlet_raw_memory::write(piece.iov_base.cast(), from) }
                .map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))?;
            used += from.len();
        }
        Ok(used)
    }

    /// Fills as much as the socket has now, and says how much that was; `WouldBlock` if it has
    /// nothing, `UnexpectedEof` at the stream's end.
    pub(crate) fn receive(self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let end = self.list.len().min(PIECES_MAX);
        let mut message = message(&mut self.list[..end]);
        // SAFETY: the pieces are guest memory, borrowed for longer than the call, and nothing in
        // this process relies on their content meanwhile.
        let got =
            check(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })?;
        if got == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(got) }
    }
}

/// Bytes that the kernel took and the peer's kernel has not (`SIOCOUTQ` of the kernel's
/// uapi/linux/sockios.h; for Unix sockets what the peer has not read).
pub(crate) fn unacknowledged(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one int through the pointer, which is valid for that.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    check(result as isize)?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain old data for which all zero bytes are a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    message
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
