//! `bench`: one part of a migration by itself.

mod rdma;
mod vdpa;
mod zero_check;

use crate::cli::{BenchCommand, TableArgs};
use crate::failure::{Failure, one_line};
use crate::out;
use crate::output::{Picture, show_json};
use crate::view::Style;
use crate::view::table::Table;
use serde::Serialize;
use serde_json::json;

/// `martlet bench ...`.
pub(crate) fn run(command: &BenchCommand) -> Result<(), Failure> {
    match command {
        BenchCommand::Rdma(args) => measure(&args.table, |output| rdma::run(args, output)),
        BenchCommand::Vdpa(args) => measure(&args.table, |output| vdpa::run(args, output)),
        BenchCommand::ZeroCheck(args) => {
            measure(&args.table, |output| zero_check::run(args, output))
        }
    }
}

/// Where the result of a measurement goes.
pub(crate) struct TableOutput {
    json: bool,
    picture: Option<Picture>,
}

/// Measures, once it is known that the result can be written. With `--json` a failure is an object
/// too.
pub(crate) fn measure(
    args: &TableArgs,
    measure: impl FnOnce(TableOutput) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let end = Picture::open(args.svg.as_deref())
        .and_then(|picture| measure(TableOutput { json: args.json, picture }));
    if let (true, Err(failure)) = (args.json, &end)
        && !matches!(failure, Failure::Output(_))
    {
        show_json(&json!({ "error": one_line(&failure.to_string()) }));
    }
    end
}

impl TableOutput {
    /// Whether the result is for a program, which needs no tables.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints tables, or one JSON object, and writes the picture that was asked for.
    pub(crate) fn show(
        self,
        tables: &[Table],
        json: &impl Serialize,
        picture: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        if self.json {
            let text = serde_json::to_string(json)
                .map_err(|e| Failure::because("cannot write the result", &e))?;
            out(format_args!("{text}\n"))?;
        } else {
            let style = Style::of_stdout();
            let texts: Vec<String> = tables.iter().map(|table| table.render(style)).collect();
            out(format_args!("{}", texts.join("\n")))?;
        }
        if let Some(mut file) = self.picture {
            file.put(&picture());
        }
        Ok(())
    }
}
