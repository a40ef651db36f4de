//! A VMM of others' crates (kvm-ioctls, vm-memory, linux-loader) that moves its guest between two
//! processes with `martlet-engine`: an example for who writes one.
//!
//! This process boots the guest, and starts another one of itself. In each run the guest goes there,
//! timed, and comes back, both sides' memory compared while it is stopped. Through pipes each tells
//! the other where it listens.

mod device;
mod guest;
mod vcpu;
mod vm;

use clap::Parser;
use martlet_engine::{
    BuildRequest, DestinationVmm, Error, MigrateOptions, Migration, Outcome, ReceiveStatus,
    Receiver, Report,
};
use serde_json::json;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vm::{Vm, when};

pub(crate) type Fail = Box<dyn std::error::Error + Send + Sync>;

/// Longer than a move takes on a busy host.
const WAIT_MAX: Duration = Duration::from_secs(60);

#[derive(Parser)]
#[command(about = "Moves a guest between two processes")]
struct Args {
    /// How often the guest goes to the other process and comes back
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Print the result on one line
    #[arg(long)]
    json: bool,
    /// Be the other process
    #[arg(long, hide = true)]
    other: bool,
}

fn main() -> Result<(), Fail> {
    let args = Args::parse();
    if args.other {
        loop {
            send(&receive(&mut stdout())?, &mut stdin().lock(), true)?;
        }
    }
    let mut command = Command::new(std::env::current_exe()?);
    let mut other = command.arg("--other").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut to = other.stdin.take().ok_or("no pipe")?;
    let mut from = BufReader::new(other.stdout.take().ok_or("no pipe")?);
    let mut blackouts_ms = Vec::new();
    let moved = Vm::boot().and_then(|mut vm| {
        for _ in 0..args.runs {
            let switchover = send(&vm, &mut from, false)?.switchover;
            vm = receive(&mut to)?;
            let blackout = switchover.and_then(|it| it.blackout).ok_or("no blackout measured")?;
            blackouts_ms.push(blackout.as_secs_f64() * 1e3);
        }
        Ok(())
    });
    other.kill()?;
    other.wait()?;

    blackouts_ms.sort_by(f64::total_cmp);
    // Nearest rank.
    let percentile = |percent: usize| {
        blackouts_ms.get((blackouts_ms.len() * percent).div_ceil(100).checked_sub(1)?)
    };
    let result = json!({
        "outcome": if moved.is_ok() { "completed" } else { "failed" },
        "runs": blackouts_ms.len(),
        "memory_equal": moved.is_ok(),
        "blackout": {
            "p50_ms": percentile(50), "p99_ms": percentile(99), "max_ms": percentile(100),
        },
    });
    println!("{}", if args.json { format!("{result}") } else { format!("{result:#}") });
    moved
}

/// Moves the guest to where the other process says that it listens.
fn send(vm: &Arc<Vm>, from: &mut impl BufRead, verify: bool) -> Result<Report, Fail> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let to = line.trim().parse()?;
    let options = MigrateOptions { verify, ..MigrateOptions::default() };
    let migration = Migration::start(Arc::clone(vm) as _, &to, options)?;
    let report = migration.wait(WAIT_MAX).ok_or("no end")?;
    let trouble = report.switchover.as_ref().and_then(|it| it.devices.trouble.as_ref());
    let is_equal = report.transfer.memory_equal == verify.then_some(true);
    match (report.outcome, is_equal, trouble) {
        (Outcome::Completed, true, None) => Ok(report),
        other => Err(format!("the migration is {other:?}: {:?}", report.error).into()),
    }
}

/// Takes a guest in, and tells the other process where.
fn receive(to: &mut impl Write) -> Result<Arc<Vm>, Fail> {
    let build = |request: &BuildRequest<'_>| -> Result<Arc<dyn DestinationVmm>, Error> {
        Ok(Vm::build(request).map_err(when("build the VM"))?)
    };
    let receiver =
        Receiver::start(&"tcp:127.0.0.1:0".parse()?, Arc::new(build), Default::default())?;
    writeln!(to, "{}", receiver.address())?;
    match receiver.wait(WAIT_MAX) {
        ReceiveStatus::Arrived => receiver.stop(),
        other => return Err(format!("no guest has arrived: {other:?}").into()),
    }
    Ok(receiver.machine().ok_or("the guest came to no VM")?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
