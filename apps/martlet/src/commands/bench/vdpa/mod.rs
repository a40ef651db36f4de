//! `bench vdpa`: what the two Linux series did for mlx5 vDPA, step by step, and what is left of it
//! here. The driver is martlet's, in each step with the switches as they were; the card is a model
//! with the latencies that the series' figures give.

mod downtime;
mod rig;

use super::TableOutput;
use crate::cli::BenchVdpaArgs;
use crate::failure::Failure;
use crate::report_json::{ms, round_to};
use crate::view::number::size;
use crate::view::table::Table;
use downtime::DowntimeJson;
use martlet_mlx5::Deletion;
use martlet_mlx5::options::{LinkNotifier, Options, Pace};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_model::Latencies;
use martlet_vdpa::VdpaDevice;
use rig::{Memory, resume, suspend, timed};
use serde::Serialize;
use std::time::Duration;

/// Suspends and resumes of each kind; the median counts.
const REPEATS: usize = 5;

/// The whole result.
#[derive(Debug, Serialize)]
struct BenchJson {
    devices: u16,
    queues: u16,
    memory_bytes: u64,
    suspend: SuspendJson,
    resume: ResumeJson,
    mkey: MkeyJson,
    downtime_ms: DowntimeJson,
}

/// All cards together, measured.
#[derive(Debug, Serialize)]
struct SuspendJson {
    serial_ms: f64,
    batched_unregistered_ms: f64,
    batched_ms: f64,
    martlet_ms: f64,
    commands: u64,
    window: u32,
}

#[derive(Debug, Serialize)]
struct ResumeJson {
    serial_ms: f64,
    batched_ms: f64,
    martlet_ms: f64,
    commands: u64,
    window: u32,
}

/// Keys of a map of small page lists, measured.
#[derive(Debug, Serialize)]
struct MkeyJson {
    create_speedup: f64,
    destroy_speedup: f64,
    create_serial_ms: f64,
    create_batched_ms: f64,
    destroy_serial_ms: f64,
    destroy_batched_ms: f64,
    keys: u64,
    window: u32,
}

/// `martlet bench vdpa`.
pub(crate) fn run(args: &BenchVdpaArgs, output: TableOutput) -> Result<(), Failure> {
    let memory = Memory::new(args.memory.0)?;
    let rows = switching(args, &memory)?;
    let keys = keys(&memory)?;
    let downtime = downtime::measure(args.queues, &memory)?;
    let switching = switching_table(args, &rows);
    let keys_table = keys_table(args, &keys);
    let tables = [switching, keys_table, downtime.table(args), downtime.steps_table(args)];
    let [serial, unregistered, batched, martlet] = &rows;
    let json = BenchJson {
        devices: args.devices,
        queues: args.queues,
        memory_bytes: args.memory.0,
        suspend: SuspendJson {
            serial_ms: ms(serial.suspend),
            batched_unregistered_ms: ms(unregistered.suspend),
            batched_ms: ms(batched.suspend),
            martlet_ms: ms(martlet.suspend),
            commands: batched.suspend_commands,
            window: batched.suspend_window,
        },
        resume: ResumeJson {
            serial_ms: ms(serial.resume),
            batched_ms: ms(batched.resume),
            martlet_ms: ms(martlet.resume),
            commands: batched.resume_commands,
            window: batched.resume_window,
        },
        mkey: keys,
        downtime_ms: downtime.json(),
    };
    output.show(&tables, &json, || picture(&tables))
}

/// Several tables, one below the other.
fn picture(tables: &[Table]) -> String {
    let mut all = Table::new("vDPA cards: suspend, resume, map, move", &[]);
    for table in tables {
        all.append(table);
    }
    all.svg()
}

/// One way to drive cards.
struct Switching {
    name: &'static str,
    suspend: Duration,
    resume: Duration,
    suspend_commands: u64,
    resume_commands: u64,
    suspend_window: u32,
    resume_window: u32,
}

/// Suspend and resume in four ways: before the series, its first step, the series, all steps.
fn switching(args: &BenchVdpaArgs, memory: &Memory) -> Result<[Switching; 4], Failure> {
    let notifier = LinkNotifier::Unregistered;
    let unregistered = Options { link_notifier: notifier, ..Options::LINUX_6_12 };
    let way = |name, options| switch(name, args, memory, options);
    Ok([
        way("one command after the other", Options::LINUX_6_11)?,
        way("batched, notifier unregistered", unregistered)?,
        way("batched, notifier kept", Options::LINUX_6_12)?,
        way("martlet", Options::MARTLET)?,
    ])
}

fn switch(
    name: &'static str,
    args: &BenchVdpaArgs,
    memory: &Memory,
    options: Options,
) -> Result<Switching, Failure> {
    // Fast keys: they are not what is measured here.
    let options = Options { memory: Options::MARTLET.memory, ..options };
    let latencies = Latencies::connectx6dx_from_series();
    let rigs = rig::cards(args.devices, args.queues, &latencies, options)?;
    let map = memory.map();
    rigs.iter().try_for_each(|rig| rig.start(&map))?;
    let first = rigs.first().expect("at least one card");
    let (mut suspends, mut resumes) = (Vec::new(), Vec::new());
    let (mut suspend_commands, mut resume_commands) = (0, 0);
    for _ in 0..REPEATS {
        let before = first.issued();
        suspends.push(suspend(&rigs)?);
        let between = first.issued();
        resumes.push(resume(&rigs)?);
        suspend_commands = between - before;
        resume_commands = first.issued() - between;
    }
    Ok(Switching {
        name,
        suspend: median(suspends),
        resume: median(resumes),
        suspend_commands,
        resume_commands,
        suspend_window: first.opcode(Opcode::QUERY_GENERAL_OBJECT).in_flight_max,
        resume_window: first.opcode(Opcode::MODIFY_GENERAL_OBJECT).in_flight_max,
    })
}

/// Creation and destruction of the keys of a whole map with small page lists.
fn keys(memory: &Memory) -> Result<MkeyJson, Failure> {
    let serial =
        Options { memory: Pace::Serial, deletion: Deletion::AtOnce, ..Options::LINUX_6_12 };
    let batched = Options { memory: Options::LINUX_6_12.memory, ..serial };
    let map = memory.map();
    let time = |options| {
        let rigs = rig::cards(1, 2, &Latencies::mkey_small(), options)?;
        let device = &rigs.first().expect("one card").device;
        let create = timed(|| device.set_map(&map))?;
        let made = device.command_stats().of(martlet_mlx5_abi::Opcode::CREATE_MKEY);
        let destroy = timed(|| device.set_map(&[]))?;
        Ok::<_, Failure>((create, destroy, made.issued, made.in_flight_max))
    };
    let (create_serial, destroy_serial, ..) = time(serial)?;
    let (create, destroy, keys, window) = time(batched)?;
    let speedup = |before: Duration, after: Duration| {
        round_to(before.as_secs_f64() / after.as_secs_f64().max(1e-9), 100.0)
    };
    Ok(MkeyJson {
        create_speedup: speedup(create_serial, create),
        destroy_speedup: speedup(destroy_serial, destroy),
        create_serial_ms: ms(create_serial),
        create_batched_ms: ms(create),
        destroy_serial_ms: ms(destroy_serial),
        destroy_batched_ms: ms(destroy),
        keys,
        window,
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Milliseconds in a table.
fn cell(time: Duration) -> String {
    format!("{:.2}", ms(time))
}

fn switching_table(args: &BenchVdpaArgs, rows: &[Switching]) -> Table {
    let mut table = Table::new(
        format!("suspend and resume, {} x {} virtqueues", args.devices, args.queues),
        &["", "suspend ms", "commands", "window", "resume ms", "commands", "window"],
    );
    for row in rows {
        let strong = row.name == "martlet";
        let cells = [
            row.name.to_owned(),
            cell(row.suspend),
            row.suspend_commands.to_string(),
            row.suspend_window.to_string(),
            cell(row.resume),
            row.resume_commands.to_string(),
            row.resume_window.to_string(),
        ];
        table.row(cells).strong = strong;
    }
    table.note("measured in real time; the firmware is a model with the latencies of docs/vdpa.md");
    table.note("commands and windows of one card; several cards are told first, then waited for");
    table
}

fn keys_table(args: &BenchVdpaArgs, keys: &MkeyJson) -> Table {
    let title = format!("{} keys of a {} map, small page lists", keys.keys, size(args.memory));
    let mut table = Table::new(title, &["", "serial ms", "batched ms", "times as fast"]);
    let row = |name: &str, serial: f64, batched: f64, speedup: f64| {
        [name.to_owned(), format!("{serial:.1}"), format!("{batched:.1}"), format!("{speedup:.1}")]
    };
    let MkeyJson { create_serial_ms, create_batched_ms, create_speedup, .. } = keys;
    table.row(row("create", *create_serial_ms, *create_batched_ms, *create_speedup));
    let MkeyJson { destroy_serial_ms, destroy_batched_ms, destroy_speedup, .. } = keys;
    table.row(row("destroy", *destroy_serial_ms, *destroy_batched_ms, *destroy_speedup));
    table.note(format!("measured in real time on the model; window of {}", keys.window));
    table
}
