//! What happened, as lines for people and as a number for comparing two runs.

use core::fmt::{self, Write};
use martlet_units::Instant;

/// The lines of a run. Their hash is always made; they are kept only if asked for.
#[derive(Debug)]
pub(crate) struct Trace {
    hash: u64,
    kept: Option<String>,
}

impl Trace {
    /// An empty trace.
    pub(crate) fn new(keep: bool) -> Trace {
        // FNV-1a's offset basis.
        Trace { hash: 0xcbf2_9ce4_8422_2325, kept: keep.then(String::new) }
    }

    /// Adds a line.
    pub(crate) fn line(&mut self, now: Instant, text: fmt::Arguments<'_>) {
        let (seconds, nanos) = (now.0 / 1_000_000_000, now.0 % 1_000_000_000);
        writeln!(self, "{seconds:>4}.{nanos:09} {text}").expect("writing to memory does not fail");
    }

    /// A number that two runs share only if all their lines were equal.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// The lines, if they were kept.
    pub(crate) fn text(&self) -> &str {
        self.kept.as_deref().unwrap_or("(the lines were not kept)")
    }
}

impl Write for Trace {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if let Some(kept) = &mut self.kept {
            kept.push_str(text);
        }
        Ok(())
    }
}
