//! One connection, TCP or Unix, never blocking without a bound.

use crate::Address;
use martlet_units::Instant;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a peer may take no byte, or give none, while one is due.
pub const STALL_MAX: Duration = Duration::from_secs(10);

/// Bytes that a Unix socket may hold: its default holds less than one huge page. TCP sizes its
/// buffers by itself.
const UNIX_BUFFER_BYTES: usize = 4 << 20;

/// The current moment of `CLOCK_MONOTONIC`, which all processes of a host share.
pub fn monotonic_now() -> Instant {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + nanos)
}

/// A connected stream socket.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
}

impl Stream {
    pub(crate) fn from_tcp(stream: TcpStream) -> io::Result<Stream> {
        // A commit must not wait for an acknowledgement of the bytes before it (RFC 896).
        stream.set_nodelay(true)?;
        Stream::from_fd(stream.into())
    }

    pub(crate) fn from_unix(stream: UnixStream) -> io::Result<Stream> {
        let fd = OwnedFd::from(stream);
        // More than the default needs CAP_NET_ADMIN; without it the kernel's limit applies.
        if rustix::net::sockopt::set_socket_send_buffer_size_force(&fd, UNIX_BUFFER_BYTES).is_err()
        {
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(&fd, UNIX_BUFFER_BYTES);
        }
        Stream::from_fd(fd)
    }

    fn from_fd(fd: OwnedFd) -> io::Result<Stream> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Stream { fd })
    }

    /// Connects within `limit`; a name's addresses are tried in turn.
    pub fn connect(address: &Address, limit: Duration) -> io::Result<Stream> {
        match address {
            Address::Unix(path) => Stream::from_unix(UnixStream::connect(path)?),
            Address::Tcp { host, port } | Address::Rdma { host, port } => {
                let mut last = None;
                for candidate in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&candidate, limit) {
                        Ok(stream) => return Stream::from_tcp(stream),
                        Err(error) => last = Some(error),
                    }
                }
                Err(last.unwrap_or_else(|| io::Error::other("the name has no address")))
            }
        }
    }

    /// Ends both directions, from any thread: whoever reads or writes the stream, here or at
    /// the peer, is told at once.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// A second handle of the same connection, for [`Stream::shutdown`] from elsewhere.
    pub fn try_clone(&self) -> io::Result<Stream> {
        Ok(Stream { fd: self.fd.try_clone()? })
    }

    /// The peer's address, if it has one of the network.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        rustix::net::getpeername(&self.fd).ok()?.and_then(|address| address.try_into().ok())
    }

    /// This side's address, if it has one of the network.
    pub(crate) fn local(&self) -> Option<SocketAddr> {
        rustix::net::getsockname(&self.fd).ok()?.try_into().ok()
    }

    /// Waits until there is something to read (or the end), or `limit` passes: `false`.
    pub fn wait_readable(&self, limit: Duration) -> io::Result<bool> {
        wait_any(&mut [PollFd::new(&self.fd, PollFlags::IN)], limit)
    }

    /// Waits until there is room to write, at most [`STALL_MAX`].
    pub(crate) fn wait_writable(&self) -> io::Result<()> {
        if wait_any(&mut [PollFd::new(&self.fd, PollFlags::OUT)], STALL_MAX)? {
            return Ok(());
        }
        let text = format!("the peer took no data for {} s", STALL_MAX.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    }

    /// Reads what is there now into `buffer`; `WouldBlock` if nothing is, `UnexpectedEof` at the
    /// end.
    pub(crate) fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let (_, got) = rustix::net::recv(&self.fd, buffer, RecvFlags::DONTWAIT)?;
        if got == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(got) }
    }

    /// Writes all of `bytes`, with a bound on every wait.
    pub(crate) fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(rustix::io::Errno::AGAIN) => self.wait_writable()?,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads exactly `buffer.len()` bytes before `deadline`.
    pub(crate) fn read_exact_until(&self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read_now(&mut buffer[filled..]) {
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.since(monotonic_now());
                    if left.is_zero() || !self.wait_readable(left)? {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Polls `fds` for at most `limit`; whether any is ready. Signals do not end the wait early.
pub fn wait_any(fds: &mut [PollFd<'_>], limit: Duration) -> io::Result<bool> {
    let deadline = monotonic_now().after(limit);
    loop {
        let left = deadline.since(monotonic_now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
        match rustix::event::poll(fds, Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
