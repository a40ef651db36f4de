//! Runs of guest pages as what the kernel takes: a pointer and a length.
#![allow(unsafe_code)]
// UNSAFETY: the pointers point into guest memory, which nobody may see as a reference; this
// module ties them to the life of that memory and says that they may go to another thread.

use crate::{GuestRam, RegionIndex};
use core::fmt;
use core::marker::PhantomData;
use martlet_units::PAGE_SIZE;

/// A run of pages that a peer named and that this guest does not have. Always the peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRun {
    /// No such region.
    #[error("pages of region {region}, but the guest has {regions} regions")]
    Region {
        /// What the peer named.
        region: u16,
        /// How many there are.
        regions: usize,
    },
    /// The run is empty or leaves the region.
    #[error("{count} pages from page {first_page} of region {region}, which has {pages} pages")]
    Pages {
        /// The region.
        region: u16,
        /// First page of the run.
        first_page: u64,
        /// Its length.
        count: u32,
        /// The region's length.
        pages: u64,
    },
}

/// Guest memory to hand to the kernel: whole pages at first, less while it is worked off. Never
/// read or written as a Rust slice, as the guest may write it at any moment.
#[derive(Clone, Copy)]
pub struct RawSlice<'ram> {
    start: *mut u8,
    bytes: usize,
    _ram: PhantomData<&'ram GuestRam>,
}

// SAFETY: the memory is mapped while `'ram` lasts, for every thread; the slice itself is only an
// address, and who uses it says how it is shared with the guest.
unsafe impl Send for RawSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for RawSlice<'_> {}

impl<'ram> RawSlice<'ram> {
    /// The first byte. Valid for reads and writes of [`RawSlice::len`] bytes while `'ram` lasts.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// For `readv`, `writev` and their kin.
    pub fn to_iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.start.cast(), iov_len: self.bytes }
    }

    /// Goes on behind the first `bytes` bytes, as after a short write.
    ///
    /// # Panics
    /// If it has fewer.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "{bytes} of {} bytes", self.bytes);
        // SAFETY: within the slice or one past its end, as asserted.
        self.start = unsafe { self.start.add(bytes) };
        self.bytes -= bytes;
    }
}

impl fmt::Debug for RawSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of guest memory at {:p}", self.bytes, self.start)
    }
}

impl GuestRam {
    /// The memory of `count` pages of a region, checked: for runs that a peer names.
    #[expect(clippy::cast_possible_truncation, reason = "within a mapping, so within usize")]
    pub fn slice(
        &self,
        region: RegionIndex,
        first_page: u64,
        count: u32,
    ) -> Result<RawSlice<'_>, BadRun> {
        let regions = self.regions().len();
        let memory = self.region(region).ok_or(BadRun::Region { region: region.0, regions })?;
        let pages = memory.pages();
        let end = first_page.checked_add(u64::from(count));
        if count == 0 || end.is_none_or(|end| end > pages) {
            return Err(BadRun::Pages { region: region.0, first_page, count, pages });
        }
        let bytes = (u64::from(count) * PAGE_SIZE) as usize;
        Ok(RawSlice { start: memory.host_ptr(first_page), bytes, _ram: PhantomData })
    }
}
