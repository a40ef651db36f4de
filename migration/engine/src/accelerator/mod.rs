//! Zero pages found by DSA while the CPU sends: the driver, the policy that guards it, and the
//! lanes' view of both.

mod finder;
mod gate;

pub use finder::{DsaFinders, DsaQueue};
