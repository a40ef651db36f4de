//! The processes of a demo: this executable again, as `run` or `receive`. They die with this one.

use super::check_interrupt;
use crate::commands::follow::{query, read};
use crate::failure::{Failure, one_line};
use crate::report_json::FramesJson;
use martlet_qmp::{Client, ClientError};
use martlet_transport::Address;
use serde::Deserialize;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// How long a process may take until it serves its control socket.
const START_MAX: Duration = Duration::from_secs(60);
/// How long it may take to end when asked to; then it is killed.
const QUIT_MAX: Duration = Duration::from_secs(10);
/// Between two looks at a process.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Most of a process's log that is looked at for its last words, in bytes.
const LOG_TAIL_MAX: usize = 1 << 16;

/// What `x-query-guest` says.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct GuestView {
    pub(super) filled: bool,
    pub(super) filled_pages: u64,
    pub(super) verified_pages: u64,
    pub(super) wrong_pages: u64,
    pub(super) heartbeats: u64,
    pub(super) clock_steps_back: u64,
    pub(super) frames: Option<FramesView>,
}

/// What it says of the guest's network cards, together.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct FramesView {
    pub(super) cards: u64,
    pub(super) cards_running: u64,
    #[serde(flatten)]
    pub(super) count: FramesJson,
}

/// What `x-query-machine` says.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct MachineView {
    pub(super) accel: String,
    pub(super) memory_bytes: u64,
    pub(super) vcpus: u16,
}

/// A process about to be started.
pub(super) struct Builder {
    arguments: Vec<String>,
    control: PathBuf,
    log: PathBuf,
    filter: Option<String>,
    environment: Vec<(&'static str, String)>,
}

impl Builder {
    /// The `number`-th process, with its files in `dir`. With a log filter, or `RUST_LOG`, its
    /// log goes to our standard error.
    pub(super) fn new(dir: &Path, number: u32, command: &str, filter: Option<&str>) -> Builder {
        let filter = filter.map(str::to_owned).or_else(|| std::env::var("RUST_LOG").ok());
        Builder {
            arguments: vec![command.to_owned()],
            control: dir.join(format!("c{number}")),
            log: dir.join(format!("log{number}")),
            filter,
            environment: Vec::new(),
        }
    }

    /// Sets a variable of its environment.
    pub(super) fn env(&mut self, name: &'static str, value: String) -> &mut Builder {
        self.environment.push((name, value));
        self
    }

    /// Adds an option.
    pub(super) fn arg(&mut self, name: &str, value: String) -> &mut Builder {
        self.arguments.push(name.to_owned());
        self.arguments.push(value);
        self
    }

    /// Starts it and connects to its control socket. Call it from the main thread: the kernel
    /// ends the process when the thread that started it has ended.
    pub(super) fn start(&self, interrupts: &AtomicU32) -> Result<Process, Failure> {
        let failed = |e: &std::io::Error| Failure::because("cannot start a process", e);
        let executable = std::env::current_exe().map_err(|e| failed(&e))?;
        let mut command = Command::new(executable);
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .arg("--control")
            .arg(&self.control)
            .args(["--parent", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // A Ctrl-C on the terminal is for us: we end them in order.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        if let Some(filter) = &self.filter {
            command.args(["--log", filter]);
        } else {
            let log = File::create(&self.log).map_err(|e| failed(&e))?;
            command.stderr(log);
        }
        let child = command.spawn().map_err(|e| failed(&e))?;
        let mut running = Running { child, log: self.log.clone() };
        let deadline = Instant::now() + START_MAX;
        loop {
            match Client::connect(&self.control) {
                Ok(client) => return Ok(Process { client, running }),
                // Not there yet; or there, and gone because the machine could not be built.
                Err(ClientError::NoServer { .. } | ClientError::Gone { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            if running.has_ended() {
                return Err(Failure::Failed(running.last_words("it ended without a word")));
            }
            check_interrupt(interrupts)?;
            if Instant::now() >= deadline {
                return Err(Failure::Failed("a process does not open its control socket".into()));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// A process of ours. Dropping it kills it.
struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// The last line of its log, which says why it ended.
    fn last_words(&self, otherwise: &str) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let tail = bytes.get(bytes.len().saturating_sub(LOG_TAIL_MAX)..).unwrap_or_default();
        let text = String::from_utf8_lossy(tail);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        let last = last.map_or_else(|| otherwise.to_owned(), one_line);
        last.strip_prefix("martlet: ").unwrap_or(&last).to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A process and the connection to its control socket.
pub(super) struct Process {
    client: Client,
    running: Running,
}

impl Process {
    /// The connection.
    pub(super) fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Whether a guest is in it.
    pub(super) fn has_guest(&mut self) -> Result<bool, Failure> {
        let value = self.client.ask("query-status");
        let value = value.map_err(|e| self.explain(e.into()))?;
        Ok(value["status"] != "inmigrate")
    }

    /// What the guest says of itself.
    pub(super) fn guest(&mut self) -> Result<GuestView, Failure> {
        let value = self.client.ask("x-query-guest");
        let value = value.map_err(|e| self.explain(e.into()))?;
        read(value, "x-query-guest")
    }

    /// What the guest is made of.
    pub(super) fn machine(&mut self) -> Result<MachineView, Failure> {
        let value = self.client.ask("x-query-machine");
        let value = value.map_err(|e| self.explain(e.into()))?;
        read(value, "x-query-machine")
    }

    /// Where a receiver listens.
    pub(super) fn address(&mut self) -> Result<Address, Failure> {
        let snapshot = query(&mut self.client)?;
        let address = snapshot.socket_address.first();
        let text = |name: &str| address.and_then(|a| a[name].as_str()).unwrap_or_default();
        let written = match text("type") {
            "inet" => format!("tcp:{}:{}", text("host"), text("port")),
            "rdma" => format!("rdma:{}:{}", text("host"), text("port")),
            _ => format!("unix:{}", text("path")),
        };
        written.parse().map_err(|e| Failure::because("the receiver's address", &e))
    }

    /// A failure to talk to a process that has ended is because it ended: its own words are
    /// better.
    pub(super) fn explain(&mut self, failure: Failure) -> Failure {
        // The connection breaks a moment before the process can be waited for.
        let deadline = Instant::now() + Duration::from_millis(200);
        while Instant::now() < deadline {
            if self.running.has_ended() {
                let words = self.running.last_words(&failure.to_string());
                return Failure::Failed(format!("a process of the demo ended: {words}"));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        failure
    }

    /// Asks it to end, and kills it if it does not.
    pub(super) fn quit(mut self) {
        if self.client.ask("quit").is_err() {
            return;
        }
        let deadline = Instant::now() + QUIT_MAX;
        while !self.running.has_ended() && Instant::now() < deadline {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}
