//! What must hold, whatever goes wrong.

use crate::destination_host::DestinationHost;
use crate::guest::Machine;
use crate::source_host::SourceHost;
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

/// What happened to the guest, as seen from outside both hosts.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    /// The guest was started at a destination.
    pub(crate) moved: bool,
    /// The process that held the permit died.
    pub(crate) died: bool,
}

impl Checker {
    /// Holds after every step.
    pub(crate) fn after_step(
        &self,
        source: &SourceHost,
        destination: &DestinationHost,
    ) -> Result<(), Violation> {
        let here = source.machine.permit.is_some();
        let there = destination.permit_holders();
        ensure(usize::from(here) + there <= 1, || {
            format!("{there} destinations and the source ({here}) may run the guest")
        })?;
        ensure(!(here && self.moved), || "the source holds the permit after the move".to_owned())
    }

    /// Holds when the destination starts the guest. `left` is the source's machine, stopped.
    pub(crate) fn at_start(
        &mut self,
        left: &Machine,
        arrived: &Machine,
        running: bool,
    ) -> Result<(), Violation> {
        ensure(!self.moved, || "the guest is started a second time".to_owned())?;
        ensure(left.permit.is_none(), || "the source still holds the permit".to_owned())?;
        let differs = left.memory.iter().zip(&arrived.memory).position(|(a, b)| a != b);
        ensure(differs.is_none(), || {
            let page = differs.unwrap_or_default();
            format!(
                "page {page} has write {} at the destination, {} at the source",
                arrived.memory[page], left.memory[page]
            )
        })?;
        ensure(left.state == arrived.state, || {
            format!("state {} at the destination, {} at the source", arrived.state, left.state)
        })?;
        ensure(running == left.wanted, || format!("running is {running}, was {}", left.wanted))?;
        self.moved = true;
        Ok(())
    }
}
