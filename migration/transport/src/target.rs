//! Where connections go, and how long they may take.

use crate::stream::{monotonic_now, wait_any};
use crate::{Address, Wake};
use martlet_units::Instant;
use rustix::event::{PollFd, PollFlags};
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::Duration;

/// An address whose name was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// TCP.
    Ip(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl Target {
    /// Looks up what an address stands for; never empty. Blocks for as long as the host's resolver
    /// does, and nothing ends that early: call it where waiting harms nobody.
    pub fn resolve(address: &Address) -> io::Result<Vec<Target>> {
        let found: Vec<Target> = match address {
            Address::Unix(path) => vec![Target::Unix(path.clone())],
            Address::Tcp { host, port } | Address::Rdma { host, port } => {
                (host.as_str(), *port).to_socket_addrs()?.map(Target::Ip).collect()
            }
        };
        if found.is_empty() {
            return Err(io::Error::other("the name has no address"));
        }
        Ok(found)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Ip(address) => write!(f, "{address}"),
            Target::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// How long something may be waited for: one deadline over all of it, and a wake that ends it
/// before.
#[derive(Clone, Copy, Debug)]
pub struct Until<'a> {
    deadline: Instant,
    cancel: Option<&'a Wake>,
}

impl<'a> Until<'a> {
    /// From now on, at most `limit`.
    pub fn within(limit: Duration) -> Until<'static> {
        Until { deadline: monotonic_now().after(limit), cancel: None }
    }

    /// The same, but no longer than until `cancel` is raised.
    pub fn or_cancelled(self, cancel: &'a Wake) -> Until<'a> {
        Until { cancel: Some(cancel), ..self }
    }

    /// The same wake with a deadline that is not later than `limit` from now.
    pub(crate) fn at_most(self, limit: Duration) -> Until<'a> {
        Until { deadline: self.deadline.min(monotonic_now().after(limit)), ..self }
    }

    pub(crate) fn left(&self) -> Duration {
        self.deadline.since(monotonic_now())
    }

    /// Waits until `fd` is ready.
    ///
    /// # Errors
    /// `TimedOut` once the deadline has passed; an error that says so once it is cancelled.
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<()> {
        let mut fds = vec![PollFd::from_borrowed_fd(fd, flags)];
        fds.extend(self.cancel.map(|wake| PollFd::new(wake, PollFlags::IN)));
        let is_ready = wait_any(&mut fds, self.left())?;
        self.check_cancel(fds.get(1))?;
        if is_ready { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Waits for `pause`, where there is nothing to wait on.
    pub(crate) fn pause(&self, pause: Duration) -> io::Result<()> {
        let left = self.left();
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut fds: Vec<PollFd<'_>> =
            self.cancel.iter().map(|wake| PollFd::new(*wake, PollFlags::IN)).collect();
        wait_any(&mut fds, left.min(pause))?;
        self.check_cancel(fds.first())
    }

    fn check_cancel(&self, wake: Option<&PollFd<'_>>) -> io::Result<()> {
        if wake.is_some_and(|wake| !wake.revents().is_empty()) {
            return Err(io::Error::other("cancelled"));
        }
        Ok(())
    }
}
