//! `migrate`: a client of the control socket that starts a migration and shows how it goes.

use super::follow::{self, Request};
use super::serve::EXIT_BY_SIGNAL;
use crate::cli::{MigrateArgs, OutputArgs};
use crate::failure::Failure;
use crate::qmp::client::Client;
use crate::report_json::{OutcomeJson, ReportJson};
use crate::view::progress::{Kind, MigrationProgress};
use crate::view::timeline::Timeline;
use crate::view::{Style, number, summary, svg};
use crate::{out, signals};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// `martlet migrate`.
pub(crate) fn run(args: &MigrateArgs) -> Result<(), Failure> {
    let interrupts = interrupts()?;
    let mut client = Client::connect(&args.control.path)?;
    let request = Request::of(args);
    let mut progress = MigrationProgress::new(Kind::suiting(args.output.json));
    let report = follow::migrate(&mut client, &request, &mut progress, &interrupts)?;
    if args.output.json {
        let json = serde_json::to_string(&report)
            .map_err(|e| Failure::because("cannot write the report", &e))?;
        out(format_args!("{json}\n"))?;
    } else {
        out(format_args!("{}", summary::render(&report, Style::of_stdout(), None)))?;
    }
    write_svg(&args.output, &report)?;
    let equal = report.memory_equal != Some(false);
    match report.outcome {
        OutcomeJson::Completed if equal => Ok(()),
        OutcomeJson::Completed
        | OutcomeJson::Failed
        | OutcomeJson::Cancelled
        | OutcomeJson::Undecided => Err(Failure::Reported),
    }
}

/// Counts SIGINT and SIGTERM from now on; the third one ends the process at once. Call it before
/// any thread exists.
pub(crate) fn interrupts() -> Result<Arc<AtomicU32>, Failure> {
    /// Signals after which somebody is taken to be out of patience.
    const PATIENCE: u32 = 2;
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    signals::on_termination(move |before| {
        counted.store(before.saturating_add(1), Ordering::Relaxed);
        if before >= PATIENCE {
            std::process::exit(EXIT_BY_SIGNAL);
        }
    })
    .map_err(|e| Failure::because("cannot take signals", &e))?;
    Ok(count)
}

/// Writes the picture that was asked for, if there was a switchover.
pub(crate) fn write_svg(output: &OutputArgs, report: &ReportJson) -> Result<(), Failure> {
    let (Some(path), Some(timeline)) = (&output.svg, Timeline::of(report)) else { return Ok(()) };
    let title = report.blackout_ms.map_or_else(
        || "switchover".to_owned(),
        |blackout| format!("switchover: {} without the guest", number::millis(blackout)),
    );
    std::fs::write(path, svg::render(&timeline, &title))
        .map_err(|e| Failure::because(format_args!("cannot write {}", path.display()), &e))
}
