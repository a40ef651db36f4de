//! Progress while something takes its time: a bar on a terminal, plain lines otherwise. Always on
//! standard error, so that standard output holds the result and nothing else.

use super::number::{bit_rate, grouped, millis, size};
use crate::log::raw_line;
use crate::report_json::OutrunJson;
use crate::snapshot::Snapshot;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use martlet_units::{ByteCount, BytesPerSec};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often a bar is drawn, a second.
const DRAWS_PER_S: u8 = 10;
/// Plain lines come at each round, but not closer than this, and at least this often.
const LINE_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// See [`LINE_INTERVAL_MIN`].
const LINE_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A bar, redrawn.
    Bar,
    /// Lines.
    Lines,
    /// Not at all.
    Quiet,
}

impl Kind {
    /// A bar on a terminal; else lines, or with `json` nothing, since a program reads it.
    pub(crate) fn suiting(json: bool) -> Kind {
        if std::io::stderr().is_terminal() {
            Kind::Bar
        } else if json {
            Kind::Quiet
        } else {
            Kind::Lines
        }
    }
}

/// Shows how a migration goes.
#[derive(Debug)]
pub(crate) struct MigrationProgress {
    kind: Kind,
    bar: ProgressBar,
    round: u32,
    last_line: Option<Instant>,
}

impl MigrationProgress {
    /// Nothing is shown before the first update.
    pub(crate) fn new(kind: Kind) -> MigrationProgress {
        let template = "  {bar:24.cyan/dim} {percent:>3}%  {wide_msg}";
        let bar = bar(kind, 0, template);
        MigrationProgress { kind, bar, round: 0, last_line: None }
    }

    /// A new look.
    pub(crate) fn update(&mut self, snapshot: &Snapshot) {
        match self.kind {
            Kind::Quiet => {}
            Kind::Bar => {
                if snapshot.ram.total > 0 {
                    self.bar.set_length(snapshot.ram.total);
                    self.bar.set_position(snapshot.done());
                }
                self.bar.set_message(line(snapshot));
            }
            Kind::Lines => {
                let since = self.last_line.map(|last| last.elapsed());
                let round = snapshot.ram.dirty_sync_count;
                let due = since.is_none_or(|since| {
                    since >= LINE_INTERVAL_MAX
                        || (round != self.round && since >= LINE_INTERVAL_MIN)
                });
                if due && !snapshot.is_final() {
                    self.round = round;
                    self.last_line = Some(Instant::now());
                    let at = snapshot.total_time;
                    raw_line(format_args!("{at:>7} ms  {}", line(snapshot)));
                }
            }
        }
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// One look in one line.
fn line(snapshot: &Snapshot) -> String {
    if snapshot.status == "setup" {
        return "connecting, building the destination".to_owned();
    }
    let round = snapshot.ram.dirty_sync_count;
    let (sent, rate) = (size(snapshot.sent()), bit_rate(snapshot.rate()));
    let mut line = format!("{sent} sent, {rate}, round {round}");
    // What the guest dirties is known from the second round on.
    if round > 1 {
        let dirty = size(ByteCount(snapshot.ram.remaining));
        let per_s = grouped(snapshot.ram.dirty_pages_rate);
        let _ = write!(line, ", {dirty} dirty, {per_s} pages/s dirtied");
    }
    if let Some(predicted) = snapshot.x_expected_downtime_ms {
        let _ = write!(line, ", blackout {} predicted", millis(predicted));
    }
    if snapshot.cpu_throttle_percentage > 0 {
        let _ = write!(line, ", guest slowed by {} %", snapshot.cpu_throttle_percentage);
    }
    if let Some(outrun) = &snapshot.x_outrun {
        let _ = write!(line, ", {}", does_not_converge(outrun));
    }
    line
}

/// What is wrong with a migration that can't end by itself, and what helps.
pub(crate) fn does_not_converge(outrun: &OutrunJson) -> String {
    format!(
        "does not converge: the guest dirties {}, the link carries {}; try --within TIME --then \
         throttle or stop, a longer --downtime-limit, or more bandwidth",
        bit_rate(BytesPerSec(outrun.dirties_bytes_per_s)),
        bit_rate(BytesPerSec(outrun.carries_bytes_per_s)),
    )
}

/// Shows that something is being waited for, and how far it is.
#[derive(Debug)]
pub(crate) struct Steps {
    bar: ProgressBar,
}

impl Steps {
    /// A bar of `total` steps; with 0, a moving mark.
    pub(crate) fn new(kind: Kind, total: u64) -> Steps {
        let template =
            if total == 0 { "  {spinner} {msg}" } else { "  {bar:24.cyan/dim} {pos}/{len}  {msg}" };
        let bar = bar(kind, total, template);
        if kind == Kind::Bar {
            bar.enable_steady_tick(Duration::from_millis(1000 / u64::from(DRAWS_PER_S)));
        }
        Steps { bar }
    }

    /// What is being done now.
    pub(crate) fn say(&self, message: String) {
        self.bar.set_message(message);
    }

    /// One more step is done.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn bar(kind: Kind, total: u64, template: &str) -> ProgressBar {
    let target = match kind {
        Kind::Bar => ProgressDrawTarget::stderr_with_hz(DRAWS_PER_S),
        Kind::Lines | Kind::Quiet => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("━╸─")),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_round_counts_what_was_looked_at() {
        let mut snapshot = Snapshot::default();
        snapshot.ram.total = 10 * 4096;
        snapshot.ram.dirty_sync_count = 1;
        assert_eq!(snapshot.done(), 0);
        snapshot.ram.normal = 2;
        snapshot.ram.x_untouched = 5;
        assert_eq!(snapshot.done(), 7 * 4096);
        snapshot.ram.dirty_sync_count = 2;
        snapshot.ram.remaining = 4096;
        assert_eq!(snapshot.done(), 9 * 4096);
        assert!(!line(&Snapshot::default()).contains("dirtied"));
    }

    #[test]
    fn a_look_fits_a_line() {
        let snapshot: Snapshot = serde_json::from_value(json!({
            "status": "active", "total-time": 120, "x-expected-downtime-ms": 0.61,
            "cpu-throttle-percentage": 20,
            "ram": {"transferred": 419_430_400u64, "remaining": 4096, "total": 1 << 30,
                    "mbps": 24_000.5, "dirty-pages-rate": 4000, "dirty-sync-count": 3,
                    "something-new": []},
            "something-else": {},
        }))
        .unwrap();
        let expected = "400 MiB sent, 24.0 Gbit/s, round 3, 4 KiB dirty, 4 000 pages/s dirtied, \
                        blackout 0.610 ms predicted, guest slowed by 20 %";
        assert_eq!(line(&snapshot), expected);
        let outrun =
            OutrunJson { dirties_bytes_per_s: 500_000_000, carries_bytes_per_s: 125_000_000 };
        let snapshot = Snapshot { x_outrun: Some(outrun), ..snapshot };
        let expected = "does not converge: the guest dirties 4.00 Gbit/s, the link carries \
                        1.00 Gbit/s; try --within TIME --then throttle or stop";
        assert!(line(&snapshot).contains(expected), "{}", line(&snapshot));
        assert!(!snapshot.is_final());
    }
}
