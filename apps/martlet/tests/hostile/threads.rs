//! A guest on threads is a part of its process: whoever sends one has its code run.

use crate::Destination;
use crate::attempt::{captured_setup, refusal, setup_of};
use crate::support::Dir;
use crate::support::process::Process;
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use serde_json::json;
use std::path::Path;
use std::thread;

const THREADS: [&str; 2] = ["--accel", "threads"];

fn receive(dir: &Path, number: u32, listen: &str) -> Process {
    let receive = [&["receive", "--listen", listen][..], &THREADS].concat();
    Process::start_in(&[], dir, number, &receive).unwrap()
}

#[test]
fn a_guest_on_threads_is_not_taken_from_the_network() {
    let setup = setup_of(&captured_setup(&THREADS), 1);
    let unasked = Destination::new(&["--accel", "kvm"]);
    let reason = refusal(unasked.port, &setup);
    assert!(reason.contains("the guest runs on threads, this destination on kvm"), "{reason}");
    // From the same user, for whom a proxy may stand.
    let dir = Dir::new().unwrap();
    let mut asked = receive(dir.path(), 1, "tcp:127.0.0.1:0");
    let reason = refusal(asked.port().unwrap(), &setup);
    assert!(reason.contains("comes only over a Unix socket"), "{reason}");
}

/// Also where the same user's would be taken.
#[test]
fn a_guest_on_threads_is_not_taken_from_another_user() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let setup = setup_of(&captured_setup(&THREADS), 1);
    let destination = Destination::new(&THREADS);
    let port = destination.port;
    let other = thread::spawn(move || {
        // Of this thread alone.
        let other = Uid::from_raw(1);
        set_thread_res_uid(other, other, other).unwrap();
        refusal(port, &setup)
    });
    let reason = other.join().unwrap();
    assert!(reason.contains("comes only over a Unix socket"), "{reason}");
}

#[test]
fn a_guest_on_threads_is_taken_from_the_same_user() {
    let dir = Dir::new().unwrap();
    let program = "fill=1M,ws=1M,rate=1/ms,tick=1ms";
    let run = [&["run", "--memory", "16M", "--program", program][..], &THREADS].concat();
    let mut source = Process::start_in(&[], dir.path(), 1, &run).unwrap();
    let listen = format!("unix:{}", dir.path().join("m").display());
    let mut destination = receive(dir.path(), 2, &listen);
    source.execute("migrate", &json!({ "uri": listen })).unwrap();
    let deadline = std::time::Instant::now() + crate::wire::COMES_MAX;
    while destination.guest().unwrap().is_none() {
        assert!(std::time::Instant::now() < deadline, "{:?}", source.migration());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
