//! The timeline of a switchover: one row for each thing that was done, with bars that show what
//! happened at the same time.

use super::{DESTINATION, FAINT, Glyphs, SOURCE, Style};
use crate::report_json::{PhasesJson, ReportJson, SideJson, SpanJson};
use std::fmt::Write as _;

/// Columns of the bars. With the names and times beside them a line stays below 100 columns.
const BAR_COLUMNS: usize = 48;
/// Longest name that is shown whole, in columns.
const NAME_COLUMNS_MAX: usize = 24;
/// What came before the stop is shown as far back as this share of what came after it.
const BEFORE_SHARE: f64 = 0.25;
/// What lasts until the stop is shown from its begin on, if that is not farther before the stop
/// than this many times what is shown after it.
const BEFORE_FACTOR: f64 = 3.0;
/// What comes after the guest ran again is shown until the axis is this many times as long as it
/// was stopped: a guest that beats seldom beats late.
const AFTER_FACTOR: f64 = 2.0;
/// Most rows: a report comes from another process.
const ROWS_MAX: usize = 64;
/// Marks on the axis, at most.
const TICKS_MAX: usize = 7;

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Where.
    pub(crate) side: SideJson,
    /// What.
    pub(crate) name: String,
    /// From, in us from the stop.
    pub(crate) start: f64,
    /// To, in us from the stop.
    pub(crate) end: f64,
}

/// Bars and the axis that they fit on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Timeline {
    /// In order of their start.
    pub(crate) rows: Vec<Row>,
    /// The axis' left end in us; zero or before.
    pub(crate) from: f64,
    /// The axis' right end in us.
    pub(crate) to: f64,
    /// When the guest ran again, in us.
    pub(crate) resumed: f64,
}

impl Timeline {
    /// The switchover of a report; `None` if there was none.
    pub(crate) fn of(report: &ReportJson) -> Option<Timeline> {
        let phases = phase_rows(&report.phases);
        let resumed = phases.last().map_or(0.0, |row| row.end);
        let mut rows: Vec<Row> =
            report.timeline.iter().take(ROWS_MAX).filter_map(span_row).collect();
        if rows.is_empty() {
            rows = phases.into_iter().filter(|row| row.end > row.start).collect();
        }
        rows.sort_by(|a, b| {
            (a.start, a.end).partial_cmp(&(b.start, b.end)).unwrap_or(std::cmp::Ordering::Equal)
        });
        let last = rows.iter().map(|row| row.end).fold(resumed, f64::max);
        let to = if resumed > 0.0 { last.min(resumed * AFTER_FACTOR) } else { last };
        if rows.is_empty() || to <= 0.0 {
            return None;
        }
        // What lies far before the stop would press everything else together; what lasts until the
        // stop, as the suspend of devices does, is part of the story.
        let farthest = -to * BEFORE_SHARE;
        rows.retain(|row| row.end > farthest && row.start <= to);
        let from = rows.iter().map(|row| row.start).fold(0.0, f64::min).max(-to * BEFORE_FACTOR);
        Some(Timeline { rows, from, to, resumed })
    }

    /// Distance between marks on the axis: 1, 2 or 5 times a power of ten.
    fn step(&self) -> f64 {
        let range = self.to - self.from;
        let mut power = 1.0;
        loop {
            for factor in [1.0, 2.0, 5.0] {
                #[expect(clippy::cast_precision_loss, reason = "a small constant")]
                if range / (power * factor) <= TICKS_MAX as f64 {
                    return power * factor;
                }
            }
            power *= 10.0;
        }
    }

    /// The marks inside the axis, in us.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        let step = self.step();
        let first = (self.from / step).ceil();
        (0..)
            .map(|n: u32| (first + f64::from(n)) * step + 0.0)
            .take(TICKS_MAX + 1)
            .take_while(|tick| *tick <= self.to)
            .collect()
    }

    /// The unit of the axis and how many us it has.
    pub(crate) fn unit(&self) -> (&'static str, f64) {
        if self.to < 20_000.0 { ("us", 1.0) } else { ("ms", 1000.0) }
    }

    /// Where a time lies, in cells of `1 / parts` column.
    fn place(&self, time: f64, parts: usize) -> usize {
        #[expect(clippy::cast_precision_loss, reason = "some hundred cells")]
        let cells = (BAR_COLUMNS * parts) as f64;
        let share = ((time - self.from) / (self.to - self.from)).clamp(0.0, 1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the number of cells"
        )]
        let place = (share * cells).round() as usize;
        place
    }

    /// Several lines of text, each with its end.
    pub(crate) fn render(&self, style: Style) -> String {
        let width = self.rows.iter().map(|r| r.name.chars().count().min(NAME_COLUMNS_MAX)).max();
        let width = width.unwrap_or(0);
        let (unit, unit_us) = self.unit();
        let mut out = String::new();
        let indent = 2 + 11 + 2 + width + 2;
        let axis = self.axis_line();
        let _ = writeln!(out, "{:indent$}{} {unit}", "", style.paint(FAINT, &axis));
        for row in &self.rows {
            let (colour, side) = match row.side {
                SideJson::Source => (SOURCE, "source"),
                SideJson::Destination => (DESTINATION, "destination"),
            };
            let name: String = row.name.chars().take(width).collect();
            let took = row.end - row.start;
            let decimals = usize::from(unit_us > 1.0);
            let bar = self.bar(row, style, colour);
            let side = style.paint(colour, &format!("{side:<11}"));
            let _ =
                writeln!(out, "  {side}  {name:<width$}  {bar} {:>6.decimals$}", took / unit_us);
        }
        out
    }

    fn axis_line(&self) -> String {
        let (_, unit_us) = self.unit();
        let mut line = vec![' '; BAR_COLUMNS];
        let mut free = 0;
        for tick in self.ticks() {
            let label = format!("{}", tick / unit_us);
            let at = self.place(tick, 1).max(free);
            if at + label.len() > BAR_COLUMNS {
                break;
            }
            for (cell, c) in line.iter_mut().skip(at).zip(label.chars()) {
                *cell = c;
            }
            free = at + label.len() + 1;
        }
        line.into_iter().collect()
    }

    /// The cells of one row: its bar, and guides at the stop and where the guest ran again.
    fn bar(&self, row: &Row, style: Style, colour: &str) -> String {
        let parts = match style.glyphs {
            Glyphs::Unicode => 8,
            Glyphs::Ascii => 1,
        };
        let last = BAR_COLUMNS * parts - 1;
        let start = self.place(row.start, parts).min(last);
        let end = self.place(row.end, parts).max(start + 1);
        let guides = [self.place(0.0, 1), self.place(self.resumed, 1).min(BAR_COLUMNS - 1)];
        let (mut out, mut run) = (String::new(), String::new());
        for column in 0..BAR_COLUMNS {
            let from = start.clamp(column * parts, (column + 1) * parts) - column * parts;
            let to = end.clamp(column * parts, (column + 1) * parts) - column * parts;
            if from < to {
                run.push(if parts == 1 { '#' } else { block(from, to) });
                continue;
            }
            out.push_str(&style.paint(colour, &std::mem::take(&mut run)));
            if guides.contains(&column) {
                let guide = if parts == 1 { "|" } else { "┊" };
                out.push_str(&style.paint(FAINT, guide));
            } else {
                out.push(' ');
            }
        }
        out.push_str(&style.paint(colour, &run));
        out
    }
}

/// The block element that covers a cell from `from` to `to` eighths best.
fn block(from: usize, to: usize) -> char {
    const LEFT: [char; 9] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
    match (from, to) {
        (0, to) => LEFT.get(to).copied().unwrap_or('█'),
        (1 | 2, 8) => '█',
        (3..=5, 8) => '▐',
        (_, 8) => '▕',
        (from, to) if to - from >= 3 => {
            if from + to < 8 {
                '▌'
            } else {
                '▐'
            }
        }
        (from, to) => {
            if from + to < 8 {
                '▏'
            } else {
                '▕'
            }
        }
    }
}

fn span_row(span: &SpanJson) -> Option<Row> {
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a switchover")]
    let (start, end) = (span.start_us as f64, span.end_us as f64);
    let name = crate::failure::one_line(&span.name);
    (end >= start).then_some(Row { side: span.side, name, start, end })
}

/// The phases one after the other, as the source waits for them.
fn phase_rows(phases: &PhasesJson) -> Vec<Row> {
    let mut at = 0.0;
    let named = [
        ("pause", phases.pause, SideJson::Source),
        ("final sync", phases.final_sync, SideJson::Source),
        ("final pages", phases.final_pages, SideJson::Source),
        ("CPU state", phases.cpu_state, SideJson::Source),
        ("commit", phases.commit, SideJson::Source),
        ("start", phases.start, SideJson::Destination),
    ];
    let mut rows = Vec::with_capacity(named.len());
    for (name, took, side) in named {
        let start = at;
        at += took.max(0.0);
        rows.push(Row { side, name: name.to_owned(), start, end: at });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::Colour;
    use super::*;
    use crate::report_json::tests::sample;

    const UNICODE: Style = Style { colour: Colour::Plain, glyphs: Glyphs::Unicode };
    const ASCII: Style = Style { colour: Colour::Plain, glyphs: Glyphs::Ascii };

    #[test]
    fn bars_show_what_happened_together() {
        let report = ReportJson::from(&sample());
        insta::assert_snapshot!(Timeline::of(&report).unwrap().render(UNICODE));
        insta::assert_snapshot!(Timeline::of(&report).unwrap().render(ASCII));
    }

    #[test]
    fn without_spans_the_phases_are_shown() {
        let mut report = ReportJson::from(&sample());
        report.timeline.clear();
        insta::assert_snapshot!(Timeline::of(&report).unwrap().render(UNICODE));
    }

    #[test]
    fn colours_only_where_they_are_wanted() {
        let report = ReportJson::from(&sample());
        let timeline = Timeline::of(&report).unwrap();
        assert!(!timeline.render(UNICODE).contains('\x1b'));
        let coloured = timeline.render(Style { colour: Colour::Ansi, ..UNICODE });
        assert!(coloured.contains("\x1b[36m") && coloured.contains("\x1b[35m"));
    }

    #[test]
    fn no_switchover_no_timeline() {
        let mut report = ReportJson::from(&sample());
        report.timeline.clear();
        report.phases = PhasesJson::default();
        assert_eq!(Timeline::of(&report), None);
    }

    #[test]
    fn strange_reports_are_drawn_too() {
        let mut report = ReportJson::from(&sample());
        for (start_us, end_us) in [
            (i64::MIN, i64::MAX),
            (0, 0),
            (5, 1),
            (-10, -5),
            (7, 7),
            (0, 1 << 50),
            (i64::MAX, i64::MAX),
        ] {
            report.timeline = vec![SpanJson {
                name: "x\n\u{1b}[2J".repeat(20),
                side: SideJson::Source,
                start_us,
                end_us,
            }];
            if let Some(timeline) = Timeline::of(&report) {
                for line in timeline.render(UNICODE).lines() {
                    assert!(!line.contains('\x1b'));
                }
                super::super::svg::render(&timeline, "t");
            }
        }
    }
}
