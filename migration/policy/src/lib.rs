//! Decisions as pure functions of what was measured: no clock, no thread, no I/O.
//!
//! | question | answered by |
//! |---|---|
//! | How long would the blackout be? | [`predict`] |
//! | Another round, or stop the guest now? How much to slow it down? | [`Convergence`] |
//! | When may a channel send, if there is a bandwidth limit? | [`Pacer`] |
//! | How many channels? | [`default_channels`] |
//! | Which pages does an accelerator check for zero, and which the CPU? | [`admission::Admission`] |

pub mod admission;
mod channels;
mod converge;
mod pace;
mod predict;

pub use channels::default_channels;
pub use converge::{
    AutoConverge, Convergence, Decision, POLISH_ROUNDS_MAX, RoundResult, THROTTLE_PERCENT_MAX,
};
pub use pace::{Pacer, Slot};
pub use predict::{Measurements, Prediction, predict};
