//! The progress thread of a queue pair: it stands for the device.

use super::{End, LINGER};
use crate::frame::Header;
use crate::queues::{Shared, lower, timespec};
use crate::receiving::{Receiving, Surroundings};
use crate::regions::Regions;
use crate::sending::Sending;
use martlet_verbs::Link;
use martlet_verbs::Status;
use rustix::event::{PollFd, PollFlags};
use rustix::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Engine {
    socket: OwnedFd,
    shared: Arc<Shared>,
    regions: Arc<Regions>,
    sending: Sending,
    receiving: Receiving,
}

/// However the thread ends: nobody waits for it for ever.
struct QuietAtLast<'a>(&'a Shared);

impl Drop for QuietAtLast<'_> {
    fn drop(&mut self) {
        self.0.end(Link::Failed, None);
        self.0.set_quiet();
    }
}

impl Engine {
    pub(super) fn new(socket: OwnedFd, shared: Arc<Shared>, regions: Arc<Regions>) -> Engine {
        let (sending, receiving) = (Sending::new(), Receiving::new());
        Engine { socket, shared, regions, sending, receiving }
    }

    /// Works until the connection's end.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _quiet = QuietAtLast(&shared);
        let end = loop {
            if let Err(end) = self.turn() {
                break end;
            }
        };
        self.finish(&end);
    }

    fn turn(&mut self) -> Result<(), End> {
        let mut around = Surroundings {
            socket: self.socket.as_fd(),
            shared: &self.shared,
            regions: &self.regions,
            sending: &mut self.sending,
        };
        let more = self.receiving.advance(&mut around)?;
        let blocked = self.sending.advance(self.socket.as_fd(), &self.shared, &self.regions)?;
        let mut queues = self.shared.lock();
        if queues.leave {
            return Err(End::Left);
        }
        if queues.is_overrun() {
            return Err(End::Overrun);
        }
        let work = !blocked && self.sending.has_work(&queues);
        if more || work {
            return Ok(());
        }
        queues.sleeping = true;
        drop(queues);
        self.sleep(blocked)
    }

    /// Waits for the peer, the owner, or the time to try again.
    fn sleep(&mut self, blocked: bool) -> Result<(), End> {
        let wanted = if blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut fds =
            [PollFd::new(&self.socket, wanted), PollFd::new(&self.shared.wake, PollFlags::IN)];
        let limit = self.sending.retry_wait().map(timespec);
        match rustix::event::poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Err(End::Lost),
        }
        let woken = !fds[1].revents().is_empty();
        self.shared.lock().sleeping = false;
        if woken {
            lower(&self.shared.wake);
        }
        Ok(())
    }

    /// Completes everything, then tells the peer what it should know.
    fn finish(&mut self, end: &End) {
        let oldest = {
            let queues = self.shared.lock();
            queues.is_waiting().then(|| queues.oldest())
        };
        let (link, cause, word) = match *end {
            End::Left => (Link::Disconnected, None, Some(Header::Bye)),
            End::Bye => (Link::Disconnected, None, None),
            End::Failed { request, status } => (Link::Failed, Some((request, status)), None),
            End::Refuse { request, status } => {
                (Link::Failed, None, Some(Header::Nak { request, status }))
            }
            End::Torn(cause) => (Link::Failed, cause, None),
            // As a device whose peer has stopped to answer.
            End::Lost => (Link::Failed, oldest.map(|first| (first, Status::RETRY_EXCEEDED)), None),
            End::Protocol(what) => {
                tracing::warn!(what, "the soft RDMA peer breaks the protocol");
                (Link::Failed, oldest.map(|first| (first, Status::REMOTE_OPERATION)), None)
            }
            End::Overrun => (Link::Failed, None, None),
        };
        self.shared.end(link, cause);
        self.shared.set_quiet();
        if let Some(word) = word {
            self.say(word);
        }
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// Says the last word, and waits a moment until the peer has taken it: a socket that is
    /// closed while it holds unread bytes takes back what it sent.
    fn say(&mut self, word: Header) {
        self.sending.say_last(word);
        let deadline = Instant::now() + LINGER;
        let mut waste = vec![0; 64 << 10];
        let mut said = false;
        loop {
            if !said {
                let socket = self.socket.as_fd();
                if self.sending.advance(socket, &self.shared, &self.regions).is_err() {
                    return;
                }
                said = self.sending.is_last_said();
                if said {
                    let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return;
            }
            let wanted = if said { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            let mut fds = [PollFd::new(&self.socket, wanted)];
            let _ = rustix::event::poll(&mut fds, Some(&timespec(left)));
            let flags = rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(&self.socket, &mut waste[..], flags) {
                Ok((0, _)) => return,
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}
