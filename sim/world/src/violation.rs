//! What must never happen.

use core::fmt;

/// Something that must never happen has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What, in one line.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Violation {}

/// A violation unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { what: what() }) }
}
