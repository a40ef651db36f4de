//! `bench`: one part of a migration by itself.

mod rdma;
mod vdpa;
mod zero_check;

use crate::cli::{BenchCommand, TableArgs};
use crate::failure::Failure;
use crate::out;
use crate::view::Style;
use crate::view::table::Table;
use serde::Serialize;

/// `martlet bench ...`.
pub(crate) fn run(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Rdma(args) => rdma::run(args),
        BenchCommand::Vdpa(args) => vdpa::run(args),
        BenchCommand::ZeroCheck(args) => zero_check::run(args),
    }
}

/// Prints tables, or one JSON object, and writes the picture that was asked for.
pub(crate) fn show(
    args: &TableArgs,
    tables: &[Table],
    json: &impl Serialize,
    picture: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if args.json {
        let text = serde_json::to_string(json)
            .map_err(|e| Failure::because("cannot write the result", &e))?;
        out(format_args!("{text}\n"))?;
    } else {
        let style = Style::of_stdout();
        let texts: Vec<String> = tables.iter().map(|table| table.render(style)).collect();
        out(format_args!("{}", texts.join("\n")))?;
    }
    let Some(path) = &args.svg else { return Ok(()) };
    std::fs::write(path, picture())
        .map_err(|e| Failure::because(format_args!("cannot write {}", path.display()), &e))
}
