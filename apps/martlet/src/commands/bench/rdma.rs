//! `bench rdma`: what many writes in flight bring, on the modelled NIC and measured between two
//! processes of this host.

mod measure;

use super::TableOutput;
use crate::cli::BenchRdmaArgs;
use crate::failure::Failure;
use crate::view::table::Table;
use martlet_sim_rdma::series::{Cell, Constants, Half, Table as Series, table as model};
use measure::Measured;
use serde::Serialize;

/// The cover letter's figures: downtime in ms and MiB/s, before and after.
const PUBLISHED: [[(f64, f64); 2]; 2] =
    [[(396.7, 9_952.0), (345.7, 11_639.0)], [(248.7, 5_605.0), (191.1, 9_826.0)]];

/// What `--json` prints. Field names are an interface: only add.
#[derive(Debug, Serialize)]
struct RdmaJson {
    model: ModelJson,
    measured: MeasuredJson,
}

#[derive(Debug, Serialize)]
struct ModelJson {
    pin_all: HalfJson,
    dynamic: HalfJson,
}

#[derive(Debug, Serialize)]
struct HalfJson {
    before: CellJson,
    after: CellJson,
    martlet: CellJson,
}

#[derive(Debug, Serialize)]
struct CellJson {
    downtime_ms: f64,
    mib_s: f64,
}

#[derive(Debug, Serialize)]
struct MeasuredJson {
    provider: String,
    one_in_flight_mib_s: f64,
    many_in_flight_mib_s: f64,
}

impl From<&Cell> for CellJson {
    fn from(cell: &Cell) -> CellJson {
        CellJson { downtime_ms: tenth(cell.downtime_ms), mib_s: tenth(cell.mib_s) }
    }
}

impl From<&Half> for HalfJson {
    fn from(half: &Half) -> HalfJson {
        HalfJson {
            before: (&half.before).into(),
            after: (&half.after).into(),
            martlet: (&half.martlet).into(),
        }
    }
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// `martlet bench rdma`.
pub(crate) fn run(args: &BenchRdmaArgs, output: TableOutput) -> Result<(), Failure> {
    if args.serve {
        return measure::serve(args.rdma_provider, args.address);
    }
    let series = model(&Constants::SERIES);
    let measured = measure::run(args.rdma_provider, args.address)?;
    let json = RdmaJson {
        model: ModelJson { pin_all: (&series.pin_all).into(), dynamic: (&series.dynamic).into() },
        measured: MeasuredJson {
            provider: measured.provider.clone(),
            one_in_flight_mib_s: tenth(measured.one_mib_s),
            many_in_flight_mib_s: tenth(measured.many_mib_s),
        },
    };
    let tables = [modelled(&series), real(&measured)];
    output.show(&tables, &json, || {
        let [mut all, real] = tables.clone();
        all.append(&real);
        all.svg()
    })
}

fn modelled(series: &Series) -> Table {
    let mut table = Table::new(
        "the last pages of an idle guest by RDMA, modelled",
        &["registered", "writes in flight", "downtime ms", "published", "MiB/s", "published"],
    );
    let halves = [("all at the start", &series.pin_all), ("as needed", &series.dynamic)];
    for ((name, half), published) in halves.into_iter().zip(PUBLISHED) {
        let cells = [
            ("one for each chunk", &half.before, Some(published[0])),
            ("many", &half.after, Some(published[1])),
            ("many, martlet's way", &half.martlet, None),
        ];
        for (way, cell, published) in cells {
            let row = table.row([
                name.to_owned(),
                way.to_owned(),
                format!("{:.1}", cell.downtime_ms),
                published.map_or_else(String::new, |(ms, _)| format!("{ms:.1}")),
                format!("{:.0}", cell.mib_s),
                published.map_or_else(String::new, |(_, rate)| format!("{rate:.0}")),
            ]);
            row.strong = published.is_none();
        }
    }
    table.note("virtual time: 100 Gbit/s NIC, 32 MiB chunks, 128 GiB; constants in docs/rdma.md");
    table.note("published: Yanfei Xu's series, 2026");
    table
}

fn real(measured: &Measured) -> Table {
    let mut table = Table::new(
        "scattered 4 KiB pages between two processes, measured",
        &["provider", "writes in flight", "MiB/s"],
    );
    let provider = &measured.provider;
    for (depth, rate) in [(1, measured.one_mib_s), (measure::MANY, measured.many_mib_s)] {
        table.row([provider.clone(), depth.to_string(), format!("{rate:.0}")]);
    }
    table.note(format!(
        "real time, this host; {:.1} times",
        measured.many_mib_s / measured.one_mib_s
    ));
    table
}
