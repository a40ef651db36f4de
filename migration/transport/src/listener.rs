//! Listening for connections.

use crate::{Address, SocketFile, Stream};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};

/// A bound socket that accepts connections.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener, Address),
    Unix(SocketFile),
}

impl Listener {
    /// Binds `address`; a path as [`SocketFile::bind`] does.
    pub fn bind(address: &Address) -> io::Result<Listener> {
        let kind = match address {
            Address::Tcp { host, port } | Address::Rdma { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port))?;
                listener.set_nonblocking(true)?;
                Kind::Tcp(listener, address.clone())
            }
            Address::Unix(path) => {
                let socket = SocketFile::bind(path)?;
                socket.listener().set_nonblocking(true)?;
                Kind::Unix(socket)
            }
        };
        Ok(Listener { kind })
    }

    /// Where it listens; a TCP port of 0 has become the chosen one.
    pub fn address(&self) -> io::Result<Address> {
        Ok(match &self.kind {
            Kind::Tcp(listener, bound) => bound.with_port(listener.local_addr()?.port()),
            Kind::Unix(socket) => Address::Unix(socket.path().to_owned()),
        })
    }

    /// The next connection, if one is there; never waits.
    pub fn try_accept(&self) -> io::Result<Option<Stream>> {
        let accepted = match &self.kind {
            Kind::Tcp(listener, _) => {
                listener.accept().and_then(|(stream, _)| Stream::from_tcp(stream))
            }
            Kind::Unix(socket) => {
                let listener = socket.listener();
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

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.kind {
            Kind::Tcp(listener, _) => listener.as_fd(),
            Kind::Unix(socket) => socket.listener().as_fd(),
        }
    }
}
