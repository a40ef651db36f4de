//! One connection, TCP or Unix, never blocking without a bound.

use crate::raw::{Incoming, Outgoing};
use crate::{Connection, Target, Until, raw};
use martlet_units::Instant;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a peer may take no byte, or give none, while one is due.
pub const STALL_MAX: Duration = Duration::from_secs(10);

/// A Unix socket whose listener has too many connections waiting is tried again this soon: it
/// can't be waited for.
const BACKLOG_RETRY: Duration = Duration::from_millis(10);

/// While room to write is awaited, this often is looked whether bytes go at all: a socket counts as
/// writable only once a good part of its buffer is free, which a slow link makes a long time.
const STALL_LOOK: Duration = Duration::from_millis(250);

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
    /// Takes a connection over.
    pub fn from_tcp(stream: TcpStream) -> io::Result<Stream> {
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

    /// Connects, however the other side behaves within `until`.
    pub(crate) fn connect(target: &Target, until: &Until<'_>) -> io::Result<Stream> {
        let family = match target {
            Target::Ip(SocketAddr::V4(_)) => AddressFamily::INET,
            Target::Ip(SocketAddr::V6(_)) => AddressFamily::INET6,
            Target::Unix(_) => AddressFamily::UNIX,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        loop {
            let connected = match target {
                Target::Ip(address) => rustix::net::connect(&fd, address),
                Target::Unix(path) => {
                    rustix::net::connect(&fd, &SocketAddrUnix::new(path.as_path())?)
                }
            };
            match connected {
                Ok(()) | Err(Errno::ISCONN) => break,
                Err(Errno::AGAIN) => until.pause(BACKLOG_RETRY)?,
                Err(Errno::INPROGRESS | Errno::INTR) => {
                    until.wait(fd.as_fd(), PollFlags::OUT)?;
                    sockopt::socket_error(&fd)??;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        match target {
            Target::Ip(_) => Stream::from_tcp(fd.into()),
            Target::Unix(_) => Stream::from_unix(fd.into()),
        }
    }

    /// Ends both directions, from any thread: whoever reads or writes the stream, here or at
    /// the peer, is told at once.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Breaks the connection: by TCP, nothing that this host still holds of what was written goes
    /// out any more. What was written to a Unix socket is its reader's already.
    pub fn abort(&self) {
        if rustix::net::connect_unspec(&self.fd).is_err() {
            self.shutdown();
        }
    }

    /// A second handle of the same connection, for [`Stream::shutdown`] from elsewhere.
    pub fn try_clone(&self) -> io::Result<Stream> {
        Ok(Stream { fd: self.fd.try_clone()? })
    }

    /// The user who runs the peer at a Unix socket, as the kernel knows it; `None` at any other.
    pub fn peer_user(&self) -> Option<rustix::process::Uid> {
        let domain = rustix::net::sockopt::socket_domain(&self.fd).ok()?;
        if domain != rustix::net::AddressFamily::UNIX {
            return None;
        }
        Some(rustix::net::sockopt::socket_peercred(&self.fd).ok()?.uid)
    }

    /// The user who runs the peer of a TCP connection within this host and this thread's network
    /// namespace; `None` if the kernel knows of none. A proxy that anybody can reach is such a peer.
    pub fn peer_user_by_tcp(&self) -> Option<rustix::process::Uid> {
        crate::same_host::user_of(self.peer()?, self.local()?)
    }

    /// The peer's address, if it has one of the network.
    pub fn peer(&self) -> Option<SocketAddr> {
        rustix::net::getpeername(&self.fd).ok()?.and_then(|address| address.try_into().ok())
    }

    /// This side's address, if it has one of the network.
    pub fn local(&self) -> Option<SocketAddr> {
        rustix::net::getsockname(&self.fd).ok()?.try_into().ok()
    }

    /// Waits until there is something to read (or the end), or `limit` passes: `false`.
    pub fn wait_readable(&self, limit: Duration) -> io::Result<bool> {
        wait_any(&mut [PollFd::new(&self.fd, PollFlags::IN)], limit)
    }

    /// Bytes that were written and have not reached the peer's kernel.
    pub fn unacknowledged(&self) -> io::Result<u64> {
        raw::unacknowledged(self.as_fd())
    }

    /// Waits until there is room to write; no longer than [`STALL_MAX`] during which not one byte
    /// goes. A link that is slow is not dead.
    pub(crate) fn wait_writable(&self) -> io::Result<()> {
        self.wait_writable_for(STALL_MAX)
    }

    fn wait_writable_for(&self, stall_max: Duration) -> io::Result<()> {
        let (mut least, mut since) = (self.unacknowledged()?, monotonic_now());
        loop {
            let look = STALL_LOOK.min(stall_max);
            if wait_any(&mut [PollFd::new(&self.fd, PollFlags::OUT)], look)? {
                return Ok(());
            }
            let (left, now) = (self.unacknowledged()?, monotonic_now());
            if left < least {
                (least, since) = (left, now);
            } else if now.since(since) >= stall_max {
                let text = format!("the peer took no data for {stall_max:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }

    /// Writes all of `bytes`, with a bound on every wait.
    pub fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write_now(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_writable()?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads exactly `buffer.len()` bytes within `until`.
    pub(crate) fn read_exact(&self, buffer: &mut [u8], until: &Until<'_>) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read_now(&mut buffer[filled..]) {
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    until.wait(self.as_fd(), PollFlags::IN)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Connection for Stream {
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let (_, got) = rustix::net::recv(&self.fd, buffer, RecvFlags::DONTWAIT)?;
        if got == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(got) }
    }

    fn write_now(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(rustix::net::send(&self.fd, bytes, flags)?)
    }

    fn send(&self, pieces: &mut Outgoing<'_>) -> io::Result<usize> {
        pieces.send(self.as_fd())
    }

    fn receive(&self, pieces: Incoming<'_>) -> io::Result<usize> {
        pieces.receive(self.as_fd())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn full() -> (Stream, UnixStream) {
        let (one, two) = UnixStream::pair().unwrap();
        let stream = Stream::from_unix(one).unwrap();
        while stream.write_now(&[7; 1 << 16]).is_ok() {}
        (stream, two)
    }

    /// At 120 kB/s a buffer of 4 MiB needs half a minute until it counts as writable.
    #[test]
    fn a_peer_that_reads_slowly_is_not_dead() {
        let (stream, mut peer) = full();
        let stall = Duration::from_secs(2);
        let reader = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            // Longer than a stall in all, and to its end.
            while peer.read(&mut buffer).is_ok_and(|got| got > 0) {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let began = monotonic_now();
        stream.wait_writable_for(stall).unwrap();
        assert!(monotonic_now().since(began) > stall, "it took {:?}", monotonic_now().since(began));
        drop(stream);
        reader.join().unwrap();
    }

    #[test]
    fn of_an_aborted_connection_nothing_more_is_sent() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 1 << 16).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let stream = Stream::from_tcp(stream).unwrap();
        let mut written = 0;
        while let Ok(more) = stream.write_now(&[7; 1 << 16]) {
            written += more;
        }
        stream.abort();
        assert!(stream.write_now(&[7]).is_err());
        // It is told by a reset, in front of what it had or behind it.
        let mut got = Vec::new();
        let end = peer.read_to_end(&mut got).map_err(|error| error.kind());
        assert_eq!(end, Err(io::ErrorKind::ConnectionReset));
        assert!(got.len() < written, "{written}");
    }

    #[test]
    fn a_peer_that_reads_nothing_is_given_up() {
        let (stream, peer) = full();
        let error = stream.wait_writable_for(Duration::from_millis(300)).unwrap_err();
        assert!(error.to_string().contains("took no data for 300ms"), "{error}");
        drop(peer);
    }
}
