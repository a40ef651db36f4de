//! What may have become of a guest, and what may not.

use crate::desk::Desk;
use crate::plan::{Fault, Side, kind};
use crate::watch::Pair;
use std::time::{Duration, Instant};

/// How long an undecided attempt may stay so while its destination lives: that has 8 s to refuse
/// the commit.
const RESOLVE_MAX: Duration = Duration::from_secs(60);
/// Between two questions.
const RESOLVE_INTERVAL: Duration = Duration::from_millis(20);
/// How long a destination may take to say on its standard error what it says on its control
/// socket.
const WORDS_MAX: Duration = Duration::from_secs(10);

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ending {
    /// The guest is at the destination.
    Moved,
    /// The same, but the source had to ask.
    MovedUndecided,
    /// The guest is at the source.
    Stayed,
    /// The same, but the source had to ask.
    StayedUndecided,
    /// It died with the process that had it.
    DiedWithSource,
    /// The same, at the destination.
    DiedWithDestination,
    /// The destination that may have had it is dead; it stays stopped at the source.
    Undecided,
}

impl Ending {
    /// Who has the guest.
    pub(crate) fn holder(self) -> Option<Side> {
        match self {
            Ending::Moved | Ending::MovedUndecided => Some(Side::Destination),
            Ending::Stayed | Ending::StayedUndecided => Some(Side::Source),
            Ending::DiedWithSource | Ending::DiedWithDestination | Ending::Undecided => None,
        }
    }
}

/// The shortest of the protocol's deadlines. Whatever took longer may have failed by one: a host
/// that is far too busy is a reason as good as a cut.
pub(crate) const DEADLINE_MIN: Duration = Duration::from_secs(8);

/// Judges a pair that has settled. `fired`: the fault came to its moment; `slow`: a deadline may
/// have passed; `fresh`: the destination had seen no attempt before.
pub(crate) fn judge(
    pair: &mut Pair,
    desk: &Desk,
    fired: bool,
    slow: bool,
    fresh: bool,
) -> Result<Ending, String> {
    died_as_planned(pair, desk, fired)?;
    let was_undecided = pair.source.status() == "x-undecided";
    if was_undecided {
        is_stopped_and_says_so(pair)?;
        if !pair.destination.is_dead() {
            resolve(pair, desk)?;
        }
    }
    let (source, destination) = (pair.source.status(), pair.destination.status());
    let ending = match (source, destination) {
        ("completed", "completed") if was_undecided => Ending::MovedUndecided,
        ("completed" | "dead", "completed") => Ending::Moved,
        ("completed", "dead") => Ending::DiedWithDestination,
        ("failed", "setup" | "dead") if was_undecided => Ending::StayedUndecided,
        ("failed" | "cancelled", "setup" | "dead") => Ending::Stayed,
        ("x-undecided", "dead") => Ending::Undecided,
        ("dead", "setup") => Ending::DiedWithSource,
        (source, destination) => {
            return Err(format!("source {source} and destination {destination} don't fit"));
        }
    };
    says_why(pair, desk, ending, fresh)?;
    has_a_reason(desk, fired, slow, ending)?;
    Ok(ending)
}

/// Nobody dies but the one that was killed.
fn died_as_planned(pair: &Pair, desk: &Desk, fired: bool) -> Result<(), String> {
    for (side, watched) in [(Side::Source, &pair.source), (Side::Destination, &pair.destination)] {
        let killed = fired && desk.plan.fault == Fault::Kill(side);
        if watched.is_dead() && !killed {
            return Err(format!("{side:?} died by itself: {}", watched.process.said()));
        }
        if killed && !watched.is_dead() {
            return Err(format!("{side:?} was killed and lives"));
        }
        if watched.process.said().contains("panicked") {
            return Err(format!("{side:?} panicked: {}", watched.process.said()));
        }
    }
    Ok(())
}

fn is_stopped_and_says_so(pair: &mut Pair) -> Result<(), String> {
    let state = pair.source.process.run_state()?;
    if state != "finish-migrate" || pair.source.error().is_empty() {
        let error = pair.source.error();
        return Err(format!("an undecided source is {state} and says {error:?}"));
    }
    for command in ["cont", "migrate"] {
        let arguments = serde_json::json!({ "uri": "tcp:127.0.0.1:1" });
        let arguments = if command == "cont" { serde_json::json!({}) } else { arguments };
        if pair.source.process.execute(command, &arguments).is_ok() {
            return Err(format!("an undecided source takes {command}"));
        }
    }
    pair.stands_still(Side::Source)
}

/// Asks until the destination has decided.
fn resolve(pair: &mut Pair, desk: &Desk) -> Result<(), String> {
    let deadline = Instant::now() + RESOLVE_MAX;
    loop {
        let answer = pair.source.process.ask("x-resolve");
        pair.log.note(format!("x-resolve: {answer:?}"));
        pair.settle(desk)?;
        // It may also have settled by itself, by an answer that came late.
        if pair.source.status() != "x-undecided" {
            return Ok(());
        }
        if answer.is_ok_and(|value| value["status"] != "x-undecided") {
            return Err("resolved, and undecided".to_owned());
        }
        if Instant::now() > deadline {
            return Err("a living destination does not settle the attempt".to_owned());
        }
        std::thread::sleep(RESOLVE_INTERVAL);
    }
}

/// Whoever survives a failure says what happened.
fn says_why(pair: &mut Pair, desk: &Desk, ending: Ending, fresh: bool) -> Result<(), String> {
    if !pair.source.is_dead() {
        let (status, error) = (pair.source.status(), pair.source.error());
        if matches!(status, "failed" | "x-undecided") && !is_one_line(error) {
            return Err(format!("a source that {status} says {error:?}"));
        }
        if status == "completed" && !error.is_empty() {
            return Err(format!("a source that has completed says {error:?}"));
        }
    }
    let failed_there = ending.holder() != Some(Side::Destination);
    if pair.destination.is_dead() || !failed_there || !desk.is_accepted() {
        return Ok(());
    }
    if !is_one_line(pair.destination.error()) {
        return Err(format!("a destination says {:?} of its failure", pair.destination.error()));
    }
    let line = format!("a migration to here failed: {}", pair.destination.error());
    let deadline = Instant::now() + WORDS_MAX;
    while fresh && !pair.destination.process.said().contains(&line) {
        if Instant::now() > deadline {
            let said = pair.destination.process.said();
            return Err(format!("a destination does not say {line:?}: {said}"));
        }
        std::thread::sleep(RESOLVE_INTERVAL);
    }
    Ok(())
}

fn is_one_line(text: &str) -> bool {
    text.len() > 10 && !text.contains('\n')
}

/// A guest that is lost, stopped or not moved needs a reason among what was seen on the way.
fn has_a_reason(desk: &Desk, fired: bool, slow: bool, ending: Ending) -> Result<(), String> {
    if !fired && ending != Ending::Moved && !(slow && ending.holder().is_some()) {
        return Err(format!("{ending:?}, though nothing was done"));
    }
    if desk.plan.direct {
        return Ok(());
    }
    let complain = |what: &str| Err(format!("{ending:?}, but {what}"));
    match ending {
        Ending::Undecided if !desk.has_come(kind::COMMIT) => {
            complain("no commit ever left the source")
        }
        Ending::DiedWithDestination if !desk.has_passed(kind::COMMITTED) => {
            complain("the destination never said that it has the guest")
        }
        // Everything that the source had to give was on its way to a living destination.
        Ending::DiedWithSource
            if desk.has_passed(kind::COMMIT) && !desk.has_come(kind::COMMIT_REFUSED) =>
        {
            complain("the destination had everything")
        }
        Ending::Stayed if desk.has_passed(kind::COMMITTED) => {
            complain("the destination has confirmed the guest")
        }
        // A proof comes from the destination. Its death is none, nor is a lost connection.
        Ending::Stayed
            if desk.has_passed(kind::COMMIT)
                && !desk.has_passed(kind::COMMIT_REFUSED)
                && !desk.has_passed(kind::ABANDON) =>
        {
            complain("the destination had the commit and did not give it back")
        }
        Ending::Moved
        | Ending::MovedUndecided
        | Ending::Stayed
        | Ending::StayedUndecided
        | Ending::DiedWithSource
        | Ending::DiedWithDestination
        | Ending::Undecided => Ok(()),
    }
}
