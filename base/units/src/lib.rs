//! Addresses, counts and times, each a type of its own.
//!
//! Nothing here converts silently: an address becomes a frame number by [`Gpa::to_gfn`], a page
//! count becomes bytes by [`PageCount::to_bytes`]. Arithmetic that could overflow is checked.
//! x86-64 pages of 4 KiB are the unit of everything that martlet tracks and sends.

mod parse;

pub use parse::{ParseUnitError, parse_duration};

use core::fmt;
use core::time::Duration;

/// Bytes in a page.
pub const PAGE_SIZE: u64 = 4096;
/// `PAGE_SIZE == 1 << PAGE_SHIFT`.
pub const PAGE_SHIFT: u32 = 12;

/// Guest physical address, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpa(pub u64);

/// Guest frame number: a guest physical address in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gfn(pub u64);

/// A number of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(pub u64);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteCount(pub u64);

/// A rate in bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BytesPerSec(pub u64);

/// A moment in nanoseconds. Whoever passes it in decides the clock; on Linux martlet uses
/// `CLOCK_MONOTONIC`, which all processes of one host share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Gpa {
    /// The frame that holds this address.
    pub const fn to_gfn(self) -> Gfn {
        Gfn(self.0 >> PAGE_SHIFT)
    }
}

impl Gfn {
    /// The address of the first byte of the frame; `None` above the 64-bit address space.
    pub const fn checked_to_gpa(self) -> Option<Gpa> {
        match self.0.checked_mul(PAGE_SIZE) {
            Some(address) => Some(Gpa(address)),
            None => None,
        }
    }
}

impl PageCount {
    /// The same amount in bytes. Saturates: no machine has 2^64 bytes.
    pub const fn to_bytes(self) -> ByteCount {
        ByteCount(self.0.saturating_mul(PAGE_SIZE))
    }
}

impl ByteCount {
    /// Whole pages, `None` if the count is not a multiple of the page size.
    pub const fn to_whole_pages(self) -> Option<PageCount> {
        if self.0.is_multiple_of(PAGE_SIZE) { Some(PageCount(self.0 >> PAGE_SHIFT)) } else { None }
    }
}

impl BytesPerSec {
    /// How long `bytes` take at this rate. A rate of zero takes for ever.
    pub fn time_for(self, bytes: ByteCount) -> Duration {
        if self.0 == 0 {
            return Duration::MAX;
        }
        let nanos = u128::from(bytes.0) * 1_000_000_000 / u128::from(self.0);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The rate at which `bytes` passed in `time`; zero for no time at all.
    pub fn measured(bytes: ByteCount, time: Duration) -> BytesPerSec {
        let nanos = time.as_nanos();
        if nanos == 0 {
            return BytesPerSec(0);
        }
        let rate = u128::from(bytes.0) * 1_000_000_000 / nanos;
        BytesPerSec(u64::try_from(rate).unwrap_or(u64::MAX))
    }
}

impl Instant {
    /// Time since `earlier`; zero if that is in the future.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This moment and `time` more. Saturates, so a deadline "never" stays never.
    pub fn after(self, time: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// How a peer's clock differs from this side's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffset {
    /// The peer's clock minus this side's, in nanoseconds.
    pub ns: i64,
    /// What `ns` may be off by; zero where both sides read one clock.
    pub error: Duration,
}

impl ClockOffset {
    /// Both sides read one clock.
    pub const ONE_CLOCK: ClockOffset = ClockOffset { ns: 0, error: Duration::ZERO };

    /// A moment of the peer's clock on this side's. Saturates.
    pub const fn from_peer(self, peer: Instant) -> Instant {
        Instant(peer.0.saturating_add_signed(self.ns.saturating_neg()))
    }

    /// The same, as the peer would say it.
    #[must_use]
    pub const fn seen_by_peer(self) -> ClockOffset {
        ClockOffset { ns: self.ns.saturating_neg(), error: self.error }
    }
}

/// A run of whole guest pages: `start .. start + pages`, never empty, never past 2^52 frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRange {
    start: Gfn,
    pages: PageCount,
}

/// Frames of the largest guest physical address space that x86-64 allows (52 bits of address).
const GFN_LIMIT: u64 = 1 << (52 - PAGE_SHIFT);

impl PageRange {
    /// `None` if the range is empty or leaves the guest physical address space.
    pub fn try_new(start: Gfn, pages: PageCount) -> Option<PageRange> {
        let end = start.0.checked_add(pages.0)?;
        (pages.0 > 0 && end <= GFN_LIMIT).then_some(PageRange { start, pages })
    }

    /// First frame.
    pub const fn start(self) -> Gfn {
        self.start
    }

    /// One past the last frame.
    pub const fn end(self) -> Gfn {
        Gfn(self.start.0 + self.pages.0)
    }

    /// Number of pages; at least one.
    pub const fn pages(self) -> PageCount {
        self.pages
    }

    /// Whether the two share a page.
    pub const fn overlaps(self, other: PageRange) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }
}

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Gfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frames {}..{}", self.start, self.end())
    }
}

impl fmt::Display for ByteCount {
    /// Binary units with one decimal, as people write them: `512.0 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut unit = 0;
        #[expect(clippy::cast_precision_loss, reason = "for people, one decimal")]
        let mut value = self.0 as f64;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

impl fmt::Display for BytesPerSec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", ByteCount(self.0))
    }
}
