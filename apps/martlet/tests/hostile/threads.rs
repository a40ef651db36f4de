//! A guest on threads is a part of its process: whoever sends one has its code run.

use crate::Destination;
use crate::attempt::{captured_setup, refusal, setup_of};
use crate::support::Dir;
use crate::support::process::Process;
use crate::wire::Value;
use serde_json::json;

#[test]
fn a_guest_on_threads_is_not_taken_from_the_network() {
    let captured = captured_setup(&["--accel", "threads"]);
    let unasked = Destination::new(&["--accel", "kvm"]);
    let reason = refusal(unasked.port, &setup_of(&captured, 1));
    assert!(reason.contains("the guest runs on threads, this destination on kvm"), "{reason}");
    // Without the key that these processes have in their environment.
    let description = captured.field(2).unwrap().bytes();
    let key = b"a key of the tests";
    let at = description.windows(key.len()).position(|bytes| bytes == key).expect("the key");
    let mut other = description.to_vec();
    other[at] ^= 1;
    let asked = Destination::new(&["--accel", "threads"]);
    let reason = refusal(asked.port, &setup_of(&captured, 1).with(2, Value::Bytes(other)));
    assert!(reason.contains("comes only over a Unix socket"), "{reason}");
}

#[test]
fn a_guest_on_threads_is_taken_from_the_same_user() {
    let dir = Dir::new().unwrap();
    let program = "fill=1M,ws=1M,rate=1/ms,tick=1ms";
    let accel = ["--accel", "threads"];
    let run = [&["run", "--memory", "16M", "--program", program][..], &accel].concat();
    let mut source = Process::start(dir.path(), 1, &run).unwrap();
    let listen = format!("unix:{}", dir.path().join("m").display());
    let receive = [&["receive", "--listen", &listen][..], &accel].concat();
    let mut destination = Process::start(dir.path(), 2, &receive).unwrap();
    source.execute("migrate", &json!({ "uri": listen })).unwrap();
    let deadline = std::time::Instant::now() + crate::wire::COMES_MAX;
    while destination.guest().unwrap().is_none() {
        assert!(std::time::Instant::now() < deadline, "{:?}", source.migration());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
