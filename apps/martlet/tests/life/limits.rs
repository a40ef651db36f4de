//! Limits of the host.

use crate::command::*;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;

/// How many descriptors a process has open.
fn descriptors(process: &Process) -> u64 {
    let list = std::fs::read_dir(format!("/proc/{}/fd", process.0.id())).expect("its descriptors");
    list.count() as u64
}

/// From now on the process may have so many descriptors and no more.
fn limit_descriptors(process: &Process, count: u64) {
    let limit = Rlimit { current: Some(count), maximum: getrlimit(Resource::Nofile).maximum };
    prlimit(Some(Pid::from_child(&process.0)), Resource::Nofile, limit).expect("prlimit");
}

/// A monitor that negotiates and then is silent.
fn monitor(control: &str) -> BufReader<UnixStream> {
    let mut client = BufReader::new(UnixStream::connect(control).expect("a client"));
    client.get_mut().write_all(b"{\"execute\":\"qmp_capabilities\"}\n").expect("written");
    let mut line = String::new();
    for _ in ["greeting", "reply"] {
        client.read_line(&mut line).expect("a line");
    }
    client
}

/// Runs the command in a shell that sets a limit first.
fn limited(limit: &str, arguments: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new("sh");
    let script = format!("ulimit {limit}; exec \"$@\"");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_martlet")]).args(arguments);
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

#[test]
fn idle_monitors_do_not_lock_the_owner_out() {
    let folder = Folder::new();
    let control = folder.at("a");
    let mut process = start_guest(&control);
    let _monitors: Vec<_> = (0..20).map(|_| monitor(&control)).collect();
    assert_eq!(status(&control)["status"], "running");
    assert!(martlet(&["quit", "--control", &control]).status.success());
    assert!(process.wait().success());
}

#[test]
fn an_owner_is_heard_where_no_descriptor_is_left() {
    let folder = Folder::new();
    let control = folder.at("a");
    let mut process = start_guest(&control);
    assert_eq!(status(&control)["status"], "running");
    limit_descriptors(&process, descriptors(&process));
    // One after the other, and at the same time: the idle ones make room.
    for _ in 0..3 {
        assert_eq!(status(&control)["status"], "running");
    }
    let _monitors: Vec<_> = (0..3).map(|_| monitor(&control)).collect();
    assert_eq!(status(&control)["status"], "running");
    assert!(martlet(&["quit", "--control", &control]).status.success());
    assert!(process.wait().success());
}

#[test]
fn a_receiver_without_descriptors_says_so_and_goes_on() {
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let listen = format!("unix:{}", folder.at("m"));
    let _source = start_guest(&here);
    await_filled(&here);
    let destination = start(&there, &["receive", "--listen", &listen]);
    status(&there);
    limit_descriptors(&destination, descriptors(&destination));
    let output = martlet(&["migrate", "--control", &here, &listen, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let end: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
    let error = end["error"].as_str().expect("a reason").to_owned();
    assert!(error.contains("too many connections") || error.contains("open files"), "{error}");
    assert_eq!(status(&there)["status"], "inmigrate");
    limit_descriptors(&destination, 4096);
    let again = json(&martlet(&["migrate", "--control", &here, &listen, "--json"]));
    assert_eq!(again["outcome"], "completed");
}

#[test]
fn as_many_descriptors_are_taken_as_the_host_allows() {
    let folder = Folder::new();
    let control = folder.at("a");
    let run = ["run", "--memory", "64M", "--program", PROGRAM];
    let mut shell = limited("-S -n 64", &run);
    let process = start_command(&control, &run, &mut shell, Stdio::null());
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.0.id())).expect("its");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{line}");
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_no_death() {
    let folder = Folder::new();
    let control = folder.at("a");
    let run = ["run", "--memory", "64M", "--program", PROGRAM, "--control", &control];
    let output = limited("-f 1024", &run).output().expect("starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{}: {said}", output.status);
    assert!(said.contains("File too large"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}
