//! A martlet process: started, asked, killed.

use super::accel::{THREADS_BY_TCP, accel};
use martlet_qmp::{Client, ClientError};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a process may take until it serves its control socket, or until it is gone.
const COMES_MAX: Duration = Duration::from_secs(60);
/// How long it may take for any command, on a host that has much else to do.
const ANSWER_MAX: Duration = Duration::from_secs(90);
/// Between two looks at a process that starts or ends.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Memory that each guest fills and then checks over and over, beside 64 MiB that it could.
const PROGRAM: &str = "fill=16M,ws=4M,rate=4/ms,tick=200us,verify=64";

/// What the guest says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guest {
    pub(crate) filled: bool,
    pub(crate) filled_pages: u64,
    pub(crate) verified: u64,
    pub(crate) wrong: u64,
    pub(crate) beats: u64,
    pub(crate) clock_steps_back: u64,
}

/// What `query-migrate` says.
#[derive(Clone, Debug)]
pub(crate) struct Migration {
    pub(crate) status: String,
    pub(crate) error: String,
    pub(crate) raw: Value,
}

/// Kills one process, from any thread. It holds the process itself and not its number, so it can
/// hit no other.
#[derive(Clone, Debug)]
pub(crate) struct Killer(Arc<OwnedFd>);

impl Killer {
    /// Like `kill -9`. One that has ended already is no error.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&*self.0, Signal::KILL);
    }
}

/// Dropping it kills it; and the kernel does, should this thread end without that.
pub(crate) struct Process {
    pub(crate) name: String,
    child: Child,
    killer: Killer,
    qmp: Client,
    log: PathBuf,
    control: PathBuf,
}

impl Process {
    /// Starts a guest; returns once it has filled its memory.
    pub(crate) fn run(dir: &Path, number: u32, vcpus: u16) -> Result<Process, String> {
        let vcpus = vcpus.to_string();
        let arguments = ["run", "--memory", "64M", "--vcpus", &vcpus, "--program", PROGRAM];
        let mut process = Process::start(dir, number, &arguments)?;
        let deadline = Instant::now() + COMES_MAX;
        while !process.guest()?.is_some_and(|guest| guest.filled) {
            if Instant::now() > deadline {
                return Err(format!("the guest of {} does not fill its memory", process.name));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(process)
    }

    /// Starts a process that waits for a guest.
    pub(crate) fn receive(dir: &Path, number: u32) -> Result<Process, String> {
        Process::receive_with(dir, number, &[])
    }

    /// As [`Process::receive`], with more options.
    pub(crate) fn receive_with(dir: &Path, number: u32, more: &[&str]) -> Result<Process, String> {
        let mut arguments = vec!["receive", "--listen", "tcp:127.0.0.1:0"];
        arguments.extend(more);
        Process::start(dir, number, &arguments)
    }

    /// From a thread that lives as long as the process shall.
    pub(crate) fn start(dir: &Path, number: u32, arguments: &[&str]) -> Result<Process, String> {
        Process::start_in(&[THREADS_BY_TCP], dir, number, arguments)
    }

    /// As [`Process::start`], with only these of the variables that martlet knows.
    pub(crate) fn start_in(
        environment: &[(&str, &str)],
        dir: &Path,
        number: u32,
        arguments: &[&str],
    ) -> Result<Process, String> {
        let (control, log) = (dir.join(format!("c{number}")), dir.join(format!("log{number}")));
        let failed = |e: std::io::Error| format!("cannot start a process: {e}");
        let child = Command::new(env!("CARGO_BIN_EXE_martlet"))
            .args(arguments)
            .args(accel(arguments))
            .env_remove(THREADS_BY_TCP.0)
            .envs(environment.iter().copied())
            .arg("--control")
            .arg(&control)
            .args(["--parent", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let mut child = Unless(Some(child));
        let pid = child.0.as_ref().map(Pid::from_child).expect("just started");
        let killer = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| failed(e.into()))?;
        let deadline = Instant::now() + COMES_MAX;
        let qmp = loop {
            match Client::connect_within(&control, ANSWER_MAX) {
                Ok(qmp) => break qmp,
                Err(ClientError::NoServer { .. } | ClientError::Gone { .. }) => {}
                Err(trouble) => return Err(format!("process {number}: {trouble}")),
            }
            if child.has_ended() || Instant::now() > deadline {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                return Err(format!("process {number} does not serve its socket: {said}"));
            }
            std::thread::sleep(LOOK_INTERVAL);
        };
        let child = child.0.take().expect("still there");
        let name = format!("{}#{number}", arguments[0]);
        Ok(Process { name, child, killer: Killer(Arc::new(killer)), qmp, log, control })
    }

    /// Memory that it holds now, and the most that it ever held, in bytes.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap_or_default();
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next());
            number.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0)
        };
        (kib("VmRSS:") << 10, kib("VmHWM:") << 10)
    }

    /// How many threads it has.
    pub(crate) fn threads(&self) -> usize {
        let path = format!("/proc/{}/task", self.child.id());
        std::fs::read_dir(path).map_or(0, Iterator::count)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn killer(&self) -> Killer {
        self.killer.clone()
    }

    pub(crate) fn control(&self) -> &Path {
        &self.control
    }

    /// All that it wrote to its standard error.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn ask(&mut self, command: &str) -> Result<Value, ClientError> {
        self.qmp.ask(command)
    }

    pub(crate) fn execute(
        &mut self,
        command: &str,
        arguments: &Value,
    ) -> Result<Value, ClientError> {
        self.qmp.execute(command, arguments)
    }

    /// The guest's words; `None` without a guest. A process that is gone is an error.
    pub(crate) fn guest(&mut self) -> Result<Option<Guest>, String> {
        match self.ask("x-query-guest") {
            Ok(value) => {
                let number = |name: &str| value[name].as_u64().unwrap_or(0);
                Ok(Some(Guest {
                    filled: value["filled"] == true,
                    filled_pages: number("filled-pages"),
                    verified: number("verified-pages"),
                    wrong: number("wrong-pages"),
                    beats: number("heartbeats"),
                    clock_steps_back: number("clock-steps-back"),
                }))
            }
            Err(ClientError::Refused { .. }) => Ok(None),
            Err(trouble) => Err(format!("{}: {trouble}", self.name)),
        }
    }

    /// How its migration stands, out or in.
    pub(crate) fn migration(&mut self) -> Result<Migration, ClientError> {
        let raw = self.ask("query-migrate")?;
        let text = |name: &str| raw[name].as_str().unwrap_or_default().to_owned();
        Ok(Migration { status: text("status"), error: text("error-desc"), raw })
    }

    /// QEMU's word for how the guest stands.
    pub(crate) fn run_state(&mut self) -> Result<String, String> {
        let status = self.ask("query-status").map_err(|e| format!("{}: {e}", self.name))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// The port where it waits for a guest.
    pub(crate) fn port(&mut self) -> Result<u16, String> {
        let migration = self.migration().map_err(|e| format!("{}: {e}", self.name))?;
        let port = migration.raw["socket-address"][0]["port"].as_str();
        port.and_then(|port| port.parse().ok())
            .ok_or_else(|| format!("{} names no port: {}", self.name, migration.raw))
    }

    /// Waits for the end of one that was killed, or that has closed its socket.
    pub(crate) fn ended(&mut self) -> Result<ExitStatus, String> {
        let deadline = Instant::now() + COMES_MAX;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_INTERVAL),
                Ok(None) => return Err(format!("{} does not end", self.name)),
                Err(error) => return Err(format!("cannot wait for {}: {error}", self.name)),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.killer.kill();
        let _ = self.child.wait();
    }
}

/// A child that is killed unless it is taken out.
struct Unless(Option<Child>);

impl Unless {
    fn has_ended(&mut self) -> bool {
        self.0.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for Unless {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
