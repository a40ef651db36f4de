//! `migrate`: a client of the control socket that starts a migration and shows how it goes.

use super::follow::{self, Request};
use crate::cli::MigrateArgs;
use crate::failure::Failure;
use crate::output::{Picture, show_json};
use crate::report_json::{OutcomeJson, ReportJson};
use crate::signals::Held;
use crate::view::progress::{Kind, MigrationProgress};
use crate::view::{Style, summary};
use crate::{log, output};
use martlet_qmp::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// `martlet migrate`.
pub(crate) fn run(args: &MigrateArgs, signals: Held) -> Result<(), Failure> {
    let end = show(args, signals);
    if let (true, Err(failure)) = (args.output.json, &end)
        && !matches!(failure, Failure::Reported(_))
    {
        show_json(&ReportJson::of_failure(failure));
    }
    end
}

/// Migrates, and shows the report if there is one.
fn show(args: &MigrateArgs, signals: Held) -> Result<(), Failure> {
    let interrupts = interrupts(signals)?;
    let mut picture = Picture::open(args.output.svg.as_deref())?;
    let mut client = Client::connect(&args.control.path)?;
    let request = Request::of(args);
    let mut progress = MigrationProgress::new(Kind::suiting(args.output.json));
    let report = follow::migrate(&mut client, &request, &mut progress, &interrupts)?;
    if args.output.json {
        show_json(&report);
    } else {
        output::show(format_args!("{}", summary::render(&report, Style::of_stdout(), None)));
    }
    if let Some(picture) = &mut picture {
        picture.draw(&report);
    }
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
