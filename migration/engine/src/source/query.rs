//! Asking a destination what became of a migration.

use super::connecting::unreached;
use crate::{Error, Fault, chain};
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

/// Asks until the destination has decided, or took too long for that. Waits, so call it on a thread
/// that nobody needs.
pub(super) fn ask(to: &Address, target: &Target, migration: MigrationId) -> Result<Answer, Error> {
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
fn ask_once(to: &Address, target: &Target, migration: MigrationId) -> Result<Answer, Error> {
    let failed = |reason: String| Error::new(Fault::Peer, "", reason);
    let until = Until::within(ANSWER_MAX);
    let mut streams =
        connect_all(to, target, &[Hello::query()], &until).map_err(|error| unreached(&error))?;
    let stream = streams.pop().expect("one for each greeting");
    let mut link = ControlLink::new(stream, Reader::Asker);
    link.queue(&Control::Query(Query { migration }));
    link.flush().map_err(|error| failed(format!("cannot ask {to}: {error}")))?;
    let deadline = monotonic_now().after(ANSWER_MAX);
    loop {
        match link.try_receive() {
            Ok(Some(Control::Answer(answer))) => return Ok(answer),
            Ok(Some(_)) => return Err(failed(format!("{to} answered something else"))),
            Ok(None) => {}
            Err(error) => {
                return Err(failed(format!("no answer from {to}: {}", chain(&error))));
            }
        }
        let left = deadline.since(monotonic_now());
        let waited = link.stream().wait_readable(left);
        let waited = waited.map_err(|e| Error::caused(Fault::Host, "wait for an answer", e))?;
        if left.is_zero() || !waited {
            let seconds = ANSWER_MAX.as_secs();
            return Err(failed(format!("no answer from {to} within {seconds} s")));
        }
    }
}
