//! Asking a destination what became of a migration.

use crate::chain;
use martlet_transport::{Address, ControlLink, GreetingError, connect, monotonic_now};
use martlet_wire::control::{Answer, Control, Fate, MigrationId, Query};
use martlet_wire::frame::Reader;
use martlet_wire::hello::Hello;
use std::time::Duration;

/// How long the destination may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(15);

/// A destination that has not decided yet is asked again this soon ...
const PENDING_INTERVAL: Duration = Duration::from_millis(100);
/// ... until it has, or this long has passed: it decides within
/// [`martlet_protocol::limits::COMMIT_COMPLETE_MAX`].
const PENDING_MAX: Duration = Duration::from_secs(15);

/// Asks until the destination has decided, or took too long for that. The error is one line for
/// people. Waits, so call it on a thread that nobody needs.
pub(super) fn ask(to: &Address, migration: MigrationId) -> Result<Answer, String> {
    let deadline = monotonic_now().after(PENDING_MAX);
    loop {
        let answer = ask_once(to, migration)?;
        if answer.fate != Fate::Pending || monotonic_now() >= deadline {
            return Ok(answer);
        }
        std::thread::sleep(PENDING_INTERVAL);
    }
}

/// Asks on a connection of its own.
fn ask_once(to: &Address, migration: MigrationId) -> Result<Answer, String> {
    let stream = connect(to, &Hello::query()).map_err(|error: GreetingError| error.to_string())?;
    let mut link = ControlLink::new(stream, Reader::Asker);
    link.queue(&Control::Query(Query { migration }));
    link.flush().map_err(|error| format!("cannot ask {to}: {error}"))?;
    let deadline = monotonic_now().after(ANSWER_MAX);
    loop {
        match link.try_receive() {
            Ok(Some(Control::Answer(answer))) => return Ok(answer),
            Ok(Some(_)) => return Err(format!("{to} answered something else")),
            Ok(None) => {}
            Err(error) => return Err(format!("no answer from {to}: {}", chain(&error))),
        }
        let left = deadline.since(monotonic_now());
        if left.is_zero() || !link.stream().wait_readable(left).map_err(|e| e.to_string())? {
            return Err(format!("no answer from {to} within {} s", ANSWER_MAX.as_secs()));
        }
    }
}
