//! Virtual time in picoseconds.

use std::time::Duration;

/// A moment in picoseconds: fine enough that no rounding adds up to anything.
pub(crate) type Ps = u64;

/// A duration in picoseconds.
pub(crate) fn ps(time: Duration) -> Ps {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

/// `count` times a duration, in picoseconds.
pub(crate) fn times(time: Duration, count: u32) -> Ps {
    ps(time) * u64::from(count)
}

/// As a floating-point number, for rates.
#[expect(clippy::cast_precision_loss, reason = "rates need no more than 52 bits")]
pub(crate) fn float(value: u64) -> f64 {
    value as f64
}

/// A non-negative number, rounded up.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
pub(crate) fn ceil(value: f64) -> u64 {
    value.ceil() as u64
}
