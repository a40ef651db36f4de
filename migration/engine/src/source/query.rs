//! Asking a destination what became of a migration.

use crate::chain;
use martlet_transport::{Address, ControlLink, Target, Until, connect_all, monotonic_now};
use martlet_wire::control::{Answer, Control, Fate, MigrationId, Query};
use martlet_wire::frame::Reader;
use martlet_wire::hello::Hello;
use std::time::Duration;

/// How long the destination may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// A destination that has not decided yet is asked again this soon ...
const PENDING_INTERVAL: Duration = Duration::from_millis(100);
/// ... until it has, or this long has passed. Then whoever wants to know asks anew.
const PENDING_MAX: Duration = Duration::from_secs(15);

/// Asks until the destination has decided, or took too long for that. The error is one line for
/// people. Waits, so call it on a thread that nobody needs.
pub(super) fn ask(to: &Address, target: &Target, migration: MigrationId) -> Result<Answer, String> {
    let deadline = monotonic_now().after(PENDING_MAX);
    loop {
        let answer = ask_once(to, target, migration)?;
        if answer.fate != Fate::Pending || monotonic_now() >= deadline {
            return Ok(answer);
        }
        std::thread::sleep(PENDING_INTERVAL);
    }
}

/// Asks on a connection of its own.
fn ask_once(to: &Address, target: &Target, migration: MigrationId) -> Result<Answer, String> {
    let until = Until::within(ANSWER_MAX);
    let streams = connect_all(to, target, &[Hello::query()], &until);
    let mut streams = streams.map_err(|error| error.to_string())?;
    let stream = streams.pop().ok_or("no connection was opened")?;
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
