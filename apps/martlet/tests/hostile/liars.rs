//! Destinations that speak the wire well, and lie. The source's guest runs on unless the source
//! itself has sent its commit; and then its owner soon knows how it stands.

use crate::played::{INSTANCE, Played, answer, committed, numbers, refused};
use crate::support::process::Process;
use crate::wire::{
    ALIVE, COMES_MAX, COMMIT, COMMITTED, SETUP_DONE, SWITCHOVER_SOON, UNKNOWN, Value, map, message,
};
use serde_json::json;
use std::process::Command;
use std::time::Duration;

const OTHER_INSTANCE: [u8; 16] = [8; 16];

/// Far above what a source gives a destination behind its commit at its limit.
const SOON: Duration = Duration::from_secs(45);

#[test]
fn who_takes_the_guest_before_it_is_given_gets_none() {
    let alive = message(ALIVE, &numbers([0, 0]));
    for early in [committed(), refused(), alive, answer(INSTANCE, 1)] {
        let mut liar = Played::begin(&json!({}));
        liar.until(SWITCHOVER_SOON, 0);
        liar.say(&[early]);
        liar.comes_to("failed", COMES_MAX);
        liar.runs();
    }
}

#[test]
fn the_first_word_about_a_commit_counts() {
    let mut liar = Played::begin(&json!({}));
    liar.until(COMMIT, 0);
    liar.say(&[refused(), committed(), refused()]);
    liar.comes_to("failed", COMES_MAX);
    liar.runs();

    let mut liar = Played::begin(&json!({}));
    liar.until(COMMIT, 0);
    liar.say(&[committed(), refused(), committed()]);
    liar.comes_to("completed", COMES_MAX);
    assert_eq!(liar.source.run_state().unwrap(), "postmigrate");
    liar.has_no_defect();
}

#[test]
fn absurd_times_of_a_guest_that_arrived_harm_nobody() {
    for time in [0, u64::MAX] {
        let mut liar = Played::begin(&json!({}));
        liar.until(COMMIT, 0);
        let frames = Value::List(vec![Value::Number(time), Value::Null]);
        let trouble = Value::Text("\u{1b}[2J".repeat(100));
        let devices = numbers([time, !time]).with(2, frames).with(3, trouble);
        // The wall clock is the least number that 64 bits hold.
        let alive = numbers([time; 4]).with(4, devices);
        let times = message(COMMITTED, &numbers([time, !time, time]));
        liar.say(&[times, message(ALIVE, &alive)]);
        liar.comes_to("completed", COMES_MAX);
        liar.has_no_defect();
    }
}

#[test]
fn only_the_process_that_got_the_commit_gives_it_back() {
    let mut liar = Played::begin(&json!({}));
    liar.until(COMMIT, 0);
    // A breach: there is no telling what it did with the commit.
    liar.say(&[message(SETUP_DONE, &map([]))]);
    liar.be_asked(OTHER_INSTANCE, UNKNOWN);
    liar.comes_to("x-undecided", COMES_MAX);
    assert_ne!(liar.source.run_state().unwrap(), "running");
    liar.be_asked(INSTANCE, UNKNOWN);
    liar.comes_to("failed", COMES_MAX);
    liar.runs();
}

/// What an end may lose is lost by force alone, and the exit status says that.
#[test]
fn an_undecided_guest_is_ended_by_force_alone() {
    let mut liar = Played::begin(&json!({}));
    liar.until(COMMIT, 0);
    // A breach: there is no telling what it did with the commit.
    liar.say(&[message(SETUP_DONE, &map([]))]);
    liar.comes_to("x-undecided", COMES_MAX);
    let quit = |source: &Process, force: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_martlet"));
        command.args(["quit", "--control"]).arg(source.control()).args(force);
        command.output().expect("it starts")
    };
    let refused = quit(&liar.source, &[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("undecided"), "{said}");
    liar.comes_to("x-undecided", COMES_MAX);
    assert!(quit(&liar.source, &["--force"]).status.success());
    assert_eq!(liar.source.ended().unwrap().code(), Some(4));
}

/// Its owner wants the guest stopped, whatever is predicted. How long a destination may take then
/// is not for that destination to say.
#[test]
fn a_rehearsal_that_took_for_ever_gives_no_time_for_an_answer() {
    let stop = json!({ "x-within": { "limit-ms": 1, "then": "stop" } });
    let mut liar = Played::begin(&stop);
    liar.until(COMMIT, u64::MAX);
    liar.comes_to("x-undecided", SOON);
    liar.say(&[refused()]);
    liar.comes_to("failed", COMES_MAX);
    liar.runs();
}
