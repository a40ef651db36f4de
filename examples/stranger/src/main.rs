//! A VMM of others' crates (kvm-ioctls, vm-memory, linux-loader) that moves its guest between two
//! processes with `martlet-engine`: an example for who writes one.
//!
//! This process boots the guest, and starts another one of itself. In each run the guest goes there,
//! timed, and comes back, both sides' memory compared while it is stopped.

mod device;
mod guest;
mod vcpu;
mod vm;

use clap::Parser;
use martlet_engine::{
    Address, BuildRequest, DestinationVmm, Error, MigrateOptions, Migration, Outcome,
    ReceiveStatus, Receiver,
};
use serde_json::json;
use std::io::{self, BufRead, Write, stdin, stdout};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
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
    /// Be the other process, which the guest reaches at the first address and leaves to the second
    #[arg(long, hide = true, num_args = 2)]
    other: Option<Vec<Address>>,
}

fn main() -> Result<(), Fail> {
    let args = Args::parse();
    match args.other.as_deref() {
        Some([here, there]) => be_the_other(here, there),
        _ => to_and_fro(&args),
    }
}

fn to_and_fro(args: &Args) -> Result<(), Fail> {
    let socket = |name| std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
    let (here, path) = (Address::Unix(socket("stranger")), socket("stranger-other"));
    let there = Address::Unix(path.clone());
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--other").args([there.to_string(), here.to_string()]);
    let mut other = Other(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?, path);
    let mut orders = other.0.stdin.take().ok_or("no pipe")?;
    let mut answers = io::BufReader::new(other.0.stdout.take().ok_or("no pipe")?).lines();
    let mut answer = || -> Result<String, Fail> { Ok(answers.next().ok_or("it has ended")??) };

    let mut vm = Vm::boot()?;
    let mut blackouts_ms = Vec::new();
    let mut once = || -> Result<(), Fail> {
        answer()?;
        let blackout = send(&vm, &there, false)?.blackout.ok_or("no blackout was measured")?;
        vm = receive(&here, || writeln!(orders, "listening"))?;
        answer()?;
        blackouts_ms.push(blackout.as_secs_f64() * 1e3);
        Ok(())
    };
    let moved = (0..args.runs).try_for_each(|_| once());
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

/// The other process, and its socket. Both go with this one.
struct Other(Child, PathBuf);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_file(&self.1);
    }
}

fn be_the_other(here: &Address, there: &Address) -> Result<(), Fail> {
    loop {
        let vm = receive(here, || writeln!(stdout(), "listening"))?;
        stdin().lines().next().ok_or("the first process has ended")??;
        send(&vm, there, true)?;
        println!("equal");
    }
}

/// Moves the guest away.
fn send(vm: &Arc<Vm>, to: &Address, verify: bool) -> Result<martlet_engine::Report, Fail> {
    let options = MigrateOptions { verify, ..MigrateOptions::default() };
    let report =
        Migration::start(Arc::clone(vm) as _, to, options)?.wait(WAIT_MAX).ok_or("no end")?;
    let trouble = report.network.as_ref().and_then(|devices| devices.trouble.as_ref());
    let is_equal = report.memory_equal == verify.then_some(true);
    match (report.outcome, is_equal, trouble) {
        (Outcome::Completed, true, None) => Ok(report),
        other => Err(format!("the migration is {other:?}: {:?}", report.error).into()),
    }
}

/// Takes a guest in; `ready` is called when it may come.
fn receive(at: &Address, ready: impl FnOnce() -> io::Result<()>) -> Result<Arc<Vm>, Fail> {
    let last = Arc::new(Mutex::new(None));
    let kept = Arc::clone(&last);
    let factory = move |request: &BuildRequest<'_>| -> Result<Arc<dyn DestinationVmm>, Error> {
        let vm = Vm::build(request).map_err(when("build the VM"))?;
        *lock(&kept) = Some(Arc::clone(&vm));
        Ok(vm)
    };
    let receiver = Receiver::start(at, Arc::new(factory))?;
    ready()?;
    match receiver.wait(WAIT_MAX) {
        ReceiveStatus::Arrived => receiver.stop(),
        other => return Err(format!("no guest has arrived: {other:?}").into()),
    }
    Ok(lock(&last).take().ok_or("the guest came to no VM")?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
