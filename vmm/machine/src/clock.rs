//! The host's clocks.

use martlet_units::Instant;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::time::Duration;

/// `CLOCK_MONOTONIC`, which all processes of a host share.
pub(crate) fn now() -> Instant {
    Instant(nanos(clock_gettime(ClockId::Monotonic)))
}

/// `CLOCK_REALTIME` in nanoseconds since 1970.
pub(crate) fn realtime_ns() -> u64 {
    nanos(clock_gettime(ClockId::Realtime))
}

/// For system calls that take a relative time.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

fn nanos(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000) + u64::try_from(time.tv_nsec).unwrap_or(0)
}
