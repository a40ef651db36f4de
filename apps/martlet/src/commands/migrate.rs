//! `migrate`: a client of the control socket that starts a migration and shows how it goes.

use super::follow::{self, Request};
use crate::cli::{MigrateArgs, OutputArgs};
use crate::failure::Failure;
use crate::qmp::client::Client;
use crate::report_json::{OutcomeJson, ReportJson};
use crate::signals::Held;
use crate::view::progress::{Kind, MigrationProgress};
use crate::view::timeline::Timeline;
use crate::view::{Style, number, summary, svg};
use crate::{log, out};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// `martlet migrate`.
pub(crate) fn run(args: &MigrateArgs, signals: Held) -> Result<(), Failure> {
    let interrupts = interrupts(signals)?;
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
        outcome => Err(Failure::Reported(outcome)),
    }
}

/// Counts signals from now on; the third one ends the process at once.
pub(crate) fn interrupts(signals: Held) -> Result<Arc<AtomicU32>, Failure> {
    /// Who asks this often and once more does not want to wait any longer.
    const ASKED_MAX: u32 = 2;
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    signals
        .deliver(move |signal| {
            // Relaxed: a number that only grows; nothing else hangs on it.
            if counted.fetch_add(1, Ordering::Relaxed) >= ASKED_MAX {
                log::exit(signal.exit_status());
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
