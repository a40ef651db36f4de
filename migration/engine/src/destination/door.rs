//! Who is let in: reads the greeting of every connection and sends it where it belongs.

use super::attempt;
use super::events::Event;
use super::shared::Shared;
use crate::host;
use crate::mailbox::Mailbox;
use martlet_transport::{ControlLink, Listener, Stream, monotonic_now, read_hello, reply};
use martlet_wire::control::Control;
use martlet_wire::frame::Reader;
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::{debug, warn};

/// Connections that may be greeting at the same time. A source opens its channels one after the
/// other; more than this at once is a flood, and each is cheap to refuse.
const STRANGERS_MAX: usize = 64;

/// The listener looks this often whether it should end.
const ACCEPT_INTERVAL: Duration = Duration::from_secs(1);

/// After a failed accept, so that a host out of file descriptors is not kept busy by it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a query may take to be asked.
const QUERY_MAX: Duration = Duration::from_secs(10);

/// The listener's thread: ends when the receiver is stopped.
pub(super) fn run(listener: &Listener, shared: &Arc<Shared>) {
    loop {
        match listener.accept(&shared.wake, ACCEPT_INTERVAL) {
            Ok(Some(stream)) => admit(stream, shared),
            Ok(None) => {}
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
        if shared.is_stopping() {
            return;
        }
    }
}

/// Greets on a thread of its own: a peer that stays silent holds up nobody else.
fn admit(stream: Stream, shared: &Arc<Shared>) {
    if shared.strangers.fetch_add(1, Ordering::Relaxed) >= STRANGERS_MAX {
        shared.stranger_leaves();
        let _ = reply(&stream, &HelloReply::refuse(Status::LIMIT));
        return;
    }
    let guest = Arc::clone(shared);
    let greeter = host::spawn("martlet-greet", move || {
        let hello = read_hello(&stream);
        guest.stranger_leaves();
        match hello {
            Ok(hello) => dispatch(&hello, stream, &guest),
            Err(error) => debug!(%error, "a connection was turned away"),
        }
    });
    if greeter.is_err() {
        shared.stranger_leaves();
    }
}

fn dispatch(hello: &Hello, stream: Stream, shared: &Arc<Shared>) {
    let version = match hello.negotiate() {
        Ok(version) => version,
        Err(error) => {
            debug!(%error, "a connection was turned away");
            return drop(reply(&stream, &HelloReply::refuse(Status::VERSION)));
        }
    };
    match hello.role {
        Role::CONTROL => begin(version, stream, shared),
        Role::DATA => shared.admit_channel(hello, version, stream),
        Role::RDMA if shared.rdma.is_some() => shared.admit_channel(hello, version, stream),
        Role::QUERY => {
            if reply(&stream, &HelloReply::accept(version)).is_ok() {
                answer_query(stream, shared);
            }
        }
        Role::RDMA => drop(reply(&stream, &HelloReply::refuse(Status::NO_RDMA))),
        _ => drop(reply(&stream, &HelloReply::refuse(Status::ROLE))),
    }
}

/// Runs an attempt on this thread.
fn begin(version: u16, stream: Stream, shared: &Arc<Shared>) {
    let events: Arc<Mailbox<Event>> = match Mailbox::new() {
        Ok(events) => Arc::new(events),
        Err(_) => return drop(reply(&stream, &HelloReply::refuse(Status::LIMIT))),
    };
    if let Err(status) = shared.begin_attempt(&events) {
        return drop(reply(&stream, &HelloReply::refuse(status)));
    }
    if let Err(error) = reply(&stream, &HelloReply::accept(version)) {
        return shared.end_attempt(Err(format!("the source hung up: {error}")));
    }
    attempt::run(ControlLink::new(stream, Reader::Destination), shared, &events);
}

fn answer_query(stream: Stream, shared: &Shared) {
    let mut link = ControlLink::new(stream, Reader::Answerer);
    let deadline = monotonic_now().after(QUERY_MAX);
    loop {
        match link.try_receive() {
            Ok(Some(Control::Query(query))) => {
                if let Some(answer) = shared.answer(query.migration) {
                    link.queue(&Control::Answer(answer));
                    drop(link.flush());
                }
                return;
            }
            Ok(Some(_)) | Err(_) => return,
            Ok(None) => {}
        }
        let left = deadline.since(monotonic_now());
        if left.is_zero() || !matches!(link.stream().wait_readable(left), Ok(true)) {
            return;
        }
    }
}
