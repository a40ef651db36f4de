//! What simulations, models and random tests are made with: chance under a seed, and what happens
//! next in virtual time. The same seed gives the same run, byte for byte.
#![forbid(unsafe_code)]

mod agenda;
mod chance;

pub use agenda::Agenda;
pub use chance::{Chance, scatter};
