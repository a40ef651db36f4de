//! Who is let in: one thread reads the greetings of all connections, sends each where it belongs,
//! and answers the queries. It never waits for one of them.

use super::events::Event;
use super::places::{Connection, Places, Speaking, host_of};
use super::serving;
use super::shared::Shared;
use crate::host;
use crate::mailbox::Mailbox;
use martlet_protocol::limits::SETUP_WAIT_MAX;
use martlet_transport::{
    ControlLink, GREETING_MAX, Greeting, GreetingError, Listener, Stream, chain, monotonic_now,
    reply, wait_any,
};
use martlet_units::Instant;
use martlet_wire::control::{Abandon, Control, Setup};
use martlet_wire::frame::{Kind, Reader};
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tracing::{debug, warn};

/// Connections that are accepted before those that are there are looked at again.
const ACCEPTS_AT_ONCE: usize = 32;

/// How long a second source waits for the first one's attempt to end before it is turned away: one
/// that tries again at once may come before the attempt that it gave up has ended here.
const BUSY_GRACE: Duration = Duration::from_secs(1);

/// The listener looks this often whether it should end.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// After a failed accept, so that a host out of file descriptors is not kept busy by it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a query may take to be asked.
const QUERY_MAX: Duration = Duration::from_secs(10);

/// The listener's thread: ends when the receiver is stopped.
pub(super) fn run(listener: &Listener, shared: &Arc<Shared>) {
    let mut reception = Reception {
        listener,
        shared,
        connections: Places::default(),
        accept_at: None,
        spare: spare(),
        is_short: false,
    };
    while !shared.is_closed() {
        if let Err(panic) = host::guarded(|| reception.step()) {
            warn!(%panic, "while serving connections; all of them are dropped");
            reception.connections = Places::default();
        }
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

struct Reception<'a> {
    listener: &'a Listener,
    shared: &'a Arc<Shared>,
    connections: Places,
    /// No connection is accepted before.
    accept_at: Option<Instant>,
    /// Open only to be closed when the host gives no other descriptor.
    spare: Option<File>,
    /// The host gave none at the last look.
    is_short: bool,
}

impl Reception<'_> {
    fn step(&mut self) {
        let mut ready = self.wait().into_iter();
        // Before the looks: what changes from here on is seen by the next one.
        self.shared.wake.lower();
        for connection in self.connections.take(|_| ready.next().unwrap_or(false)) {
            self.advance(connection);
        }
        let now = monotonic_now();
        let queues = |speaking: &Speaking| matches!(speaking, Speaking::Queueing(..));
        for connection in self.connections.take(|it| it.deadline <= now || queues(&it.speaking)) {
            match connection.speaking {
                Speaking::Queueing(version, stream) => {
                    self.queue(version, stream, connection.from, connection.deadline);
                }
                Speaking::Introducing(link) => {
                    self.turn_away(link, &format!("no setup came within {SETUP_WAIT_MAX:?}"));
                }
                Speaking::Greeting(..) | Speaking::Asking(_) => {}
            }
        }
        self.accept(now);
    }

    /// Waits for something to do; which connections have something to read.
    fn wait(&mut self) -> Vec<bool> {
        let now = monotonic_now();
        self.accept_at = self.accept_at.filter(|at| *at > now);
        let moments = self.connections.iter().map(|connection| connection.deadline);
        let next = moments.chain(self.accept_at).min();
        let limit = next.map_or(LOOK_INTERVAL, |at| at.since(now).min(LOOK_INTERVAL));
        let accepts = if self.accept_at.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![
            PollFd::new(&self.shared.wake, PollFlags::IN),
            PollFd::new(self.listener, accepts),
        ];
        let polled = self.connections.iter();
        fds.extend(polled.map(|waiting| PollFd::new(waiting.stream(), waiting.wanted())));
        if let Err(error) = wait_any(&mut fds, limit) {
            warn!(%error, "cannot wait for connections");
            std::thread::sleep(ACCEPT_PAUSE);
            return Vec::new();
        }
        fds[2..].iter().map(|fd| !fd.revents().is_empty()).collect()
    }

    fn accept(&mut self, now: Instant) {
        if self.accept_at.is_some() {
            return;
        }
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.listener.try_accept() {
                Ok(Some(stream)) => {
                    self.is_short = false;
                    let from = stream.peer().map(|peer| host_of(peer.ip()));
                    let speaking = Speaking::Greeting(Greeting::default(), stream);
                    let deadline = now.after(GREETING_MAX);
                    self.connections.keep(Connection { speaking, deadline, from });
                }
                Ok(None) => return,
                Err(_) if self.connections.turn_away_a_silent_one() => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.is_short, true) {
                        warn!(%error, "cannot accept connections: refused until that passes");
                    }
                    self.refuse_one();
                    self.accept_at = Some(now.after(ACCEPT_PAUSE));
                    return;
                }
            }
        }
    }

    /// With the descriptor that is kept for it, so that a peer learns at once why nobody greets it.
    fn refuse_one(&mut self) {
        drop(self.spare.take());
        if let Ok(Some(stream)) = self.listener.try_accept() {
            // What it said already: an end with unread bytes may take the answer along.
            let _ = Greeting::default().advance(&stream);
            drop(reply(&stream, &HelloReply::refuse(Status::LIMIT)));
        }
        self.spare = spare();
    }

    /// Reads on a connection and, once it has said enough, sends it where it belongs.
    fn advance(&mut self, connection: Connection) {
        let Connection { speaking, deadline, from } = connection;
        let speaking = match speaking {
            Speaking::Greeting(mut greeting, stream) => match greeting.advance(&stream) {
                Ok(Some(hello)) => return self.dispatch(&hello, stream, from),
                Ok(None) => Speaking::Greeting(greeting, stream),
                Err(GreetingError::Io(error)) => {
                    return debug!(%error, "a connection said nothing");
                }
                Err(error) => return debug!(%error, "a connection was turned away"),
            },
            // It has hung up.
            Speaking::Queueing(..) => return,
            Speaking::Introducing(mut link) => {
                match link.try_receive_if(|kind| kind == Kind::SETUP) {
                    Ok(Some(Control::Setup(setup))) => return self.begin(link, setup),
                    Ok(_) => Speaking::Introducing(link),
                    Err(error) => return self.turn_away(link, &chain(&error)),
                }
            }
            Speaking::Asking(mut link) => match link.try_receive() {
                Ok(Some(Control::Query(query))) => {
                    link.queue(&Control::Answer(self.shared.answer(query.migration)));
                    return drop(link.flush());
                }
                Ok(None) => Speaking::Asking(link),
                Ok(Some(_)) => return,
                Err(error) => return debug!(error = chain(&error), "a query was turned away"),
            },
        };
        self.connections.keep(Connection { speaking, deadline, from });
    }

    fn dispatch(&mut self, hello: &Hello, stream: Stream, from: Option<IpAddr>) {
        let refuse = |status| drop(reply(&stream, &HelloReply::refuse(status)));
        let version = match hello.negotiate() {
            Ok(version) => version,
            Err(error) => {
                debug!(%error, "a connection was turned away");
                return refuse(Status::VERSION);
            }
        };
        match hello.role {
            Role::CONTROL => {
                self.queue(version, stream, from, monotonic_now().after(BUSY_GRACE));
            }
            Role::DATA => self.shared.admit_channel(hello, version, stream),
            Role::RDMA if self.shared.takes_rdma => {
                self.shared.admit_channel(hello, version, stream);
            }
            Role::RDMA => refuse(Status::NO_RDMA),
            Role::QUERY => {
                if reply(&stream, &HelloReply::accept(version)).is_ok() {
                    let speaking = Speaking::Asking(ControlLink::new(stream, Reader::Answerer));
                    let deadline = monotonic_now().after(QUERY_MAX);
                    self.connections.keep(Connection { speaking, deadline, from });
                }
            }
            _ => refuse(Status::ROLE),
        }
    }

    /// Lets a source in as soon as no other is served, if that is before the deadline.
    fn queue(&mut self, version: u16, stream: Stream, from: Option<IpAddr>, deadline: Instant) {
        match self.shared.refusal() {
            None => {
                if let Err(error) = reply(&stream, &HelloReply::accept(version)) {
                    return self.shared.note_failure(format!("the source hung up: {error}"));
                }
                let speaking = Speaking::Introducing(ControlLink::new(stream, Reader::Destination));
                let deadline = monotonic_now().after(SETUP_WAIT_MAX);
                self.connections.keep(Connection { speaking, deadline, from });
            }
            Some(Status::BUSY) if monotonic_now() < deadline => {
                let speaking = Speaking::Queueing(version, stream);
                self.connections.keep(Connection { speaking, deadline, from });
            }
            Some(status) => drop(reply(&stream, &HelloReply::refuse(status))),
        }
    }

    /// A source has said what it brings: from now on it has the place, unless another was faster.
    fn begin(&self, mut link: ControlLink, setup: Setup) {
        let events: Arc<Mailbox<Event>> = match Mailbox::new() {
            Ok(events) => Arc::new(events),
            Err(error) => return self.turn_away(link, &format!("the host is short: {error}")),
        };
        let ledger = match self.shared.begin_attempt(setup.migration, &events) {
            Ok(ledger) => ledger,
            Err(status) => {
                link.queue(&Control::Abandon(Abandon::because(status.to_string())));
                return drop(link.flush());
            }
        };
        let (shared, kept) = (Arc::clone(self.shared), ledger.clone());
        let begun = host::spawn("martlet-attempt", move || {
            serving::run(link, setup, ledger, &shared, events);
        });
        if let Err(error) = begun {
            warn!(%error, "cannot begin an attempt");
            self.shared.end_attempt(kept, Some(format!("cannot start a thread: {error}")));
        }
    }

    /// A source came to nothing; it is told why, as far as it listens.
    fn turn_away(&self, mut link: ControlLink, reason: &str) {
        link.queue(&Control::Abandon(Abandon::because(reason)));
        drop(link.flush());
        self.shared.note_failure(reason.to_owned());
    }
}
