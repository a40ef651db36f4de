//! Copies out of guest memory and into it.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is a raw pointer, because the guest may write it at any moment; the copies
// in here are bounded by the page that the pointer belongs to.

use crate::{GuestRam, LostPage, RegionIndex};
use martlet_units::{Gpa, PAGE_SIZE};

/// Why guest memory was not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The guest has no memory there.
    #[error("the guest has no memory at {0}")]
    NoMemory(Gpa),
    /// The host lost it.
    #[error(transparent)]
    Lost(#[from] LostPage),
}

/// What is in one page of a longer access.
pub(crate) struct Piece {
    pub(crate) region: RegionIndex,
    pub(crate) page: u64,
    host: *mut u8,
}

impl GuestRam {
    /// Fills `bytes` from guest memory; after an error some of it is. What the guest writes
    /// meanwhile may be seen in part, but no aligned word of up to 8 bytes.
    pub fn read(&self, from: Gpa, bytes: &mut [u8]) -> Result<(), AccessError> {
        let (mut gpa, mut rest) = (from, bytes);
        while !rest.is_empty() {
            let (piece, length) = self.piece(gpa, rest.len())?;
            let (now, later) = rest.split_at_mut(length);
            // SAFETY: `piece` promises `length` bytes of a mapping that lives as long as `self`.
            unsafe { martlet_raw_memory::read(piece.host, now) }
                .map_err(|_| self.lost(piece.region, piece.page))?;
            (gpa, rest) = (Gpa(gpa.0.saturating_add(length as u64)), later);
        }
        Ok(())
    }

    /// Writes `bytes`, as [`GuestRam::read`] reads them. `each` is told of each page after it was
    /// written, all of it or not.
    pub(crate) fn write_pages(
        &self,
        to: Gpa,
        bytes: &[u8],
        mut each: impl FnMut(RegionIndex, u64),
    ) -> Result<(), AccessError> {
        let (mut gpa, mut rest) = (to, bytes);
        while !rest.is_empty() {
            let (piece, length) = self.piece(gpa, rest.len())?;
            let (now, later) = rest.split_at(length);
            // SAFETY: as in `read`.
            let written = unsafe { martlet_raw_memory::write(piece.host, now) };
            each(piece.region, piece.page);
            written.map_err(|_| self.lost(piece.region, piece.page))?;
            (gpa, rest) = (Gpa(gpa.0.saturating_add(length as u64)), later);
        }
        Ok(())
    }

    /// The memory at `gpa`, and how many of `length` bytes its page holds.
    pub(crate) fn piece(&self, gpa: Gpa, length: usize) -> Result<(Piece, usize), AccessError> {
        let (region, page) = self.find(gpa.to_gfn()).ok_or(AccessError::NoMemory(gpa))?;
        let memory = self.region(region).ok_or(AccessError::NoMemory(gpa))?;
        let offset = (gpa.0 % PAGE_SIZE) as usize;
        let host = memory.host_ptr(page).wrapping_add(offset);
        Ok((Piece { region, page, host }, length.min(crate::PAGE_BYTES - offset)))
    }
}
