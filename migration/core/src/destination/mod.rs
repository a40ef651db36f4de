//! The side that takes a guest in: what it decides, without a thread, a socket or a clock.
//!
//! [`Desk`] says who may bring a guest and answers those who ask what became of one. [`Attempt`]
//! serves one source from its setup until the guest has arrived or never will. Whoever drives it
//! implements [`DestinationIo`]:
//!
//! ```text
//! loop {
//!     match attempt.step(&mut io) {
//!         Next::Again { .. } => look again at once, awake
//!         Next::Wait { until } => wait until something came, or until then
//!         Next::Over => break
//!     }
//! }
//! ```

mod attempt;
mod desk;
mod io;
mod life;
mod receiving;
mod rounds;
#[cfg(test)]
mod tests;

pub use attempt::{Attempt, AttemptConfig, Next};
pub use desk::{Desk, ReceiveStatus, Stopping};
pub use io::{DestinationIo, Event, HostNow, Intake, Look, Unheard};
pub use rounds::RoundCount;
