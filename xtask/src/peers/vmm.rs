//! Starting the VMMs, moving the guest, and what the processes used.

use super::heartbeat::{Heartbeat, Side};
use super::{Options, Outcome, guest};
use martlet_qmp::{Client, ClientError};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a guest may take to fill its memory, and a migration to end.
const COMES_MAX: Duration = Duration::from_secs(120);
/// How long a VMM may take to open its control socket.
const START_MAX: Duration = Duration::from_secs(20);
/// The guest runs this long before it is moved, and after.
const SETTLE: Duration = Duration::from_millis(300);

/// A VMM that can move the guest.
pub(super) enum Peer {
    Qemu,
    /// With the path of the command.
    Martlet(PathBuf),
}

impl Peer {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Peer::Qemu => "qemu",
            Peer::Martlet(_) => "martlet",
        }
    }
}

/// Builds the command for release.
pub(super) fn build_martlet() -> Result<PathBuf, String> {
    crate::cargo(&["build", "--release", "--package", "martlet"])?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| crate::root().join("target"), PathBuf::from);
    Ok(target.join("release/martlet"))
}

/// A process that is killed when it is no longer needed.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn start(mut command: Command) -> Result<Process, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(Process)
            .map_err(|error| format!("{name} does not start: {error}"))
    }

    /// CPU time used so far, that of the guest included (proc_pid_stat(5), fields 14 and 15).
    fn cpu(&self) -> Duration {
        /// The kernel's unit for these fields, whatever its own tick (USER_HZ).
        const TICKS_PER_SECOND: u64 = 100;
        let path = format!("/proc/{}/stat", self.0.id());
        let stat = std::fs::read_to_string(path).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let ticks: u64 =
            fields.split_whitespace().skip(11).take(2).filter_map(|f| f.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
    }

    /// Most memory ever held, in MiB (proc_pid_status(5), `VmHWM`).
    fn peak_mib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.0.id());
        let status = std::fs::read_to_string(path).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let kib = line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.unwrap_or(0) / 1024
    }
}

/// A private folder that goes with the run.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("peers-{}-{number}", std::process::id()));
        std::fs::create_dir(&path)
            .map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Scratch(path))
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        Heartbeat::stop(&self.join("source"));
        Heartbeat::stop(&self.join("destination"));
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16, String> {
    std::net::TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|error| format!("no free port: {error}"))
}

/// Boots the guest, moves it once, and measures.
pub(super) fn migrate(peer: &Peer, kernel: &Path, options: &Options) -> Result<Outcome, String> {
    let scratch = Scratch::new()?;
    let heartbeat = Heartbeat::default();
    heartbeat.listen(Side::Source, &scratch.join("source"))?;
    heartbeat.listen(Side::Destination, &scratch.join("destination"))?;
    let uri = format!("tcp:127.0.0.1:{}", free_port()?);
    let source = Process::start(command(peer, kernel, options, &scratch, "source", &uri))?;
    let destination =
        Process::start(command(peer, kernel, options, &scratch, "destination", &uri))?;
    let mut here = connect(&scratch.join("source.qmp"))?;
    let mut there = connect(&scratch.join("destination.qmp"))?;
    heartbeat.wait_ready(COMES_MAX)?;
    std::thread::sleep(SETTLE);
    prepare(peer, &mut here, &mut there, options, &uri)?;

    let cpu_before = [source.cpu(), destination.cpu()];
    let began = Instant::now();
    execute(&mut here, "migrate", &json!({"uri": uri}))?;
    loop {
        let info = execute(&mut here, "query-migrate", &json!({}))?;
        match info["status"].as_str() {
            Some("completed") => break,
            Some("failed") => return Err(format!("the migration failed: {}", info["error-desc"])),
            _ if began.elapsed() > COMES_MAX => return Err("the migration does not end".to_owned()),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    let total = began.elapsed();
    let [source_cpu, destination_cpu] =
        [source.cpu() - cpu_before[0], destination.cpu() - cpu_before[1]];
    std::thread::sleep(SETTLE);
    let (blackout, longest_other_gap) = heartbeat.gaps(began)?;
    let touched = options.fill_mib;
    Ok(Outcome {
        blackout,
        longest_other_gap,
        total,
        source_cpu,
        destination_cpu,
        extra_mib: [&source, &destination].map(|side| side.peak_mib().saturating_sub(touched)),
    })
}

/// Connects as soon as the socket is there.
fn connect(path: &Path) -> Result<Client, String> {
    let deadline = Instant::now() + START_MAX;
    loop {
        match Client::connect(path) {
            Ok(client) => return Ok(client),
            Err(ClientError::NoServer { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn execute(client: &mut Client, command: &str, arguments: &Value) -> Result<Value, String> {
    client.execute(command, arguments).map_err(|error| format!("{command}: {error}"))
}

fn prepare(
    peer: &Peer,
    here: &mut Client,
    there: &mut Client,
    options: &Options,
    uri: &str,
) -> Result<(), String> {
    let parameters = json!({
        "downtime-limit": options.limit_ms,
        "max-bandwidth": 1u64 << 40,
        "multifd-channels": options.channels,
    });
    match peer {
        Peer::Qemu => {
            let multifd = json!({"capabilities": [{"capability": "multifd", "state": true}]});
            for side in [&mut *here, &mut *there] {
                execute(side, "migrate-set-capabilities", &multifd)?;
                execute(side, "migrate-set-parameters", &parameters)?;
            }
            execute(there, "migrate-incoming", &json!({"uri": uri}))?;
        }
        // It has no limit to lift, and a limit of a terabyte is one.
        Peer::Martlet(_) => {
            let Value::Object(mut parameters) = parameters else { unreachable!("an object") };
            parameters.remove("max-bandwidth");
            execute(here, "migrate-set-parameters", &Value::Object(parameters))?;
        }
    }
    Ok(())
}

fn command(
    peer: &Peer,
    kernel: &Path,
    options: &Options,
    scratch: &Scratch,
    side: &str,
    uri: &str,
) -> Command {
    let line = format!(
        "fill={} ws={} rate={} tick={} khz={}",
        options.fill_mib,
        options.working_set_mib,
        options.pages_per_tick,
        options.tick_us,
        guest::tsc_khz(),
    );
    let control = scratch.join(&format!("{side}.qmp"));
    let serial = scratch.join(side);
    match peer {
        Peer::Qemu => {
            let mut command = Command::new("qemu-system-x86_64");
            let memory =
                format!("memory-backend-ram,id=m0,size={}M,reserve=off", options.memory_mib);
            command
                // ARCH_CAPABILITIES can't be set where KVM is nested in software.
                .args(["-enable-kvm", "-cpu", "host,-arch-capabilities", "-nodefaults"])
                .args(["-M", "microvm,isa-serial=on,memory-backend=m0", "-display", "none"])
                .args(["-object", &memory, "-m", &options.memory_mib.to_string(), "-no-reboot"])
                .arg("-kernel")
                .arg(kernel)
                .args(["-append", &line, "-serial", "chardev:s"])
                .args(["-chardev", &format!("file,id=s,path={}", serial.display())])
                .args(["-qmp", &format!("unix:{},server=on,wait=off", control.display())]);
            if side == "destination" {
                command.args(["-incoming", "defer"]);
            }
            command
        }
        Peer::Martlet(path) => {
            let mut command = Command::new(path);
            let memory = format!("{}M", options.memory_mib);
            if side == "destination" {
                // What it boots from comes with it.
                let most = format!("{}M", options.memory_mib * 2);
                command.args(["receive", "--listen", uri, "--memory-max", &most]);
            } else {
                command.args(["run", "--memory", &memory]);
                command.arg("--kernel").arg(kernel).args(["--cmdline", &line]);
            }
            command.arg("--control").arg(control);
            command.arg("--serial").arg(format!("file:{}", serial.display()));
            command
        }
    }
}
