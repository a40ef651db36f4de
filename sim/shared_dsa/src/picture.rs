//! The boundary as a picture.

use crate::Row;
use martlet_policy::admission::OffloadPolicy;
use std::fmt::Write as _;

/// Size of one panel's plot area, and where the first one begins.
const PLOT: (f64, f64) = (300.0, 190.0);
const ORIGIN: (f64, f64) = (64.0, 84.0);
/// From one panel to the next.
const PITCH: (f64, f64) = (400.0, 270.0);
/// A grey that can be read on white and on black.
const GREY: &str = "#808080";

/// Colour and dashes of a policy's line; the colours differ for people who see them in another
/// way, too (Okabe and Ito).
fn style(policy: &str) -> (&'static str, &'static str) {
    match policy {
        "cpu-only" => (GREY, ""),
        "block" => ("#d55e00", ""),
        "cpu-when-full" => ("#e69f00", "6 3"),
        "adaptive" => ("#0072b2", ""),
        _ => ("#009e73", "6 3"),
    }
}

/// What a panel shows.
#[derive(Clone, Copy)]
enum Value {
    Scan,
    Latency,
}

impl Value {
    fn of(self, row: &Row) -> f64 {
        match self {
            Value::Scan => row.scan_gb_s,
            Value::Latency => row.p99_us,
        }
    }

    fn title(self) -> &'static str {
        match self {
            Value::Scan => "memory checked, GB/s",
            Value::Latency => "99th percentile of a batch, us",
        }
    }
}

/// Draws, for each number of devices of a table, how the rate and the latency of each policy go with
/// the number of guests: with the most channels and the most zero pages that the table has, where
/// the devices are full first. An SVG document, readable on light and dark ground.
pub fn picture(rows: &[Row]) -> String {
    let channels = rows.iter().map(|row| row.channels).max().unwrap_or(0);
    let zero = rows.iter().map(|row| row.zero).max().unwrap_or(0);
    let shown: Vec<&Row> =
        rows.iter().filter(|row| row.channels == channels && row.zero == zero).collect();
    let mut devices: Vec<u32> = shown.iter().map(|row| row.devices).collect();
    devices.sort_unstable();
    devices.dedup();
    let panels = devices.iter().fold(0.0, |count, _| count + 1.0);
    let (width, height) = (2.0 * PITCH.0 + 24.0, ORIGIN.1 + panels * PITCH.1 - 36.0);
    let mut svg = String::new();
    let mut put = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    put(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"{GREY}\">"
    ));
    put(format!(
        "<text x=\"16\" y=\"24\" font-size=\"15\">Guests that migrate at once and share DSA devices: \
         {channels} channels each, {zero} % zero pages (modelled)</text>"
    ));
    put(legend(&shown));
    let mut top = ORIGIN.1;
    for count in devices {
        let part: Vec<&Row> = shown.iter().copied().filter(|row| row.devices == count).collect();
        for (value, left) in [(Value::Scan, ORIGIN.0), (Value::Latency, ORIGIN.0 + PITCH.0)] {
            let title = format!("{count} device{}: {}", plural(count), value.title());
            put(Panel::new(&part, value, left, top).draw(&title, &part));
        }
        top += PITCH.1;
    }
    put("</svg>".to_owned());
    svg
}

fn plural(count: u32) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn legend(rows: &[&Row]) -> String {
    let mut text = String::new();
    let mut x = 16.0;
    for policy in OffloadPolicy::ALL.map(OffloadPolicy::name) {
        if !rows.iter().any(|row| row.policy == policy) {
            continue;
        }
        let (color, dashes) = style(policy);
        let _ = write!(
            text,
            "<line x1=\"{x}\" y1=\"46\" x2=\"{}\" y2=\"46\" stroke=\"{color}\" stroke-width=\"2.5\" \
             stroke-dasharray=\"{dashes}\"/><text x=\"{}\" y=\"50\">{policy}</text>",
            x + 28.0,
            x + 34.0
        );
        x += 140.0;
    }
    text
}

/// One plot, with logarithmic axes.
struct Panel {
    value: Value,
    left: f64,
    top: f64,
    /// Decades from the lower to the upper end.
    x: (f64, f64),
    y: (f64, f64),
}

impl Panel {
    fn new(rows: &[&Row], value: Value, left: f64, top: f64) -> Panel {
        let x = decades(rows.iter().map(|row| f64::from(row.vms)));
        let y = decades(rows.iter().map(|row| value.of(row)));
        Panel { value, left, top, x, y }
    }

    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let share = |value: f64, (low, high): (f64, f64)| (value.log10() - low) / (high - low);
        let across = self.left + PLOT.0 * share(x.max(1e-9), self.x);
        (across, self.top + PLOT.1 * (1.0 - share(y.max(1e-9), self.y)))
    }

    fn draw(&self, title: &str, rows: &[&Row]) -> String {
        let mut text = String::new();
        let (left, top) = (self.left, self.top);
        let bottom = top + PLOT.1;
        // Writing to a string does not fail.
        let _ =
            write!(text, "<text x=\"{left}\" y=\"{}\" font-size=\"13\">{title}</text>", top - 8.0);
        let _ = write!(
            text,
            "<path d=\"M{left} {top}V{bottom}H{}\" fill=\"none\" stroke=\"{GREY}\"/>",
            left + PLOT.0
        );
        for value in ticks(self.y) {
            let (_, y) = self.at(1.0, value);
            let _ = write!(
                text,
                "<path d=\"M{left} {y:.1}h{}\" stroke=\"{GREY}\" stroke-opacity=\"0.25\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                PLOT.0,
                left - 6.0,
                y + 4.0,
                label(value)
            );
        }
        let mut vms: Vec<u32> = rows.iter().map(|row| row.vms).collect();
        vms.sort_unstable();
        vms.dedup();
        for count in vms {
            let (x, _) = self.at(f64::from(count), 1.0);
            let guests = if count == 1 { "1 guest".to_owned() } else { count.to_string() };
            let _ = write!(
                text,
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{guests}</text>",
                bottom + 16.0
            );
        }
        for policy in OffloadPolicy::ALL.map(OffloadPolicy::name) {
            self.line(policy, rows, &mut text);
        }
        text
    }

    fn line(&self, policy: &str, rows: &[&Row], text: &mut String) {
        let mut points: Vec<&&Row> = rows.iter().filter(|row| row.policy == policy).collect();
        points.sort_by_key(|row| row.vms);
        let (color, dashes) = style(policy);
        let mut path = String::new();
        for row in points {
            let (x, y) = self.at(f64::from(row.vms), self.value.of(row));
            let _ = write!(path, "{}{x:.1} {y:.1}", if path.is_empty() { "M" } else { "L" });
            let _ = write!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
        }
        if !path.is_empty() {
            let _ = write!(
                text,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2.5\" \
                 stroke-dasharray=\"{dashes}\"/>"
            );
        }
    }
}

/// Whole decades around the values; at least one.
fn decades(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let low = values.clone().fold(f64::INFINITY, f64::min).max(1e-3).log10().floor();
    let high = values.fold(1e-3, f64::max).log10().ceil();
    if low.is_finite() { (low, high.max(low + 1.0)) } else { (0.0, 1.0) }
}

fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let mut ticks = Vec::new();
    let mut decade = low;
    while decade <= high {
        ticks.push(10_f64.powf(decade));
        decade += 1.0;
    }
    ticks
}

fn label(value: f64) -> String {
    if value >= 1.0 { format!("{value:.0}") } else { format!("{value}") }
}
