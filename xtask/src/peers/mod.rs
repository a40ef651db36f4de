//! The same guest moved by QEMU and by martlet, in turn, on this host, timed from outside.
//!
//! The guest writes a byte to its serial port at a steady pace, and each VMM writes that byte to
//! a FIFO. The blackout is the gap between the last byte of the source and the first of the
//! destination: what the guest's environment sees, whatever the VMM says of itself.

mod guest;
mod heartbeat;
mod vmm;

use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use vmm::Peer;

pub(crate) const USAGE: &str = "usage: cargo xtask peers [--runs N] [--memory MIB] [--fill MIB] \
[--ws MIB] [--rate PAGES] [--tick US] [--channels N] [--limit MS] [--only martlet|qemu] [--json]

Moves one guest with QEMU multifd and with martlet, in turn. Needs qemu-system-x86_64 (Debian:
qemu-system-x86), cc, mkfifo and /dev/kvm.";

/// What is compared.
pub(crate) struct Options {
    runs: usize,
    memory_mib: u64,
    fill_mib: u64,
    working_set_mib: u64,
    pages_per_tick: u64,
    tick_us: u64,
    channels: u64,
    limit_ms: u64,
    only: Option<String>,
    json: bool,
}

impl Options {
    fn parse(arguments: &[&str]) -> Result<Options, String> {
        let mut options = Options {
            runs: 5,
            memory_mib: 1024,
            fill_mib: 512,
            working_set_mib: 64,
            pages_per_tick: 1,
            tick_us: 200,
            channels: 2,
            limit_ms: 300,
            only: None,
            json: false,
        };
        let mut rest = arguments.iter();
        while let Some(&name) = rest.next() {
            if name == "--json" {
                options.json = true;
                continue;
            }
            let value = rest.next().ok_or_else(|| format!("{name} needs a value\n{USAGE}"))?;
            if name == "--only" {
                options.only = Some((*value).to_owned());
                continue;
            }
            let number =
                value.parse::<u64>().map_err(|_| format!("{name} {value}: not a number"))?;
            match name {
                "--runs" => options.runs = usize::try_from(number).unwrap_or(usize::MAX),
                "--memory" => options.memory_mib = number,
                "--fill" => options.fill_mib = number,
                "--ws" => options.working_set_mib = number,
                "--rate" => options.pages_per_tick = number,
                "--tick" => options.tick_us = number,
                "--channels" => options.channels = number,
                "--limit" => options.limit_ms = number,
                _ => return Err(format!("unknown option {name}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

/// What one migration showed.
struct Outcome {
    blackout: Duration,
    longest_other_gap: Duration,
    total: Duration,
    source_cpu: Duration,
    destination_cpu: Duration,
    /// Memory of the two processes beyond the guest's, at its highest.
    extra_mib: [u64; 2],
}

/// Runs the comparison and prints it.
pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    let kernel = guest::build()?;
    let peers: Vec<Peer> = [Peer::Qemu, Peer::Martlet(vmm::build_martlet()?)]
        .into_iter()
        .filter(|peer| options.only.as_deref().is_none_or(|only| only == peer.name()))
        .collect();
    let mut outcomes: Vec<Vec<Outcome>> = peers.iter().map(|_| Vec::new()).collect();
    for run in 0..options.runs {
        for (peer, outcomes) in peers.iter().zip(&mut outcomes) {
            let outcome = vmm::migrate(peer, &kernel, &options)
                .map_err(|error| format!("{} run {run}: {error}", peer.name()))?;
            if !options.json {
                eprintln!(
                    "{:8} blackout {:8.3} ms, total {:7.1} ms",
                    peer.name(),
                    millis(outcome.blackout),
                    millis(outcome.total),
                );
            }
            outcomes.push(outcome);
        }
    }
    if options.json {
        let rows: Vec<Value> =
            peers.iter().zip(&outcomes).map(|(peer, outcomes)| row(peer, outcomes)).collect();
        println!("{}", json!({"runs": options.runs, "peers": rows}));
    } else {
        print_table(&peers, &outcomes, &options);
    }
    Ok(())
}

fn print_table(peers: &[Peer], outcomes: &[Vec<Outcome>], options: &Options) {
    println!(
        "guest of {} MiB, {} MiB filled, {} pages every {} us in {} MiB; {} runs, in turn\n",
        options.memory_mib,
        options.fill_mib,
        options.pages_per_tick,
        options.tick_us,
        options.working_set_mib,
        options.runs,
    );
    println!("| | blackout p50 | p99 | max | total p50 | CPU p50 | beyond the guest |");
    println!("|---|---|---|---|---|---|---|");
    for (peer, outcomes) in peers.iter().zip(outcomes) {
        let row = row(peer, outcomes);
        println!(
            "| {} | {} ms | {} ms | {} ms | {} ms | {} s | {} MiB |",
            peer.name(),
            row["blackout_p50_ms"],
            row["blackout_p99_ms"],
            row["blackout_max_ms"],
            row["total_p50_ms"],
            row["cpu_p50_s"],
            row["extra_max_mib"],
        );
    }
}

fn row(peer: &Peer, outcomes: &[Outcome]) -> Value {
    let sorted = |of: &dyn Fn(&Outcome) -> f64| {
        let mut values: Vec<f64> = outcomes.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let blackouts = sorted(&|outcome| millis(outcome.blackout));
    let totals = sorted(&|outcome| millis(outcome.total));
    let cpu = sorted(&|o| (o.source_cpu + o.destination_cpu).as_secs_f64());
    let gaps = sorted(&|outcome| millis(outcome.longest_other_gap));
    json!({
        "name": peer.name(),
        "blackout_p50_ms": rank(&blackouts, 50),
        "blackout_p99_ms": rank(&blackouts, 99),
        "blackout_max_ms": rank(&blackouts, 100),
        "total_p50_ms": rank(&totals, 50),
        "cpu_p50_s": rank(&cpu, 50),
        "longest_other_gap_p50_ms": rank(&gaps, 50),
        "extra_max_mib": outcomes.iter().flat_map(|o| o.extra_mib).max(),
    })
}

/// Nearest rank, rounded to a microsecond.
fn rank(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(index).map_or(f64::NAN, |value| (value * 1000.0).round() / 1000.0)
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A folder for what a comparison needs, below the workspace's target folder.
fn folder() -> Result<PathBuf, String> {
    let folder = crate::root().join("target/peers");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    Ok(folder)
}
