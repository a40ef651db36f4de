//! Listening for connections.

use crate::stream::wait_any;
use crate::{Address, Stream, Wake};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

/// A bound socket that accepts connections. A Unix socket's file goes with it.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener, Address),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds `address`. A Unix socket file that nobody listens on any more is replaced; one in
    /// use is an error.
    pub fn bind(address: &Address) -> io::Result<Listener> {
        let kind = match address {
            Address::Tcp { host, port } | Address::Rdma { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port))?;
                listener.set_nonblocking(true)?;
                Kind::Tcp(listener, address.clone())
            }
            Address::Unix(path) => {
                if is_stale_socket(path) {
                    std::fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                listener.set_nonblocking(true)?;
                Kind::Unix(listener, path.clone())
            }
        };
        Ok(Listener { kind })
    }

    /// Where it listens; a TCP port of 0 has become the chosen one.
    pub fn address(&self) -> io::Result<Address> {
        Ok(match &self.kind {
            Kind::Tcp(listener, bound) => bound.with_port(listener.local_addr()?.port()),
            Kind::Unix(_, path) => Address::Unix(path.clone()),
        })
    }

    /// The next connection; `None` if `wake` is raised or `limit` passes first.
    pub fn accept(&self, wake: &Wake, limit: Duration) -> io::Result<Option<Stream>> {
        let accepted = match &self.kind {
            Kind::Tcp(listener, _) => {
                let mut fds =
                    [PollFd::new(listener, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
                wait_any(&mut fds, limit)?;
                listener.accept().and_then(|(stream, _)| Stream::from_tcp(stream))
            }
            Kind::Unix(listener, _) => {
                let mut fds =
                    [PollFd::new(listener, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
                wait_any(&mut fds, limit)?;
                listener.accept().and_then(|(stream, _)| Stream::from_unix(stream))
            }
        };
        match accepted {
            Ok(stream) => Ok(Some(stream)),
            Err(error) => match error.kind() {
                // The peer was gone again before it was accepted: nothing happened.
                io::ErrorKind::WouldBlock
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::NotConnected
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// Whether `path` is a socket that refuses connections, as a dead process leaves it.
fn is_stale_socket(path: &std::path::Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    is_socket
        && UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Kind::Unix(_, path) = &self.kind {
            let _ = std::fs::remove_file(path);
        }
    }
}
