//! Memory as an operation sees it: by address, and with pages that are not there.

use martlet_device_io::{BusAddress, BusMemory};
use std::collections::BTreeSet;

/// Bytes of a page as the device's translations have them.
pub(crate) const PAGE: u64 = 4096;

/// An access that found no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageFault {
    /// The first byte that is not there.
    pub(crate) at: u64,
}

/// Pages that are not mapped, whatever the bus says: a guest's untouched memory, or memory that
/// was swapped out.
#[derive(Debug, Default)]
pub(crate) struct Absent(BTreeSet<u64>);

impl Absent {
    /// Takes the pages of these bytes away.
    pub(crate) fn hide(&mut self, at: u64, bytes: u64) {
        pages(at, bytes).for_each(|page| {
            self.0.insert(page);
        });
    }

    /// Gives them back.
    pub(crate) fn show(&mut self, at: u64, bytes: u64) {
        pages(at, bytes).for_each(|page| {
            self.0.remove(&page);
        });
    }

    fn has(&self, page: u64) -> bool {
        self.0.contains(&page)
    }

    /// Whether pages of these bytes are away.
    pub(crate) fn has_any(&self, at: u64, bytes: u64) -> bool {
        span(at, bytes).is_some_and(|(first, last)| self.0.range(first..=last).next().is_some())
    }
}

fn span(at: u64, bytes: u64) -> Option<(u64, u64)> {
    let last = at.checked_add(bytes.checked_sub(1)?)?;
    Some((at / PAGE, last / PAGE))
}

fn pages(at: u64, bytes: u64) -> impl Iterator<Item = u64> {
    let (first, last) = span(at, bytes).unwrap_or((1, 0));
    first..=last
}

/// The memory of one operation.
pub(crate) struct Memory<'a> {
    pub(crate) bus: &'a dyn BusMemory,
    pub(crate) absent: &'a Absent,
}

impl Memory<'_> {
    /// Fills `into`. Before a fault nothing, or a part, was read.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), PageFault> {
        let mut at = at;
        let mut rest = into;
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut(in_page(at, rest.len()));
            let fault = PageFault { at };
            if self.absent.has(at / PAGE) {
                return Err(fault);
            }
            self.bus.read(BusAddress(at), now).map_err(|_| fault)?;
            at = next(at, now.len()).ok_or(fault)?;
            rest = later;
        }
        Ok(())
    }

    /// Writes `from`. Before a fault nothing, or a part, was written.
    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Result<(), PageFault> {
        let mut at = at;
        let mut rest = from;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(in_page(at, rest.len()));
            let fault = PageFault { at };
            if self.absent.has(at / PAGE) {
                return Err(fault);
            }
            self.bus.write(BusAddress(at), now).map_err(|_| fault)?;
            at = next(at, now.len()).ok_or(fault)?;
            rest = later;
        }
        Ok(())
    }

    /// Writes one byte after everything written before.
    pub(crate) fn publish(&self, at: u64, byte: u8) -> Result<(), PageFault> {
        let fault = PageFault { at };
        if self.absent.has(at / PAGE) {
            return Err(fault);
        }
        self.bus.store8(BusAddress(at), byte).map_err(|_| fault)
    }
}

/// How many of `bytes` bytes from `at` on are in its page.
pub(crate) fn in_page(at: u64, bytes: usize) -> usize {
    let left = PAGE - at % PAGE;
    usize::try_from(left).map_or(bytes, |left| left.min(bytes))
}

/// `at` and `bytes` further; the last byte of the address space has no next, which an access that
/// ends there does not need.
fn next(at: u64, bytes: usize) -> Option<u64> {
    Some(at.wrapping_add(u64::try_from(bytes).ok()?))
}
