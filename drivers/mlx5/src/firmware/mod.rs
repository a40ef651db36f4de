//! A function's firmware: its command queue with everything around it, shared by whoever drives
//! something on the function.
//!
//! All state lies behind one lock that is held for moments only: never while something is waited
//! for. So a thread that services events, one that suspends and one that builds a map don't hinder
//! each other, and each of them moves the others' commands on.

mod bring_up;
mod events;
mod pages;
mod shared;

pub use bring_up::BringUpError;
pub(crate) use bring_up::Setup;
pub(crate) use shared::Firmware;
