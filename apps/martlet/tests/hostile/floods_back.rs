//! Destinations that send without end to the source of a guest. The source takes little memory and
//! hears its owner, and the guest runs on.

use crate::floods::{FLOOD, Flood, MEMORY_MAX};
use crate::played::{INSTANCE, Played, QUIET, answer, numbers};
use crate::wire::{
    ABANDON, ALIVE, ANSWER, COMES_MAX, COMMIT, DIGEST, PONG, REHEARSED, ROUND_RECEIVED, SETUP_DONE,
    SWITCHOVER_SOON, UNKNOWN, header, map, message,
};
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A guest that has more to send in its last run than the sockets hold.
const BUSY: &str = "fill=16M,ws=16M,rate=1000/ms,tick=1ms";

/// How far the migration is when the flood begins.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Setup,
    Rounds,
    Stop,
}

const PHASES: [Phase; 3] = [Phase::Setup, Phase::Rounds, Phase::Stop];

fn played(phase: Phase) -> Played {
    match phase {
        Phase::Setup => Played::called(QUIET, &json!({})),
        // So little a second that the rounds do not end.
        Phase::Rounds => {
            let mut played = Played::begin(&json!({ "max-bandwidth": 12_500 }));
            played.comes_to("active", COMES_MAX);
            played
        }
        Phase::Stop => {
            let mut played = Played::begin_with(BUSY, &json!({}));
            played.until(SWITCHOVER_SOON, 0);
            played.pages_slowly.store(true, Ordering::Relaxed);
            played
        }
    }
}

/// Endures a flood, and then calls the migration off, if the flood has not ended it.
fn is_endured(mut played: Played, flood: &[u8], what: &str) {
    let (before, _) = played.source.memory();
    let began = Instant::now();
    let flood = Flood::new(&played.control.0, flood.to_vec());
    let mut now = played.source.migration().expect("it hears its owner");
    while ["setup", "active", "device"].contains(&now.status.as_str()) && began.elapsed() < FLOOD {
        std::thread::sleep(std::time::Duration::from_millis(5));
        now = played.source.migration().expect("it hears its owner");
    }
    let (_, most) = played.source.memory();
    let grown = most.saturating_sub(before);
    println!("{what}: {} {:?}, {} MiB", now.status, now.error, grown >> 20);
    assert!(grown < MEMORY_MAX, "{what}: {} MiB", grown >> 20);
    match now.status.as_str() {
        "failed" => played.runs(),
        // The commit was faster.
        "x-undecided" => played.settles_undecided(),
        _ => played.cancels(what),
    }
    drop(flood);
}

#[test]
fn answers_that_nobody_asked_for() {
    let pong = message(PONG, &numbers([1, 1])).repeat(1000);
    let rehearsed = message(REHEARSED, &numbers([1, 1])).repeat(1000);
    let received = message(ROUND_RECEIVED, &numbers([1 << 20])).repeat(1000);
    for phase in PHASES {
        is_endured(played(phase), &pong, &format!("pongs, {phase:?}"));
        is_endured(played(phase), &rehearsed, &format!("rehearsals, {phase:?}"));
        is_endured(played(phase), &received, &format!("rounds, {phase:?}"));
    }
}

#[test]
fn messages_of_the_wrong_kind() {
    let setup_done = message(SETUP_DONE, &map([])).repeat(1000);
    let alive = message(ALIVE, &numbers([0, 0])).repeat(1000);
    let unknown = header(99, 0).repeat(1000);
    for phase in PHASES {
        is_endured(played(phase), &setup_done, &format!("a setup, {phase:?}"));
        is_endured(played(phase), &alive, &format!("a guest that lives, {phase:?}"));
        is_endured(played(phase), &unknown, &format!("an unknown kind, {phase:?}"));
    }
}

/// What is announced is more than any such message has, so nothing of it is read.
#[test]
fn messages_that_are_announced_to_be_long() {
    for kind in [REHEARSED, ABANDON, DIGEST, PONG] {
        for phase in PHASES {
            let mut played = played(phase);
            played.say(&[header(kind, 64 << 20).to_vec()]);
            is_endured(played, &[0; 1 << 16], &format!("64 MiB of kind {kind}, {phase:?}"));
        }
    }
}

#[test]
fn a_message_that_stops_in_the_middle() {
    let pong = message(PONG, &numbers([1, 1]));
    for (phase, length) in [(Phase::Rounds, 9), (Phase::Rounds, pong.len() - 1), (Phase::Stop, 9)] {
        let mut played = played(phase);
        played.say(&[pong[..length].to_vec()]);
        played.cancels(&format!("in a message, {phase:?}"));
    }
}

/// It has the commit, and then says neither yes nor no for as long as it is asked.
#[test]
fn an_answer_that_never_ends() {
    let mut undecided = Played::begin(&json!({}));
    undecided.until(COMMIT, 0);
    // A breach: there is no telling what it did with the commit.
    undecided.say(&[message(SETUP_DONE, &map([]))]);
    let mut asker = undecided.asked();
    undecided.comes_to("x-undecided", COMES_MAX);
    let (before, _) = undecided.source.memory();
    asker.say(&header(ANSWER, 64 << 20)).expect("it reads");
    let flood = Flood::new(&asker.0, vec![0; 1 << 16]);
    let half = answer(INSTANCE, UNKNOWN);
    let mut asker = undecided.asked();
    asker.say(&half[..half.len() - 1]).expect("it reads");
    // Meanwhile its owner is heard, and waits for no answer.
    let refused = undecided.source.ask("quit").expect_err("it may have to run here");
    assert!(refused.to_string().contains("undecided"), "{refused}");
    let (_, most) = undecided.source.memory();
    assert!(most < before + MEMORY_MAX, "{} MiB", most >> 20);
    drop(flood);
    undecided.be_asked(INSTANCE, UNKNOWN);
    undecided.comes_to("failed", COMES_MAX);
    undecided.runs();
}
