//! What the command says to input that can't be meant: one line, and the promised exit status.

use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};

fn martlet(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_martlet"))
        .args(arguments)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .output()
        .expect("the command starts")
}

/// Runs it, checks the status, and returns the one line that it says.
fn complaint(arguments: &[&str], status: i32) -> String {
    let output = martlet(arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?} wrote to stdout");
    assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    let line = stderr.trim_end().to_owned();
    line.strip_prefix("martlet: ").unwrap_or_else(|| panic!("{arguments:?}: {line}")).to_owned()
}

#[test]
fn usage_errors_are_one_line_and_status_2() {
    let run = ["run", "--control", "/nonexistent/c"];
    for (arguments, part) in [
        (&["--frobnicate"][..], "unexpected argument '--frobnicate'"),
        (&["resolve", "--control", "c", "--run-here", "--give-up"], "cannot be used with"),
        (&["resolve", "--control", "c", "--confirmed"], "--run-here"),
        (&["migrate", "--control", "c", "tcp:h:1", "--then", "stop"], "--within <TIME>"),
        (&["migrate", "--control", "c", "tcp:h:1", "--within", "10"], "a time with its unit"),
        (&["migrate", "--control", "c", "tcp:h:1", "--within", "0s"], "less than 1ms"),
        (&["frobnicate"], "unrecognized subcommand 'frobnicate'"),
        (&["run"], "--control <SOCK>"),
        (&[run[0], run[1], run[2]], "--memory <SIZE>"),
        (&["run", "--control", "c", "--memory", "0"], "a guest needs memory"),
        (&["run", "--control", "c", "--memory", "4097"], "not a multiple of the page size"),
        (&["run", "--control", "c", "--memory", "lots"], "`lots` is not a size"),
        (&["run", "--control", "c", "--memory", "99999999999T"], "is not a size"),
        (&["run", "--control", "c", "--memory", "1G", "--vcpus", "0"], "0 is not in 1..=254"),
        (&["run", "--control", "c", "--memory", "1G", "--vcpus", "255"], "255 is not in 1..=254"),
        (&["run", "--control", "c", "--memory", "1G", "--program", "fill=2T,x=1"], "--program"),
        (&["run", "--control", "c", "--memory", "1G", "--serial", "tty"], "expected stdio"),
        (&["run", "--control", "c", "--memory", "1G", "--initrd", "i"], "--kernel <FILE>"),
        (&["run", "--control", "c", "--memory", "1G", "--accel", "xen"], "'xen'"),
        (&["receive", "--control", "c", "--listen", "4444"], "is not an address"),
        (&["migrate", "--control", "c"], "<ADDRESS>"),
        (&["migrate", "--control", "c", "host:1"], "is not an address"),
        (&["migrate", "--control", "c", "tcp:h:1", "--channels", "0"], "0 is not in 1..=128"),
        (&["migrate", "--control", "c", "tcp:h:1", "--channels", "129"], "129 is not in 1..=128"),
        (&["migrate", "--control", "c", "tcp:h:1", "--downtime-limit", "0ms"], "limit of 0"),
        (&["migrate", "--control", "c", "tcp:h:1", "--downtime-limit", "2h"], "above 1h"),
        (&["migrate", "--control", "c", "tcp:h:1", "--downtime-limit", "300"], "with its unit"),
        (&["migrate", "--control", "c", "tcp:h:1", "--bandwidth", "0bit/s"], "at a rate of 0"),
        (&["migrate", "--control", "c", "tcp:h:1", "--bandwidth", "fast"], "is not a rate"),
        (&["migrate", "--control", "c", "tcp:h:1", "--bandwidth", "1"], "a rate with its unit"),
        (&["migrate", "--control", "c", "tcp:h:1", "--bandwidth", "1B/s"], "the least is 12500"),
        (&["demo", "--runs", "0"], "0 is not in 1..="),
        (&["demo", "--memory", "4096"], "is not between"),
        (&["demo", "--memory", "64M", "--program", "fill=1G"], "needs"),
        (&["run", "--control", "c", "--memory", "900T"], "is not between"),
        (&["demo", "--program", "fill=everything"], "--program fill=everything"),
        (&["--log", "a=b=c", "demo"], "is not a log filter"),
    ] {
        let line = complaint(arguments, 2);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}

#[test]
fn without_a_command_help_is_shown() {
    let output = martlet(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Usage: martlet"));
}

#[test]
fn help_and_version_go_to_stdout() {
    for arguments in [&["--help"][..], &["--version"], &["demo", "--help"], &["help", "run"]] {
        let output = martlet(arguments);
        assert!(output.status.success(), "{arguments:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{arguments:?}");
    }
    let help = martlet(&["migrate", "--help"]);
    assert!(String::from_utf8_lossy(&help.stdout).contains("Examples:"));
}

#[test]
fn a_socket_without_a_martlet_is_said() {
    for arguments in [
        &["status", "--control", "/nonexistent/c"][..],
        &["stop", "--control", "/nonexistent/c"],
        &["cont", "--control", "/nonexistent/c"],
        &["quit", "--control", "/nonexistent/c"],
        &["cancel", "--control", "/nonexistent/c"],
        &["resolve", "--control", "/nonexistent/c"],
        &["migrate", "--control", "/nonexistent/c", "tcp:127.0.0.1:1"],
    ] {
        let line = complaint(arguments, 1);
        assert!(line.starts_with("no martlet at /nonexistent/c: "), "{line}");
    }
}

#[test]
fn a_control_socket_that_can_not_be_had_is_said() {
    let dir = std::env::temp_dir().join(format!("martlet-usage-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let path = dir.join("c");
    let _owner = UnixListener::bind(&path).expect("a socket");
    let path = path.to_str().expect("a plain path");
    let line = complaint(&["run", "--control", path, "--memory", "64M"], 1);
    assert!(line.contains("is in use by another process"), "{line}");
    let file = dir.join("file");
    std::fs::write(&file, "x").expect("a file");
    let file = file.to_str().expect("a plain path");
    let line = complaint(&["receive", "--control", file, "--listen", "unix:/nonexistent/l"], 1);
    assert!(line.contains("something else is there"), "{line}");
    let line = complaint(&["run", "--control", "/nonexistent/c", "--memory", "64M"], 1);
    assert!(line.contains("cannot open control socket"), "{line}");
    std::fs::remove_dir_all(&dir).expect("removed");
}

#[test]
fn a_closed_pipe_is_no_panic() {
    use std::io::Read;
    let mut child = Command::new(env!("CARGO_BIN_EXE_martlet"))
        .args(["demo", "--help"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("text");
    assert!(child.wait().expect("it ends").success());
    assert!(stderr.is_empty(), "{stderr}");
}
