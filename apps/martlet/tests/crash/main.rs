//! No guest is lost and none is doubled when processes die and connections break.
//!
//! Real processes and the built-in guest, moved from one to the next through a proxy. In each
//! attempt one thing happens at a moment that a seed chooses: a process is killed, or a connection
//! is cut, closed one way, stalled or filled with garbage, or the owner cancels. Moments are spread
//! over the whole migration; half of them are at the messages of the switchover and in the
//! microseconds behind them, since there the right to run the guest changes hands.
//!
//! After each attempt
//! * never two: once the destination has the guest, the heartbeats at the source stand still;
//! * never lost: the guest goes on at exactly one side, as it was (running or paused), checks all of
//!   its memory without finding a wrong page, and moves on to another process if it had stayed. It is
//!   gone only with the process that had it, and stays stopped only at a source whose destination
//!   died with the commit;
//! * who survives says what happened, within the protocol's deadlines; an undecided attempt is
//!   settled by `x-resolve` if the destination lives.
//!
//! `MARTLET_CRASH_RUNS` sets how many kills and how many cuts there are (default 14; an eighth as
//! many stalls, which take their deadlines' time). A failure prints its seed and what happened;
//! `MARTLET_CRASH_SEED` runs that seed alone, as often as `MARTLET_CRASH_RUNS` says (default once):
//! a seed repeats what is done, not what two processes make of it.

mod desk;
mod frames;
mod judge;
mod link;
mod log;
mod plan;
mod proxy;
mod scene;
mod spread;
#[path = "../support/mod.rs"]
mod support;
mod watch;

use judge::Ending;
use plan::Plan;
use scene::Scene;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use support::process;

/// Kills and cuts if nobody says otherwise.
const RUNS: u64 = 14;
/// For one stall there are so many cuts.
const CUTS_PER_STALL: u64 = 8;
/// Stalls that wait for their deadlines side by side.
const STALLS_AT_ONCE: u64 = 4;

/// Kills and cuts take turns: a host that is too busy hits no switchover.
static TURN: Mutex<()> = Mutex::new(());

/// What the attempts of a test have in common.
#[derive(Clone, Copy)]
struct Kind {
    /// As it begins the test's name.
    name: &'static str,
    plan: fn(u64, Duration) -> Plan,
}

const KILLED: Kind = Kind { name: "killed", plan: Plan::kill };
const CUT: Kind = Kind { name: "cut", plan: Plan::cut };
const STALLED: Kind = Kind { name: "stalled", plan: Plan::stall };

#[test]
fn killed_processes_leave_one_guest() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    report(KILLED, &run_all(KILLED, seeds(1)));
}

#[test]
fn cut_connections_leave_one_guest() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    report(CUT, &run_all(CUT, seeds(1)));
}

#[test]
fn stalled_connections_leave_one_guest() {
    let seeds = seeds(CUTS_PER_STALL);
    let endings = std::thread::scope(|scope| {
        let share = |first| {
            let seeds: Vec<u64> = seeds
                .iter()
                .copied()
                .skip(usize::try_from(first).expect("few"))
                .step_by(usize::try_from(STALLS_AT_ONCE).expect("few"))
                .collect();
            scope.spawn(|| run_all(STALLED, seeds))
        };
        let threads: Vec<_> = (0..STALLS_AT_ONCE).map(share).collect();
        let mut all = Vec::new();
        for thread in threads {
            match thread.join() {
                Ok(endings) => all.extend(endings),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    report(STALLED, &endings);
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")))
}

/// The seeds to run; one for `share` of the runs, but some.
fn seeds(share: u64) -> Vec<u64> {
    let runs = number("MARTLET_CRASH_RUNS");
    match number("MARTLET_CRASH_SEED") {
        Some(seed) => (0..runs.unwrap_or(1)).map(|_| seed).collect(),
        None => {
            let runs = runs.unwrap_or(RUNS);
            (0..(runs / share).max(runs.min(STALLS_AT_ONCE))).collect()
        }
    }
}

/// Runs a plan for each seed in one scene.
fn run_all(kind: Kind, seeds: Vec<u64>) -> Vec<Ending> {
    if seeds.is_empty() {
        return Vec::new();
    }
    let mut scene = Scene::new().unwrap_or_else(|why| panic!("the first migration: {why}"));
    let run = |seed| {
        let plan = (kind.plan)(seed, scene.clean());
        scene.attempt(&plan).unwrap_or_else(|why| {
            let (story, dir, name) = (scene.story(), scene.dir().display(), kind.name);
            panic!(
                "{why}\n{story}\nlogs are in {dir}\nonce more: MARTLET_CRASH_SEED={seed} \
                 cargo test -p martlet --test crash {name}"
            )
        })
    };
    let endings = seeds.into_iter().map(run).collect();
    for (words, times) in scene.words() {
        println!("{times:>4} x {words}");
    }
    endings
}

/// For `--nocapture`.
fn report(kind: Kind, endings: &[Ending]) {
    let mut counts = BTreeMap::new();
    for ending in endings {
        *counts.entry(ending).or_insert(0) += 1;
    }
    println!("{} {}: {counts:?}", endings.len(), kind.name);
}
