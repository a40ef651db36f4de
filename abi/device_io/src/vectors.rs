//! Interrupt vectors that go past the driver, straight to a guest.

use std::sync::Arc;

/// Called when a vector fires. Never blocks; any thread.
pub type Notify = Arc<dyn Fn() + Send + Sync>;

/// The MSI-X vectors of a device that a driver may give to queues. The driver's own events come
/// through its [`Waiter`](crate::Waiter), not here. Hardware: one event file a vector, for KVM's
/// irqfd.
pub trait Vectors: Send + Sync {
    /// How many there are, numbered from 0.
    fn count(&self) -> u16;

    /// Calls `notify` whenever the vector fires, instead of what was connected before; `None` for
    /// nothing. A number that does not exist is ignored.
    fn connect(&self, vector: u16, notify: Option<Notify>);
}
