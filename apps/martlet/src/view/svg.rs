//! The same timeline as a picture.

use super::timeline::Timeline;
use crate::report_json::SideJson;
use std::fmt::Write as _;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 210.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 64.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const BOTTOM: f64 = 40.0;

/// A whole SVG document, with `title` above the bars. Readable on light and dark ground.
pub(crate) fn render(timeline: &Timeline, title: &str) -> String {
    #[expect(clippy::cast_precision_loss, reason = "at most some dozen rows")]
    let rows = timeline.rows.len() as f64;
    let height = TOP + rows * ROW + BOTTOM;
    let x = |time: f64| {
        let share = ((time - timeline.from) / (timeline.to - timeline.from)).clamp(0.0, 1.0);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    };
    let (unit, unit_us) = timeline.unit();
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"13\" role=\"img\">"
    );
    let _ = writeln!(out, "<title>{}</title>", escape(title));
    let _ =
        writeln!(out, "<rect width=\"{WIDTH}\" height=\"{height}\" rx=\"8\" fill=\"#fbfbf8\"/>");
    let _ = writeln!(
        out,
        "<text x=\"16\" y=\"28\" font-size=\"15\" font-weight=\"600\" fill=\"#222\">{}</text>",
        escape(title)
    );
    let floor = TOP + rows * ROW;
    for tick in timeline.ticks() {
        let (at, label) = (x(tick), tick / unit_us);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{floor}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{}\" fill=\"#777\" text-anchor=\"middle\">\
             {label} {unit}</text>",
            TOP - 6.0,
            floor + 20.0,
        );
    }
    let mut y = TOP;
    for row in &timeline.rows {
        let (colour, side) = match row.side {
            SideJson::Source => ("#2a8f9d", "source"),
            SideJson::Destination => ("#a23b8a", "destination"),
        };
        let (from, to) = (x(row.start), x(row.end).max(x(row.start) + 1.0));
        let text = y + BAR - 3.0;
        let name = escape(&row.name.chars().take(32).collect::<String>());
        let decimals = usize::from(unit_us > 1.0);
        let took = (row.end - row.start) / unit_us;
        let _ = writeln!(
            out,
            "<text x=\"16\" y=\"{text}\" fill=\"{colour}\">{side}</text>\
             <text x=\"100\" y=\"{text}\" fill=\"#333\">{name}</text>\
             <rect x=\"{from:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"2\" \
             fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{text}\" fill=\"#555\">{took:.decimals$}</text>",
            to - from,
            to + 6.0,
        );
        y += ROW;
    }
    for (time, label) in [(0.0, "stop"), (timeline.resumed, "runs again")] {
        let at = x(time);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{floor}\" stroke=\"#333\" \
             stroke-dasharray=\"3 3\"/>\
             <text x=\"{at:.1}\" y=\"{}\" fill=\"#333\" text-anchor=\"middle\">{label}</text>",
            TOP - 6.0,
            TOP - 12.0,
        );
    }
    out.push_str("</svg>\n");
    out
}

pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report_json::{ReportJson, tests::sample};

    #[test]
    fn the_picture_has_every_bar() {
        let report = ReportJson::from(&sample());
        let timeline = Timeline::of(&report).unwrap();
        let svg = render(&timeline, "a < b & \"c\"");
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;"));
        for row in &timeline.rows {
            assert!(svg.contains(&format!(">{}</text>", row.name)), "{}", row.name);
        }
        assert_eq!(svg.matches("<svg").count(), 1);
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }
}
