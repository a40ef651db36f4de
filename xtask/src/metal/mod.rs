//! Real kernel parts in an emulated PC: QEMU without KVM, Debian's own kernel, and a list of
//! commands that run inside.
//!
//! Hosts that build martlet often have no RDMA device. The kernel's soft-RoCE (rdma_rxe) has
//! everything but the speed: the connection manager, memory registration, queue pair states,
//! completion events, errors. Their KVM, if there is one, is often nested; the one inside is not.
//! The emulated PC boots in seconds and needs no privilege.

mod archive;
mod kvm;
mod machine;
mod modules;
mod packages;
mod rdma;
mod root;
mod summary;

use machine::Pinning;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

pub(crate) const USAGE: &str =
    "usage: cargo xtask metal rdma | kvm [--required] [--only TEXT] [--json]

Boots an emulated PC with Debian's kernel and runs inside

  rdma     the RDMA commands over its soft-RoCE
  kvm      guests under its ordinary KVM, which are moved and reset: the built-in program, timers
           that must keep their time, and one for which KVM writes memory

The Debian packages are fetched by apt once and kept in target/metal. Where it can't run it says
why and succeeds, or fails with --required. --only picks the steps whose name contains TEXT. With
--json the last line is one object: lane, kernel, passed, failed, moves, figures.

Needs qemu-system-x86_64 (Debian: qemu-system-x86), apt-get, dpkg-deb, Debian's archive keyring, tar
and xz; kvm also taskset.";

/// Why a lane did not pass.
pub(crate) enum Obstacle {
    /// This host can't run it.
    Missing(String),
    /// It ran, or should have run, and failed.
    Failed(String),
}

/// A command inside of the emulated PC.
pub(crate) struct Step {
    /// What to call it.
    name: &'static str,
    /// For the shell.
    line: String,
    /// It is stopped after this.
    limit: Duration,
}

/// What is run inside.
pub(crate) struct Lane {
    /// Kernel modules to load, with all that they need before them.
    modules: &'static [&'static str],
    /// Shell lines that prepare the machine; each must succeed.
    prepare: &'static [&'static str],
    /// Whether the verbs libraries are needed.
    verbs: bool,
    /// Programs of this workspace, to be found in the machine's `PATH`.
    programs: Vec<PathBuf>,
    /// In this order, each whatever came of those before.
    steps: Vec<Step>,
    /// Memory of the machine.
    memory_mib: u32,
    /// The whole machine is stopped after this.
    limit: Duration,
    /// Where the emulator runs.
    pinning: Pinning,
}

/// Runs a lane by its name.
pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let (&name, rest) = arguments.split_first().ok_or(USAGE)?;
    let lane = match name {
        "rdma" => rdma::run,
        "kvm" => kvm::run,
        _ => return Err(USAGE.to_owned()),
    };
    let mut rest = rest.iter();
    let (mut required, mut json, mut only) = (false, false, "");
    while let Some(&option) = rest.next() {
        match option {
            "--required" => required = true,
            "--json" => json = true,
            "--only" => only = rest.next().ok_or("--only needs a value")?,
            _ => return Err(format!("unknown option {option}\n{USAGE}")),
        }
    }
    match lane(only) {
        Ok(summary) => {
            let failure = summary.failure();
            if let Some(why) = &failure {
                eprintln!("metal {name}: {why}");
            }
            if json {
                println!("{}", summary.json());
            }
            failure.map_or(Ok(()), |_| Err(format!("metal {name} failed")))
        }
        Err(Obstacle::Missing(why)) if !required => {
            println!("metal {name}: skipped: {why}");
            Ok(())
        }
        Err(Obstacle::Missing(why) | Obstacle::Failed(why)) => Err(format!("metal {name}: {why}")),
    }
}

/// Where packages and images are kept.
fn cache() -> Result<PathBuf, Obstacle> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(crate::root())
        .output()
        .map_err(|error| failed("cargo metadata", &error))?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| failed("cargo metadata", &error))?;
    let target = metadata["target_directory"].as_str().unwrap_or("target");
    Ok(Path::new(target).join("metal"))
}

/// Builds programs by a command of cargo's and tells where they are: never a stale one.
fn build(command: &str, arguments: &[&str]) -> Result<Vec<PathBuf>, Obstacle> {
    let output = Command::new(env!("CARGO"))
        .args([command, "--message-format", "json-render-diagnostics"])
        .args(arguments)
        .current_dir(crate::root())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| failed("cargo build", &error))?;
    if !output.status.success() {
        return Err(Obstacle::Failed(format!("cargo {command} {} failed", arguments.join(" "))));
    }
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let programs: Vec<PathBuf> = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .collect();
    if programs.is_empty() {
        return Err(Obstacle::Failed(format!(
            "cargo {command} {} makes none",
            arguments.join(" ")
        )));
    }
    Ok(programs)
}

/// A copy of the one program that was built, of this name and without debug information, which
/// would be most of what the machine has to unpack.
fn renamed(built: &[PathBuf], cache: &Path, name: &str) -> Result<PathBuf, Obstacle> {
    let [program] = built else {
        return Err(Obstacle::Failed(format!("{} programs were built for {name}", built.len())));
    };
    need("strip", "binutils")?;
    let copy = cache.join(name);
    let output = Command::new("strip")
        .arg("-o")
        .args([&copy, program])
        .output()
        .map_err(|error| failed("strip", &error))?;
    if output.status.success() {
        Ok(copy)
    } else {
        Err(Obstacle::Failed(String::from_utf8_lossy(&output.stderr).into_owned()))
    }
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> Obstacle {
    Obstacle::Failed(format!("{what}: {error}"))
}

/// Fails if a tool of the host is not there.
fn need(tool: &str, package: &str) -> Result<(), Obstacle> {
    let there = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(tool).is_file()));
    let why = || Obstacle::Missing(format!("this host has no {tool} (Debian: {package})"));
    if there { Ok(()) } else { Err(why()) }
}
