//! Where a driver's caller waits for its device.

use martlet_units::Instant;

/// The clock of a device and its interrupt. Real hardware: `CLOCK_MONOTONIC` and an event file. A
/// model in real time runs its firmware while its caller waits; a model in virtual time lets the
/// clock jump to what happens next. Drivers never read another clock.
pub trait Waiter: Send + Sync {
    /// The time.
    fn now(&self) -> Instant;

    /// Lets the device go on without waiting; whether it interrupted since the last call. Cheap:
    /// may be called in a loop.
    fn poll(&self) -> bool;

    /// Returns when the device has interrupted since the last call, at `until` at the latest.
    /// May return early for no reason. With `None` it waits for an interrupt only.
    fn wait(&self, until: Option<Instant>);
}
