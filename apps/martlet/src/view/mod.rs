//! What people see: progress, the timeline of a switchover, numbers.

pub(crate) mod number;
pub(crate) mod progress;
pub(crate) mod summary;
pub(crate) mod svg;
pub(crate) mod table;
pub(crate) mod timeline;

use std::io::IsTerminal;

/// How text may look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Style {
    /// Escape sequences for colour are understood.
    pub(crate) colour: Colour,
    /// Which characters bars are made of.
    pub(crate) glyphs: Glyphs,
}

/// Whether to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    /// ANSI escape sequences.
    Ansi,
    /// None.
    Plain,
}

/// Which characters to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Glyphs {
    /// Block elements.
    Unicode,
    /// For a locale that has no others.
    Ascii,
}

impl Style {
    /// What suits standard output: colours on a terminal unless `NO_COLOR` is set; ASCII if the
    /// locale says so.
    pub(crate) fn of_stdout() -> Style {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let dumb = set("TERM").is_some_and(|term| term == "dumb");
        let terminal = std::io::stdout().is_terminal();
        let colour = if terminal && !dumb && set("NO_COLOR").is_none() {
            Colour::Ansi
        } else {
            Colour::Plain
        };
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG"));
        let ascii = locale.is_some_and(|locale| {
            let locale = locale.to_ascii_lowercase();
            !locale.contains("utf-8") && !locale.contains("utf8")
        });
        // Only a terminal draws by its locale; a file or pipe is read as UTF-8.
        let glyphs = if ascii && terminal { Glyphs::Ascii } else { Glyphs::Unicode };
        Style { colour, glyphs }
    }

    /// `text` in an ANSI colour, where there are colours.
    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        match self.colour {
            Colour::Ansi if !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            Colour::Ansi | Colour::Plain => text.to_owned(),
        }
    }
}

/// Bold.
pub(crate) const BOLD: &str = "1";
/// Faint.
pub(crate) const FAINT: &str = "2";
/// Red, for what went wrong.
pub(crate) const RED: &str = "31";
/// Green, for what is well.
pub(crate) const GREEN: &str = "32";
/// The source's bars.
pub(crate) const SOURCE: &str = "36";
/// The destination's bars.
pub(crate) const DESTINATION: &str = "35";
