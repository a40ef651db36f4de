//! `sim`: what no single host can show.

use super::bench::{TableOutput, measure};
use crate::cli::{SimCommand, SimDsaArgs};
use crate::failure::Failure;
use crate::view::number::{grouped, plural};
use crate::view::table::Table;
use martlet_policy::admission::OffloadPolicy;
use martlet_shared_dsa::{Change, Options, Report, Row, changes, picture, scenarios, table};

/// `martlet sim ...`.
pub(crate) fn run(command: &SimCommand) -> Result<(), Failure> {
    match command {
        SimCommand::Dsa(args) => measure(&args.table, |output| dsa(args, output)),
    }
}

fn dsa(args: &SimDsaArgs, output: TableOutput) -> Result<(), Failure> {
    let policies =
        if args.policy.is_empty() { OffloadPolicy::ALL.to_vec() } else { args.policy.clone() };
    let options = Options {
        vms: args.vms.clone(),
        channels: args.channels.clone(),
        devices: args.devices.clone(),
        zero: args.zero.iter().map(|percent| u32::from(*percent)).collect(),
        policies,
        ..Options::default()
    };
    if let Some(problem) = options.problem() {
        return Err(Failure::Usage(problem));
    }
    let report = Report { scenarios: scenarios(), table: table(&options) };
    let tables = if output.is_json() {
        Vec::new()
    } else {
        let mut tables = vec![changes_table(&changes())];
        tables.extend(host_tables(&report.table));
        tables
    };
    output.show(&tables, &report, || picture(&report.table))
}

/// What the series measured, and what each change does.
fn changes_table(changes: &[Change]) -> Table {
    let mut table = Table::new(
        "one guest of 100 GB, 8 channels, one device: the series' two scenarios",
        &["", "half: CPU ms", "total ms", "blackout ms", "zero: CPU ms", "total ms", "blackout ms"],
    );
    for change in changes {
        let Change { name, half, zero } = change;
        let cells = [
            (*name).to_owned(),
            grouped(half.cpu_ms()),
            grouped(half.total_ms),
            grouped(half.blackout_ms),
            grouped(zero.cpu_ms()),
            grouped(zero.total_ms),
            grouped(zero.blackout_ms),
        ];
        table.row(cells).strong = name.ends_with(": martlet");
    }
    table.note("modelled; published for QEMU: CPU only 41 922 and 11 154 ms of CPU, 10 343 and");
    table.note("4 867 ms in all; with the series 32 568 and 8 700 ms, 9 535 and 3 888 ms in all");
    table
}

/// A table for each number of VMs, channels and devices.
fn host_tables(rows: &[Row]) -> Vec<Table> {
    let key = |row: &Row| (row.vms, row.channels, row.devices);
    rows.chunk_by(|a, b| key(a) == key(b))
        .map(|rows| {
            let title = rows.first().map_or_else(String::new, |row| {
                format!(
                    "{} with {} each, {}",
                    plural(row.vms.into(), "migrating VM"),
                    plural(row.channels.into(), "channel"),
                    plural(row.devices.into(), "device")
                )
            });
            let columns =
                ["policy", "zero %", "scan GB/s", "p50 us", "p99 us", "CPU cores", "rejects/s"];
            let mut table = Table::new(title, &columns);
            for row in rows {
                table.row([
                    row.policy.to_owned(),
                    row.zero.to_string(),
                    format!("{:.1}", row.scan_gb_s),
                    format!("{:.1}", row.p50_us),
                    format!("{:.1}", row.p99_us),
                    format!("{:.2}", row.cpu_cores),
                    format!("{:.3e}", row.rejects_per_s),
                ]);
            }
            table.note("modelled, batches of 128 pages; see docs/dsa.md");
            table
        })
        .collect()
}
