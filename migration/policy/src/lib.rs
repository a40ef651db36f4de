//! Decisions as pure functions of what was measured: no clock, no thread, no I/O.

mod predict;

pub use predict::{Measurements, Prediction, predict};
