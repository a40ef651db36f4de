//! Who is let in: one thread reads the greetings of all connections, sends each where it belongs,
//! and answers the queries. It never waits for one of them.

use super::attempt;
use super::events::Event;
use super::shared::Shared;
use crate::host;
use crate::mailbox::Mailbox;
use martlet_transport::{
    ControlLink, GREETING_MAX, Greeting, GreetingError, Listener, Stream, chain, monotonic_now,
    reply, wait_any,
};
use martlet_units::Instant;
use martlet_wire::control::Control;
use martlet_wire::frame::Reader;
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tracing::{debug, warn};

/// Connections that greet or ask at the same time. One more takes the place of the oldest: who
/// greets at once is served, however many stay silent.
const CONNECTIONS_MAX: usize = 256;

/// Connections that are accepted before those that are there are looked at again.
const ACCEPTS_AT_ONCE: usize = 32;

/// Sources that wait at the same time for an attempt to end.
const SOURCES_MAX: usize = 8;

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
        connections: Vec::new(),
        sources: Arc::new(AtomicUsize::new(0)),
        accept_at: None,
        spare: spare(),
        is_short: false,
    };
    while !shared.is_stopping() {
        if let Err(panic) = host::guarded(|| reception.step()) {
            warn!(%panic, "while serving connections; all of them are dropped");
            reception.connections.clear();
        }
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// A connection that belongs nowhere yet.
struct Connection {
    speaking: Speaking,
    /// It is closed then.
    deadline: Instant,
}

enum Speaking {
    /// Its hello is being read.
    Greeting(Greeting, Stream),
    /// Its query is.
    Asking(ControlLink),
}

impl Connection {
    fn stream(&self) -> &Stream {
        match &self.speaking {
            Speaking::Greeting(_, stream) => stream,
            Speaking::Asking(link) => link.stream(),
        }
    }
}

struct Reception<'a> {
    listener: &'a Listener,
    shared: &'a Arc<Shared>,
    /// From the oldest to the newest.
    connections: Vec<Connection>,
    /// Threads that begin an attempt or wait to.
    sources: Arc<AtomicUsize>,
    /// No connection is accepted before.
    accept_at: Option<Instant>,
    /// Open only to be closed when the host gives no other descriptor.
    spare: Option<File>,
    /// The host gave none at the last look.
    is_short: bool,
}

impl Reception<'_> {
    fn step(&mut self) {
        let ready = self.wait();
        let now = monotonic_now();
        let mut ready = ready.into_iter();
        for connection in std::mem::take(&mut self.connections) {
            let is_ready = ready.next().unwrap_or(false);
            if is_ready {
                self.advance(connection);
            } else if now < connection.deadline {
                self.connections.push(connection);
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
        let streams = self.connections.iter().map(Connection::stream);
        fds.extend(streams.map(|stream| PollFd::new(stream, PollFlags::IN)));
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
                    if self.connections.len() == CONNECTIONS_MAX {
                        let oldest = self.connections.remove(0);
                        let full = HelloReply::refuse(Status::LIMIT);
                        if let Speaking::Greeting(_, stream) = &oldest.speaking {
                            drop(reply(stream, &full));
                        }
                    }
                    let speaking = Speaking::Greeting(Greeting::default(), stream);
                    let deadline = now.after(GREETING_MAX);
                    self.connections.push(Connection { speaking, deadline });
                }
                Ok(None) => return,
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
        let Connection { speaking, deadline } = connection;
        match speaking {
            Speaking::Greeting(mut greeting, stream) => match greeting.advance(&stream) {
                Ok(Some(hello)) => self.dispatch(&hello, stream),
                Ok(None) => {
                    let speaking = Speaking::Greeting(greeting, stream);
                    self.connections.push(Connection { speaking, deadline });
                }
                Err(GreetingError::Io(error)) => debug!(%error, "a connection said nothing"),
                Err(error) => debug!(%error, "a connection was turned away"),
            },
            Speaking::Asking(mut link) => match link.try_receive() {
                Ok(Some(Control::Query(query))) => {
                    link.queue(&Control::Answer(self.shared.answer(query.migration)));
                    drop(link.flush());
                }
                Ok(None) => {
                    let speaking = Speaking::Asking(link);
                    self.connections.push(Connection { speaking, deadline });
                }
                Ok(Some(_)) => {}
                Err(error) => debug!(error = chain(&error), "a query was turned away"),
            },
        }
    }

    fn dispatch(&mut self, hello: &Hello, stream: Stream) {
        let refuse = |status| drop(reply(&stream, &HelloReply::refuse(status)));
        let version = match hello.negotiate() {
            Ok(version) => version,
            Err(error) => {
                debug!(%error, "a connection was turned away");
                return refuse(Status::VERSION);
            }
        };
        match hello.role {
            Role::CONTROL => self.begin(version, stream),
            Role::DATA => self.shared.admit_channel(hello, version, stream),
            Role::RDMA if self.shared.takes_rdma => {
                self.shared.admit_channel(hello, version, stream);
            }
            Role::RDMA => refuse(Status::NO_RDMA),
            Role::QUERY => {
                if reply(&stream, &HelloReply::accept(version)).is_ok() {
                    let speaking = Speaking::Asking(ControlLink::new(stream, Reader::Answerer));
                    let deadline = monotonic_now().after(QUERY_MAX);
                    self.connections.push(Connection { speaking, deadline });
                }
            }
            _ => refuse(Status::ROLE),
        }
    }

    /// Runs an attempt on a thread of its own, where it may have to wait for the one before.
    fn begin(&self, version: u16, stream: Stream) {
        if self.sources.load(Ordering::Relaxed) >= SOURCES_MAX {
            return drop(reply(&stream, &HelloReply::refuse(Status::BUSY)));
        }
        let place = Place::take(&self.sources);
        let shared = Arc::clone(self.shared);
        let begun = host::spawn("martlet-attempt", move || {
            let _place = place;
            begin(version, stream, &shared);
        });
        if let Err(error) = begun {
            warn!(%error, "cannot begin an attempt");
        }
    }
}

/// One of [`SOURCES_MAX`].
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(of: &Arc<AtomicUsize>) -> Place {
        of.fetch_add(1, Ordering::Relaxed);
        Place(Arc::clone(of))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn begin(version: u16, stream: Stream, shared: &Arc<Shared>) {
    let events: Arc<Mailbox<Event>> = match Mailbox::new() {
        Ok(events) => Arc::new(events),
        Err(_) => return drop(reply(&stream, &HelloReply::refuse(Status::LIMIT))),
    };
    let ledger = match shared.begin_attempt(&events) {
        Ok(ledger) => ledger,
        Err(status) => return drop(reply(&stream, &HelloReply::refuse(status))),
    };
    if let Err(error) = reply(&stream, &HelloReply::accept(version)) {
        return shared.end_attempt(None, Err(format!("the source hung up: {error}")));
    }
    attempt::run(ControlLink::new(stream, Reader::Destination), ledger, shared, &events);
}
