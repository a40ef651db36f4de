//! The results, as `martlet sim dsa` prints them.

use crate::clock::float;
use crate::host::{Cell, simulate};
use crate::scenario::{Plan, Run, Scenario, run};
use martlet_policy::admission::OffloadPolicy;
use serde::Serialize;

/// CPU time of one scenario, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScenarioCpu {
    /// QEMU, by the CPU.
    pub cpu_only_ms: u64,
    /// The series.
    pub series_ms: u64,
    /// martlet, saving CPU.
    pub martlet_ms: u64,
}

/// Both scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Scenarios {
    /// Half of the pages are sent.
    pub half: ScenarioCpu,
    /// All pages are zero.
    pub zero: ScenarioCpu,
}

/// Runs both scenarios.
pub fn scenarios() -> Scenarios {
    let cpu = |scenario| ScenarioCpu {
        cpu_only_ms: run(scenario, &Plan::CPU_ONLY).cpu_ms(),
        series_ms: run(scenario, &Plan::SERIES).cpu_ms(),
        martlet_ms: run(scenario, &Plan::MARTLET).cpu_ms(),
    };
    Scenarios { half: cpu(Scenario::Half), zero: cpu(Scenario::Zero) }
}

/// What one way of doing it takes in both scenarios.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is done.
    pub name: &'static str,
    /// With half of the pages sent.
    pub half: Run,
    /// With all pages zero.
    pub zero: Run,
}

/// The ways from QEMU to martlet: first both of the series' columns; then the series with each
/// change alone; then with one change after the other, up to all of them; last, what would come on
/// top for a guest that never touched half of its zero pages.
pub fn changes() -> Vec<Change> {
    let series = Plan::SERIES;
    let no_poller = Plan { polling_thread: false, ..series };
    let two_deep = Plan { depth: 2, ..no_poller };
    let walk = Plan { channels_walk: true, ..two_deep };
    let ranges = Plan { ranges: true, ..walk };
    let plans = [
        ("CPU only", Plan::CPU_ONLY),
        ("series", series),
        ("series, no polling thread", no_poller),
        ("series, two deep", Plan { depth: 2, ..series }),
        ("series, channels walk", Plan { channels_walk: true, ..series }),
        ("series, ranges", Plan { ranges: true, ..series }),
        (
            "series, untouched half of the zero pages skipped",
            Plan { untouched_percent: 50, ..series },
        ),
        ("no polling thread, two deep", two_deep),
        ("and channels walk", walk),
        ("and ranges", ranges),
        ("and admission, saving: martlet", Plan::MARTLET),
        (
            "martlet, admission for latency",
            Plan { policy: OffloadPolicy::Adaptive, ..Plan::MARTLET },
        ),
        (
            "martlet, untouched half of the zero pages skipped",
            Plan { untouched_percent: 50, ..Plan::MARTLET },
        ),
    ];
    let change = |(name, plan): (&'static str, Plan)| Change {
        name,
        half: run(Scenario::Half, &plan),
        zero: run(Scenario::Zero, &plan),
    };
    plans.into_iter().map(change).collect()
}

/// Which cells of the table to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Guests that migrate at once.
    pub vms: Vec<u32>,
    /// Channels of each.
    pub channels: Vec<u32>,
    /// Devices.
    pub devices: Vec<u32>,
    /// Of a hundred pages, how many are zero.
    pub zero: Vec<u32>,
    /// Who decides.
    pub policies: Vec<OffloadPolicy>,
    /// Chance; the same seed gives the same table.
    pub seed: u64,
}

impl Default for Options {
    /// The whole table.
    fn default() -> Options {
        Options {
            vms: vec![1, 10, 100],
            channels: vec![1, 8],
            devices: vec![1, 8],
            zero: vec![0, 50, 90, 100],
            policies: OffloadPolicy::ALL.to_vec(),
            seed: 1,
        }
    }
}

/// Most guests and channels together, and most devices: the simulation is one of a host.
pub const LANES_MAX: u32 = 10_000;
/// See [`LANES_MAX`].
pub const DEVICES_MAX: u32 = 64;

impl Options {
    /// What is wrong with them, for people; `None` if nothing is.
    pub fn problem(&self) -> Option<String> {
        let lists = [&self.vms, &self.channels, &self.devices];
        let most_lanes =
            |lane: &u32| self.channels.iter().any(|n| n.saturating_mul(*lane) > LANES_MAX);
        if lists.iter().any(|list| list.contains(&0)) {
            Some("there is at least one VM, channel and device".to_owned())
        } else if self.vms.iter().any(most_lanes) {
            Some(format!("at most {LANES_MAX} channels of all VMs together"))
        } else if self.devices.iter().any(|devices| *devices > DEVICES_MAX) {
            Some(format!("at most {DEVICES_MAX} devices"))
        } else if self.zero.iter().any(|percent| *percent > 100) {
            Some("a share of zero pages is 0 to 100 percent".to_owned())
        } else {
            None
        }
    }
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Guests that migrate at once.
    pub vms: u32,
    /// Channels of each.
    pub channels: u32,
    /// Devices.
    pub devices: u32,
    /// Of a hundred pages, how many are zero.
    pub zero: u32,
    /// The policy's name.
    pub policy: &'static str,
    /// Guest memory checked, 10^9 bytes a second, all guests together.
    pub scan_gb_s: f64,
    /// Median latency of a batch, in microseconds.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Processors busy with finding zero pages.
    pub cpu_cores: f64,
    /// Submissions that a full device refused, a second.
    pub rejects_per_s: f64,
}

/// Runs the cells of a table.
///
/// # Panics
/// If the options have a [problem](Options::problem).
pub fn table(options: &Options) -> Vec<Row> {
    assert_eq!(options.problem(), None, "the caller has checked");
    let mut rows = Vec::new();
    for &vms in &options.vms {
        for &channels in &options.channels {
            for &devices in &options.devices {
                for &zero in &options.zero {
                    for &policy in &options.policies {
                        let seed = options.seed;
                        let cell =
                            Cell { vms, channels, devices, zero_percent: zero, policy, seed };
                        rows.push(row(&cell));
                    }
                }
            }
        }
    }
    rows
}

fn row(cell: &Cell) -> Row {
    let measured = simulate(cell);
    let us = |time: u64| rounded(float(time) / 1e6);
    Row {
        vms: cell.vms,
        channels: cell.channels,
        devices: cell.devices,
        zero: cell.zero_percent,
        policy: cell.policy.name(),
        scan_gb_s: rounded(measured.scan_bytes_per_sec / 1e9),
        p50_us: us(measured.p50_ps),
        p99_us: us(measured.p99_ps),
        cpu_cores: rounded(measured.cpu_cores),
        rejects_per_s: measured.rejects_per_sec.round(),
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Everything, in the shape of `martlet sim dsa --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The series' scenarios.
    pub scenarios: Scenarios,
    /// The table.
    pub table: Vec<Row>,
}
