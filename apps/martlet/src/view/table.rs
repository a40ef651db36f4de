//! Tables of figures: as text, and as a picture.

use super::svg::escape;
use super::{BOLD, FAINT, Style};
use std::fmt::Write as _;

/// Figures in rows, with what they mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    /// One line above.
    pub(crate) title: String,
    /// Heads of the columns. The first column is text, the others are figures.
    pub(crate) columns: Vec<String>,
    /// Rows of as many cells as there are columns.
    pub(crate) rows: Vec<Row>,
    /// Lines below: where the figures come from.
    pub(crate) notes: Vec<String>,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// One for each column; missing ones are empty.
    pub(crate) cells: Vec<String>,
    /// The row that the table is about.
    pub(crate) strong: bool,
}

impl Table {
    /// A table without rows.
    pub(crate) fn new(title: impl Into<String>, columns: &[&str]) -> Table {
        Table {
            title: title.into(),
            columns: columns.iter().map(|&column| column.to_owned()).collect(),
            ..Table::default()
        }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) -> &mut Row {
        self.rows.push(Row { cells: cells.into_iter().collect(), strong: false });
        self.rows.last_mut().expect("one was just added")
    }

    /// Adds a line below.
    pub(crate) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Adds another table's lines below, for one picture of several.
    pub(crate) fn append(&mut self, other: &Table) {
        let missing = other.columns.len().saturating_sub(self.columns.len());
        self.columns.extend(std::iter::repeat_n(String::new(), missing));
        self.row([other.title.clone()]).strong = true;
        self.row(other.columns.iter().cloned());
        self.rows.extend(other.rows.iter().cloned());
        for note in &other.notes {
            self.row([note.clone()]);
        }
    }

    fn cell<'a>(&self, row: &'a Row, column: usize) -> &'a str {
        row.cells.get(column).map_or("", String::as_str)
    }

    /// Columns' widths in characters.
    fn widths(&self) -> Vec<usize> {
        let width = |(index, head): (usize, &String)| {
            let cells = self.rows.iter().map(|row| self.cell(row, index).chars().count());
            cells.fold(head.chars().count(), usize::max)
        };
        self.columns.iter().enumerate().map(width).collect()
    }

    /// Several lines of text, each with its end.
    pub(crate) fn render(&self, style: Style) -> String {
        let widths = self.widths();
        let mut out = format!("{}\n", style.paint(BOLD, &self.title));
        let line = |cells: &[&str]| {
            let mut line = String::from(" ");
            for (index, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let _ = match index {
                    0 => write!(line, " {cell:<width$}"),
                    _ => write!(line, "  {cell:>width$}"),
                };
            }
            line.trim_end().to_owned()
        };
        let heads: Vec<&str> = self.columns.iter().map(String::as_str).collect();
        let _ = writeln!(out, "{}", style.paint(FAINT, &line(&heads)));
        for row in &self.rows {
            let cells: Vec<&str> =
                (0..self.columns.len()).map(|column| self.cell(row, column)).collect();
            let text = line(&cells);
            let text = if row.strong { style.paint(BOLD, &text) } else { text };
            let _ = writeln!(out, "{text}");
        }
        for note in &self.notes {
            let _ = writeln!(out, "  {}", style.paint(FAINT, note));
        }
        out
    }

    /// A whole SVG document. Readable on light and dark ground.
    pub(crate) fn svg(&self) -> String {
        const CHARACTER: f64 = 8.0;
        const GAP: f64 = 22.0;
        const LINE: f64 = 24.0;
        const EDGE: f64 = 16.0;
        #[expect(clippy::cast_precision_loss, reason = "a few dozen columns and rows")]
        let pixels = |count: usize, each: f64| count as f64 * each;
        let widths: Vec<f64> =
            self.widths().iter().map(|width| pixels(*width, CHARACTER) + GAP).collect();
        let longest = self.notes.iter().chain([&self.title]).map(|text| text.chars().count()).max();
        let text_width = pixels(longest.unwrap_or(0), CHARACTER * 0.85);
        let width = widths.iter().sum::<f64>().max(text_width) + 2.0 * EDGE;
        let lines = self.rows.len() + self.notes.len() + 3;
        let height = pixels(lines, LINE) + EDGE;
        let mut out = String::new();
        let _ = writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\" role=\"img\">\n\
             <title>{0}</title>\n\
             <rect width=\"{width:.0}\" height=\"{height:.0}\" rx=\"8\" fill=\"#fbfbf8\"/>\n\
             <text x=\"{EDGE}\" y=\"28\" font-size=\"15\" font-weight=\"600\" fill=\"#222\">{0}</text>",
            escape(&self.title)
        );
        let mut y = 28.0 + LINE + 4.0;
        let heads = Row { cells: self.columns.clone(), strong: false };
        svg_row(&mut out, &heads, &widths, EDGE, y, "#777");
        for (number, row) in self.rows.iter().enumerate() {
            y += LINE;
            if number % 2 == 0 {
                let (top, span) = (y - 16.0, width - 2.0 * EDGE);
                let _ = writeln!(
                    out,
                    "<rect x=\"{EDGE}\" y=\"{top}\" width=\"{span:.0}\" height=\"{LINE}\" \
                     fill=\"#f0f0ea\"/>"
                );
            }
            svg_row(&mut out, row, &widths, EDGE, y, if row.strong { "#a23b8a" } else { "#222" });
        }
        for note in &self.notes {
            y += LINE;
            let note = escape(note);
            let _ = writeln!(out, "<text x=\"{EDGE}\" y=\"{y}\" fill=\"#555\">{note}</text>");
        }
        out.push_str("</svg>\n");
        out
    }
}

fn svg_row(out: &mut String, row: &Row, widths: &[f64], left: f64, y: f64, colour: &str) {
    let weight = if row.strong { " font-weight=\"600\"" } else { "" };
    let mut right = left;
    for (index, (cell, width)) in row.cells.iter().zip(widths).enumerate() {
        right += width;
        let (x, anchor) = if index == 0 { (left + 4.0, "start") } else { (right - 4.0, "end") };
        let cell = escape(cell);
        let _ = writeln!(
            out,
            "<text x=\"{x:.0}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"{colour}\"{weight}>\
             {cell}</text>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Colour, Glyphs};
    use super::*;

    fn table() -> Table {
        let mut table = Table::new("suspend & resume", &["step", "serial", "batched"]);
        table.row(["suspend".to_owned(), "37.0".to_owned(), "2.5".to_owned()]).strong = true;
        table.row(["resume".to_owned(), "16.0".to_owned()]);
        table.note("measured, on a model");
        table
    }

    #[test]
    fn figures_stand_under_each_other() {
        let plain = Style { colour: Colour::Plain, glyphs: Glyphs::Unicode };
        let text = table().render(plain);
        assert_eq!(
            text,
            "suspend & resume\n  step     serial  batched\n  suspend    37.0      2.5\n  \
             resume     16.0\n  measured, on a model\n"
        );
    }

    #[test]
    fn the_picture_has_every_cell() {
        let svg = table().svg();
        for text in ["suspend &amp; resume", ">serial<", ">37.0<", ">measured, on a model<"] {
            assert!(svg.contains(text), "{text}");
        }
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }
}
