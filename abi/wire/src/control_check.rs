//! What a well-formed control message must obey beyond its layout.

use crate::control::{
    Abandon, Alive, CHANNELS_MAX, MACHINE_BYTES_MAX, MeasuredClock, OBSERVED_BYTES_MAX,
    REASON_BYTES_MAX, REGIONS_MAX, STATE_BYTES_MAX, Setup, State, WireRange, checksum,
};
use core::time::Duration;
use martlet_units::{ClockOffset, Gfn, PageCount, PageRange};

/// A message that can be decoded and says something that no peer of ours would say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// No memory regions, or more than [`REGIONS_MAX`].
    #[error("{0} memory regions, expected 1 to {REGIONS_MAX}")]
    RegionCount(usize),
    /// A region is empty or leaves the guest physical address space.
    #[error("memory region {index}: {pages} pages from frame {start_gfn:#x} are not addressable")]
    Region {
        /// Place in [`Setup::regions`].
        index: usize,
        /// As received.
        start_gfn: u64,
        /// As received.
        pages: u64,
    },
    /// A region starts before the end of the one before it.
    #[error("memory region {0} is out of order or overlaps the one before it")]
    RegionOrder(usize),
    /// No data channels, or more than [`CHANNELS_MAX`].
    #[error("{0} data channels, expected 1 to {CHANNELS_MAX}")]
    Channels(u16),
    /// A machine description above [`MACHINE_BYTES_MAX`].
    #[error("machine description of {0} bytes, at most {MACHINE_BYTES_MAX}")]
    Machine(usize),
    /// A saved state above [`STATE_BYTES_MAX`].
    #[error("saved state of {0} bytes, at most {STATE_BYTES_MAX}")]
    State(usize),
    /// A saved state whose bytes are not those that its checksum was made of.
    #[error("saved state of {0} bytes that its checksum does not fit: it was damaged on the way")]
    Damaged(usize),
    /// An observer's report above [`OBSERVED_BYTES_MAX`].
    #[error("an observer's report of {0} bytes, at most {OBSERVED_BYTES_MAX}")]
    Observed(usize),
}

impl WireRange {
    /// The range as a checked type; `None` if it is empty or leaves the address space.
    pub fn to_page_range(self) -> Option<PageRange> {
        PageRange::try_new(Gfn(self.start_gfn), PageCount(self.pages))
    }
}

impl From<MeasuredClock> for ClockOffset {
    fn from(clock: MeasuredClock) -> ClockOffset {
        ClockOffset { ns: clock.offset_ns, error: Duration::from_nanos(clock.error_ns) }
    }
}

impl From<ClockOffset> for MeasuredClock {
    fn from(clock: ClockOffset) -> MeasuredClock {
        let error_ns = u64::try_from(clock.error.as_nanos()).unwrap_or(u64::MAX);
        MeasuredClock { offset_ns: clock.ns, error_ns }
    }
}

impl From<PageRange> for WireRange {
    fn from(range: PageRange) -> WireRange {
        WireRange { start_gfn: range.start().0, pages: range.pages().0 }
    }
}

impl Setup {
    /// The memory as checked ranges, in order and apart.
    pub fn layout(&self) -> Result<Vec<PageRange>, ValueError> {
        if !(1..=REGIONS_MAX).contains(&self.regions.len()) {
            return Err(ValueError::RegionCount(self.regions.len()));
        }
        let mut layout: Vec<PageRange> = Vec::with_capacity(self.regions.len());
        for (index, region) in self.regions.iter().enumerate() {
            let range = region.to_page_range().ok_or(ValueError::Region {
                index,
                start_gfn: region.start_gfn,
                pages: region.pages,
            })?;
            if layout.last().is_some_and(|before| range.start() < before.end()) {
                return Err(ValueError::RegionOrder(index));
            }
            layout.push(range);
        }
        Ok(layout)
    }

    pub(crate) fn check(&self) -> Result<(), ValueError> {
        self.layout()?;
        if !(1..=CHANNELS_MAX).contains(&self.channels) {
            return Err(ValueError::Channels(self.channels));
        }
        if self.machine.len() > MACHINE_BYTES_MAX {
            return Err(ValueError::Machine(self.machine.len()));
        }
        Ok(())
    }
}

impl State {
    pub(crate) fn check(&self) -> Result<(), ValueError> {
        if self.bytes.len() > STATE_BYTES_MAX {
            return Err(ValueError::State(self.bytes.len()));
        }
        Ok(())
    }

    /// Behind [`State::check`], for a state that was received.
    pub(crate) fn check_content(&self) -> Result<(), ValueError> {
        match self.checksum {
            Some(told) if told != checksum(&self.bytes) => {
                Err(ValueError::Damaged(self.bytes.len()))
            }
            Some(_) | None => Ok(()),
        }
    }
}

impl Alive {
    pub(crate) fn check(&self) -> Result<(), ValueError> {
        match &self.observed {
            Some(bytes) if bytes.len() > OBSERVED_BYTES_MAX => {
                Err(ValueError::Observed(bytes.len()))
            }
            Some(_) | None => Ok(()),
        }
    }
}

impl Abandon {
    /// A reason fit for the wire and for a terminal: one line, of bounded length.
    pub fn because(reason: impl AsRef<str>) -> Abandon {
        Abandon { reason: one_line(reason.as_ref()) }
    }
}

/// Replaces control characters (a peer must not write escape sequences to our terminal, nor break
/// our log into lines) and cuts what is too long.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len().min(REASON_BYTES_MAX));
    for character in text.chars() {
        let shown = if character.is_control() || is_format(character) { ' ' } else { character };
        if line.len() + shown.len_utf8() > REASON_BYTES_MAX {
            break;
        }
        line.push(shown);
    }
    line
}

/// Characters that reorder or hide text around them (Unicode UAX #9, and line separators).
fn is_format(character: char) -> bool {
    matches!(character,
        '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_harmless_on_a_terminal() {
        let hostile = Abandon::because("no\x1b[2J\nroom\u{202e}!");
        assert_eq!(hostile.reason, "no [2J room !");
        let long = Abandon::because("é".repeat(REASON_BYTES_MAX));
        assert_eq!(long.reason.len(), REASON_BYTES_MAX);
    }
}
