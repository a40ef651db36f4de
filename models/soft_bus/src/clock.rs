//! The clock of models.

use martlet_units::Instant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A clock that runs by itself, or one that is moved.
#[derive(Debug)]
pub struct SoftClock(Kind);

#[derive(Debug)]
enum Kind {
    Real,
    Virtual(AtomicU64),
}

impl SoftClock {
    /// `CLOCK_MONOTONIC`.
    pub fn real() -> SoftClock {
        SoftClock(Kind::Real)
    }

    /// A clock that stands at `start` until it is moved.
    pub fn virtual_from(start: Instant) -> SoftClock {
        SoftClock(Kind::Virtual(AtomicU64::new(start.0)))
    }

    /// Whether it has to be moved.
    pub(crate) fn is_virtual(&self) -> bool {
        matches!(self.0, Kind::Virtual(_))
    }

    /// The time.
    pub fn now(&self) -> Instant {
        match &self.0 {
            Kind::Real => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
                let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
                Instant(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
            }
            Kind::Virtual(now) => Instant(now.load(Ordering::Acquire)),
        }
    }

    /// Moves a virtual clock forward; it never goes back. A real clock does not care.
    pub fn advance_to(&self, moment: Instant) {
        if let Kind::Virtual(now) = &self.0 {
            now.fetch_max(moment.0, Ordering::AcqRel);
        }
    }

    /// Moves a virtual clock forward.
    pub fn advance(&self, time: Duration) {
        self.advance_to(self.now().after(time));
    }
}
