//! From a socket into a file inside the kernel.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::io;
use std::os::fd::BorrowedFd;

/// Size asked of the pipe, as much as an unprivileged process gets (`/proc/sys/fs/pipe-max-size`).
const PIPE_BYTES: usize = 1 << 20;

/// A pipe that bytes of a socket pass on their way into a file, by splice(2): the kernel copies
/// them once, from the socket's buffers into the file's pages.
#[derive(Debug)]
pub(crate) struct Funnel {
    read: OwnedFd,
    write: OwnedFd,
    capacity: u64,
    /// Bytes in the pipe.
    held: u64,
    /// Where the next byte out of the pipe goes.
    offset: u64,
    /// Bytes that are still to be taken from the socket.
    left: u64,
}

/// Which end failed.
#[derive(Debug)]
pub(crate) enum FunnelError {
    Socket(io::Error),
    /// The file takes no byte here: memory that can't be had.
    File {
        offset: u64,
    },
}

impl Funnel {
    pub(crate) fn new() -> io::Result<Funnel> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // A host with many pipes gives less; then the pieces are smaller.
        let _ = rustix::pipe::fcntl_setpipe_size(&write, PIPE_BYTES);
        let capacity = rustix::pipe::fcntl_getpipe_size(&write)? as u64;
        Ok(Funnel { read, write, capacity, held: 0, offset: 0, left: 0 })
    }

    /// Begins a run. Only when the one before is done.
    pub(crate) fn begin(&mut self, offset: u64, bytes: u64) {
        assert!(self.is_done(), "a run begins before the last one ended");
        self.offset = offset;
        self.left = bytes;
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.held == 0
    }

    /// Moves on what the socket has now; how many bytes were taken from it. `WouldBlock` if it
    /// has none, `UnexpectedEof` at its end, unless it is the file that fails.
    pub(crate) fn advance(
        &mut self,
        socket: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
    ) -> Result<usize, FunnelError> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let mut taken = 0;
        if self.held == 0 {
            let piece = usize::try_from(self.left.min(self.capacity)).unwrap_or(PIPE_BYTES);
            taken = rustix::pipe::splice(socket, None, &self.write, None, piece, flags)
                .map_err(|errno| FunnelError::Socket(errno.into()))?;
            if taken == 0 {
                return Err(FunnelError::Socket(io::ErrorKind::UnexpectedEof.into()));
            }
            self.left -= taken as u64;
            self.held = taken as u64;
        }
        while self.held > 0 {
            let mut offset = self.offset;
            let piece = usize::try_from(self.held).unwrap_or(PIPE_BYTES);
            match rustix::pipe::splice(&self.read, None, file, Some(&mut offset), piece, flags) {
                Ok(moved @ 1..) => {
                    self.offset = offset;
                    self.held -= moved as u64;
                }
                Err(Errno::INTR) => {}
                Ok(0) | Err(_) => return Err(FunnelError::File { offset: self.offset }),
            }
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_file_that_takes_nothing_is_told_from_a_socket_that_gives_nothing() {
        let file = rustix::fs::memfd_create("f", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let mut funnel = Funnel::new().unwrap();
        funnel.begin(4096, 4096);
        let mut advance = || funnel.advance(far.as_fd(), file.as_fd());
        assert!(matches!(advance(), Err(FunnelError::Socket(_))));
        near.write_all(&[1; 1000]).unwrap();
        assert!(matches!(advance(), Ok(1000)));
        rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
        near.write_all(&[1; 1000]).unwrap();
        assert!(matches!(advance(), Err(FunnelError::File { offset: 5096 })));
    }
}
