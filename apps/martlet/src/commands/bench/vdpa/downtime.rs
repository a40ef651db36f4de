//! The downtimes of a whole migration, as the second series gives them, and martlet's own.
//!
//! Column 1 is the time that a card is silent when the migration begins, the longest of all cards.
//! Linux and QEMU switch to shadow virtqueues then, which takes each card down and up: queues are
//! destroyed and made again, and the map is built anew. Column 2 is the time that all cards
//! together take at the stop, one after the other: suspended, read, and reset.
//!
//! What the driver does is measured, on the model. The rest of the published figures (resets, the
//! commands that Linux issues for a queue and this driver does not, QEMU) is a constant, fitted
//! once to the six figures of the table: see [`SWITCH_REST`] and [`STOP_REST`].

use super::rig::{self, Memory, Rig, resume, suspend, timed, told};
use super::{Table, cell, ms};
use crate::cli::BenchVdpaArgs;
use crate::failure::Failure;
use crate::view::number::size;
use martlet_mlx5::Deletion;
use martlet_mlx5::options::{IndexReads, Options, Pace};
use martlet_mlx5_model::Latencies;
use martlet_vdpa::VdpaDevice;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Cards of the published table.
const CARDS: u16 = 4;

/// What a card's switch to shadow virtqueues takes beyond keys and the queues' commands as they are
/// measured here: 480 ms in the fit of the published table, less the 102 ms of those commands.
const SWITCH_REST: Duration = Duration::from_millis(378);

/// The same for a card's stop: 313.5 ms in the fit, less the 48.5 ms that are measured here.
const STOP_REST: Duration = Duration::from_millis(265);

/// Both columns, in ms.
#[derive(Debug, Serialize)]
pub(super) struct DowntimeJson {
    baseline: [f64; 2],
    parallel: [f64; 2],
    deferred: [f64; 2],
    martlet: [f64; 2],
}

/// What was measured, and what was added.
#[derive(Clone, Copy, Debug, Default)]
struct Columns {
    begin: Duration,
    begin_rest: Duration,
    stop: Duration,
    stop_rest: Duration,
}

impl Columns {
    fn totals(&self) -> [f64; 2] {
        [ms(self.begin + self.begin_rest), ms(self.stop + self.stop_rest)]
    }
}

/// All rows.
pub(super) struct Downtime {
    rows: [(&'static str, [&'static str; 2], Columns); 4],
    steps: Vec<Step>,
}

/// One thing that martlet leaves out of the stop, and what is left then.
struct Step {
    name: &'static str,
    stop: Duration,
    measured: bool,
}

/// Runs all of it, in about 15 s.
pub(super) fn measure(queues: u16, memory: &Memory) -> Result<Downtime, Failure> {
    let baseline =
        Options { memory: Pace::Serial, deletion: Deletion::AtOnce, ..Options::LINUX_6_12 };
    let parallel = Options { deletion: Deletion::AtOnce, ..Options::LINUX_6_12 };
    let deferred = linux(queues, memory, Options::LINUX_6_12)?;
    let (martlet, steps) = martlet(queues, memory, &deferred)?;
    Ok(Downtime {
        rows: [
            ("suspend batched", ["3140", "3630"], linux(queues, memory, baseline)?),
            ("+ keys batched", ["1200", "2000"], linux(queues, memory, parallel)?),
            ("+ keys deleted later", ["1014", "1253"], deferred),
            ("martlet", ["", ""], martlet),
        ],
        steps,
    })
}

/// Running cards with the whole map, each in 4 KiB pages as far as latencies go.
fn running(queues: u16, memory: &Memory, options: Options) -> Result<Vec<Rig>, Failure> {
    let rigs = rig::cards(CARDS, queues, &Latencies::mkey_large(), options)?;
    let map = memory.map();
    // The cards' firmware works side by side.
    std::thread::scope(|scope| {
        let starts: Vec<_> = rigs.iter().map(|rig| scope.spawn(|| rig.start(&map))).collect();
        starts.into_iter().try_for_each(|start| start.join().expect("no panic in a start"))
    })?;
    Ok(rigs)
}

/// What Linux and QEMU do with the cards.
fn linux(queues: u16, memory: &Memory, options: Options) -> Result<Columns, Failure> {
    let rigs = running(queues, memory, options)?;
    let map = memory.map();
    let mut columns = Columns::default();
    // The longest one counts, and all are alike: one is enough.
    let switched = rigs.first().expect("four cards");
    let begin = Instant::now();
    suspend(std::slice::from_ref(switched))?;
    switched.read_states()?;
    switched.device.reset_in_place().map_err(|e| told(&e))?;
    switched.start(&map)?;
    columns.begin = begin.elapsed();
    columns.begin_rest = SWITCH_REST;
    for rig in &rigs {
        let begin = Instant::now();
        suspend(std::slice::from_ref(rig))?;
        rig.read_states()?;
        rig.device.reset_in_place().map_err(|e| told(&e))?;
        columns.stop += begin.elapsed();
        columns.stop_rest += STOP_REST;
    }
    Ok(columns)
}

/// What martlet does: the hardware logs dirty pages, so nothing is switched at the begin; at the stop
/// all cards are suspended together, and those of the destination, which were prepared, resumed.
fn martlet(
    queues: u16,
    memory: &Memory,
    deferred: &Columns,
) -> Result<(Columns, Vec<Step>), Failure> {
    let mut steps = vec![Step {
        name: "the series: suspend, read and reset, card by card",
        stop: deferred.stop + deferred.stop_rest,
        measured: false,
    }];
    let fresh = Options { index_reads: IndexReads::Fresh, ..Options::LINUX_6_12 };
    let fresh = running(queues, memory, fresh)?;
    steps.push(step("nothing torn down or built before the guest runs again", || {
        one_by_one(&fresh)
    })?);
    drop(fresh);
    let cached = Options { index_reads: IndexReads::Cached, ..Options::LINUX_6_12 };
    let cached = running(queues, memory, cached)?;
    steps.push(step("indices from the suspend's own queries", || one_by_one(&cached))?);
    resume(&cached)?;
    steps.push(step("all cards at once", || suspend(&cached))?);
    drop(cached);

    let source = running(queues, memory, Options::MARTLET)?;
    let destination = rig::cards(CARDS, queues, &Latencies::mkey_large(), Options::MARTLET)?;
    let map = memory.map();
    for rig in &destination {
        rig.configure()?;
        rig.device.set_map(&map).map_err(|e| told(&e))?;
        rig.device.prepare().map_err(|e| told(&e))?;
    }
    let mut begin = Duration::ZERO;
    for rig in &source {
        begin = begin.max(timed(|| rig.device.set_dirty_log(true))?);
    }
    let suspended = suspend(&source)?;
    steps.push(Step {
        name: "each queue read as soon as it has stopped",
        stop: suspended,
        measured: true,
    });
    let states = source.iter().map(Rig::read_states).collect::<Result<Vec<_>, _>>()?;
    for (rig, states) in destination.iter().zip(states) {
        rig.set_states(&states)?;
    }
    let resumed = resume(&destination)?;
    steps.push(Step {
        name: "and the resume of the destination's cards, which Linux does not count",
        stop: suspended + resumed,
        measured: true,
    });
    Ok((Columns { begin, stop: suspended + resumed, ..Columns::default() }, steps))
}

fn step(
    name: &'static str,
    run: impl FnOnce() -> Result<Duration, Failure>,
) -> Result<Step, Failure> {
    Ok(Step { name, stop: run()?, measured: true })
}

/// Suspends card after card and reads its queues.
fn one_by_one(rigs: &[Rig]) -> Result<Duration, Failure> {
    let begin = Instant::now();
    for rig in rigs {
        suspend(std::slice::from_ref(rig))?;
        rig.read_states()?;
    }
    Ok(begin.elapsed())
}

impl Downtime {
    pub(super) fn json(&self) -> DowntimeJson {
        let [baseline, parallel, deferred, martlet] = &self.rows;
        DowntimeJson {
            baseline: baseline.2.totals(),
            parallel: parallel.2.totals(),
            deferred: deferred.2.totals(),
            martlet: martlet.2.totals(),
        }
    }

    pub(super) fn table(&self, args: &BenchVdpaArgs) -> Table {
        let title =
            format!("downtime, {CARDS} x {} virtqueues, {}", args.queues, size(args.memory));
        let columns = ["", "begin ms", "measured", "published", "stop ms", "measured", "published"];
        let mut table = Table::new(title, &columns);
        for (name, published, columns) in &self.rows {
            let [begin, stop] = columns.totals();
            let cells = [
                (*name).to_owned(),
                format!("{begin:.1}"),
                cell(columns.begin),
                published[0].to_owned(),
                format!("{stop:.1}"),
                cell(columns.stop),
                published[1].to_owned(),
            ];
            table.row(cells).strong = *name == "martlet";
        }
        table.note("begin: the longest silence of a card as the migration begins; stop: all cards");
        table.note(format!(
            "measured: the driver in real time on the model; the rest, {} ms and {CARDS} x {} ms,",
            SWITCH_REST.as_millis(),
            STOP_REST.as_millis()
        ));
        table.note("is what Linux and QEMU do besides, modelled: fitted to the published figures");
        table.note(
            "martlet's begin is its cards' dirty log being switched on: frames flow meanwhile",
        );
        table
    }

    pub(super) fn steps_table(&self, args: &BenchVdpaArgs) -> Table {
        let title = format!("the stop of {CARDS} x {} virtqueues, step by step", args.queues);
        let mut table = Table::new(title, &["", "stop ms", ""]);
        for step in &self.steps {
            let origin = if step.measured { "measured" } else { "measured + modelled" };
            table.row([step.name.to_owned(), cell(step.stop), origin.to_owned()]);
        }
        table
    }
}
