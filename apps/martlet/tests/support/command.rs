//! The built command, run as its users run it.
#![allow(dead_code, reason = "each test binary uses a part of it")]

#[path = "accel.rs"]
mod accel;

use accel::{THREADS_BY_TCP, accel};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longer than anything takes on a busy host, shorter than what a person waits.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// A guest that leaves the host's cores to the other tests.
pub(crate) const PROGRAM: &str = "fill=16M,ws=4M,rate=1/ms,tick=1ms,verify=16";

/// A folder of its own for each test; sockets in it have short names.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("martlet-e2e-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a new folder");
        Folder(path)
    }

    pub(crate) fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a plain path").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that is killed if a test fails before it ends.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.0.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "a process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        let status = Command::new("kill").args([name, &pid]).status().expect("kill starts");
        assert!(status.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_martlet"));
    command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

pub(crate) fn martlet(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the command starts")
}

pub(crate) fn stdout(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).expect("one JSON object")
}

/// Starts `run` or `receive` and waits until it serves its control socket.
pub(crate) fn start(control: &str, arguments: &[&str]) -> Process {
    start_command(control, arguments, &mut command(arguments), Stdio::piped())
}

/// As [`start`], with a command made from `arguments` and the standard error that it is to have.
pub(crate) fn start_command(
    control: &str,
    arguments: &[&str],
    command: &mut Command,
    stderr: Stdio,
) -> Process {
    command.args(accel(arguments)).envs([THREADS_BY_TCP]);
    command.args(["--control", control]).stdout(Stdio::null()).stderr(stderr);
    let mut process = Process(command.spawn().expect("the command starts"));
    let deadline = Instant::now() + LIMIT;
    while UnixStream::connect(control).is_err() {
        if process.0.try_wait().expect("a child").is_some() {
            panic!("{arguments:?} ended: {}", last_words(&mut process));
        }
        assert!(Instant::now() < deadline, "{arguments:?} does not open its socket");
        std::thread::sleep(Duration::from_millis(5));
    }
    process
}

pub(crate) fn last_words(process: &mut Process) -> String {
    let Some(stderr) = process.0.stderr.take() else { return String::new() };
    BufReader::new(stderr).lines().map_while(Result::ok).collect::<Vec<_>>().join("\n")
}

pub(crate) fn start_guest(control: &str) -> Process {
    start(control, &["run", "--memory", "64M", "--program", PROGRAM])
}

pub(crate) fn status(control: &str) -> Value {
    json(&martlet(&["status", "--control", control, "--json"]))
}

/// Waits until `is` holds of a control socket's status.
pub(crate) fn await_status(control: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let now = status(control);
        if is(&now) {
            return now;
        }
        assert!(Instant::now() < deadline, "not {what}: {now}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn await_filled(control: &str) {
    await_status(control, "filled", |now| now["guest"]["filled"] == true);
}

pub(crate) fn checked(now: &Value) -> u64 {
    now["guest"]["verified-pages"].as_u64().expect("the built-in guest")
}
