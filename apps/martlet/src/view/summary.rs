//! The result of a migration in words.

use super::number::{bit_rate, grouped, millis, plural, size};
use super::progress::does_not_converge;
use super::timeline::Timeline;
use super::{BOLD, GREEN, RED, Style};
use crate::report_json::{FramesJson, NetworkJson, OutcomeJson, RdmaJson, ReportJson};
use martlet_units::{ByteCount, BytesPerSec};
use std::fmt::Write as _;
use std::time::Duration;

/// The first line: what happened.
pub(crate) fn headline(report: &ReportJson, style: Style) -> String {
    let total = millis(report.total_ms);
    match report.outcome {
        OutcomeJson::Completed => {
            let mut line = format!("moved in {}", style.paint(BOLD, &total));
            if let Some(blackout) = report.blackout_ms {
                let blackout = style.paint(BOLD, &millis(blackout));
                let _ = write!(line, "; the guest stood still for {blackout}");
                if report.clock_error_ms > 0.0 {
                    let _ = write!(line, " ±{}", millis(report.clock_error_ms));
                }
            }
            if let Some(predicted) = report.predicted_blackout_ms {
                let _ = write!(line, " ({} predicted)", millis(predicted));
            }
            line
        }
        OutcomeJson::Failed => failed("failed", report, &total, style),
        OutcomeJson::Cancelled => {
            let cancelled = style.paint(BOLD, "cancelled");
            let reason = report.error.as_deref().map(crate::failure::one_line);
            let why = reason.map_or_else(String::new, |reason| format!("{reason}; "));
            let outrun = report.outrun.as_ref().map(does_not_converge);
            let how = outrun.map_or_else(String::new, |outrun| format!("\nit {outrun}"));
            format!("{cancelled} after {total}: {why}the guest goes on here{how}")
        }
        OutcomeJson::GivenUp => failed("given up", report, &total, style),
        OutcomeJson::Undecided => {
            let line = failed("undecided", report, &total, style);
            format!(
                "{line}\nthe guest stays stopped here until the destination has said what became of it; \
                 `martlet resolve` asks at once, and has a way out if it is gone"
            )
        }
    }
}

fn failed(word: &str, report: &ReportJson, total: &str, style: Style) -> String {
    let reason = report.error.as_deref().map_or("no reason given".into(), crate::failure::one_line);
    format!("{} after {total}: {reason}", style.paint(RED, word))
}

/// Everything that was measured, for people: headline, timeline, numbers. `check` replaces what
/// the guest said when it left.
pub(crate) fn render(report: &ReportJson, style: Style, check: Option<&str>) -> String {
    let mut out = headline(report, style);
    out.push('\n');
    if report.outcome != OutcomeJson::Completed {
        return out;
    }
    if let Some(timeline) = Timeline::of(report) {
        let _ = write!(out, "\n{}", timeline.render(style));
    }
    out.push('\n');
    let time = Duration::from_secs_f64((report.total_ms / 1000.0).clamp(0.0, 1e9));
    let rate = BytesPerSec::measured(ByteCount(report.bytes_sent), time);
    let mut row = |name: &str, text: &str| {
        let _ = writeln!(out, "  {name:<11}  {text}");
    };
    row(
        "sent",
        &format!(
            "{} in {} on {}, {}",
            size(ByteCount(report.bytes_sent)),
            plural(report.rounds.into(), "round"),
            plural(report.channels.into(), "channel"),
            bit_rate(rate),
        ),
    );
    let pages = &report.pages;
    row(
        "memory",
        &format!(
            "{} sent, {} zero, {} never touched{}",
            plural(pages.normal, "page"),
            grouped(pages.zero),
            grouped(pages.untouched),
            equal(report.memory_equal, style),
        ),
    );
    if let Some(apart) = report.wall_clock_difference_ms.filter(|ms| ms.abs() >= TOLD_APART_MS) {
        row("clocks", &clocks_line(apart));
    }
    if let Some(rdma) = &report.rdma {
        row("RDMA", &rdma_line(rdma, style));
    }
    if let Some(network) = &report.network {
        row("network", &network_line(network, style));
    }
    match (check, &report.guest) {
        (Some(check), _) => row("guest", check),
        (None, Some(guest)) => {
            let wrong = wrong_pages(guest.wrong_pages, style);
            row(
                "guest",
                &format!("{} checked by itself, {wrong}", plural(guest.verified_pages, "page")),
            );
        }
        (None, None) => {}
    }
    if let Some(frames) = report.guest.as_ref().and_then(|guest| guest.frames.as_ref()) {
        row("frames", &frames_line(frames, style));
    }
    let destination =
        report.destination_cpu_s.map_or(String::new(), |s| format!(", destination {s:.2} s"));
    row("CPU", &format!("source {:.2} s{destination}", report.source_cpu_s));
    out
}

/// By how much two hosts' wall clocks differ before it is worth a line.
const TOLD_APART_MS: f64 = 100.0;

fn clocks_line(apart_ms: f64) -> String {
    let which = if apart_ms < 0.0 { "behind" } else { "ahead of" };
    let apart = millis(apart_ms.abs());
    format!("the destination's wall clock is {apart} {which} the source's; the guest's goes on")
}

/// Which device wrote the memory, and why not all of it.
fn rdma_line(rdma: &RdmaJson, style: Style) -> String {
    let device = rdma.device.as_deref().unwrap_or("no device");
    let Some(reason) = &rdma.fell_back else { return format!("by {device}") };
    let reason = style.paint(RED, &crate::failure::one_line(reason));
    let again = plural(rdma.pages_again, "page");
    format!("by {device}, then over the connection ({again} again): {reason}")
}

/// How long the cards were silent, and how they were stopped and started.
fn network_line(network: &NetworkJson, style: Style) -> String {
    let cards = plural(network.cards_ms.len().try_into().unwrap_or(u64::MAX), "card");
    let mut line = match network.blackout_ms {
        Some(worst) => format!("{cards} silent for {} at most", style.paint(BOLD, &millis(worst))),
        None => cards,
    };
    let _ = write!(line, "; suspended in {}", millis(network.suspend_ms));
    if let Some(resume) = network.resume_ms {
        let _ = write!(line, ", resumed in {}", millis(resume));
    }
    if let Some(trouble) = &network.trouble {
        let trouble = crate::failure::one_line(trouble);
        let _ = write!(line, "; {}", style.paint(RED, &trouble));
    }
    line
}

/// Frames by the guest's own account.
pub(crate) fn frames_line(frames: &FramesJson, style: Style) -> String {
    let bad = frames.lost + frames.repeated + frames.damaged;
    let verdict = format!(
        "{} lost, {} repeated, {} damaged",
        grouped(frames.lost),
        grouped(frames.repeated),
        grouped(frames.damaged)
    );
    format!(
        "{} came back: {}; {} past 65535",
        plural(frames.received, "frame"),
        style.paint(if bad == 0 { GREEN } else { RED }, &verdict),
        plural(frames.index_wraps, "index wrap"),
    )
}

fn equal(equal: Option<bool>, style: Style) -> String {
    match equal {
        Some(true) => format!("; {} on both sides", style.paint(GREEN, "equal")),
        Some(false) => format!("; {}", style.paint(RED, "NOT EQUAL on both sides")),
        None => String::new(),
    }
}

/// `0 wrong`, which is well, or how many, which is not.
pub(crate) fn wrong_pages(count: u64, style: Style) -> String {
    style.paint(if count == 0 { GREEN } else { RED }, &format!("{} wrong", grouped(count)))
}

#[cfg(test)]
mod tests {
    use super::super::{Colour, Glyphs};
    use super::*;
    use crate::report_json::tests::sample;

    const PLAIN: Style = Style { colour: Colour::Plain, glyphs: Glyphs::Unicode };

    #[test]
    fn a_result_is_short() {
        let report = ReportJson::from(&sample());
        let text = render(&report, PLAIN, None);
        assert!(text.lines().all(|line| line.chars().count() <= 100));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn every_outcome_says_where_the_guest_is() {
        let mut report = ReportJson::from(&sample());
        report.error = Some("the link\nbroke".to_owned());
        report.outcome = OutcomeJson::Failed;
        assert_eq!(render(&report, PLAIN, None), "failed after 412 ms: the link broke\n");
        report.outcome = OutcomeJson::Cancelled;
        assert!(render(&report, PLAIN, None).contains("goes on here"));
        report.outcome = OutcomeJson::Undecided;
        assert!(render(&report, PLAIN, None).contains("martlet resolve"));
    }

    #[test]
    fn wrong_memory_is_not_overlooked() {
        let mut report = ReportJson::from(&sample());
        report.memory_equal = Some(false);
        assert!(render(&report, PLAIN, None).contains("NOT EQUAL"));
    }
}
