//! Guests that KVM executes.

mod build;
mod cpuid;
mod kick;
mod msrs;
pub(crate) mod raw;
mod rehearsal;
mod saved;
mod start;
mod state;
#[cfg(test)]
mod tests;
mod tsc;
mod vcpu;
mod vm;
mod walk;
mod warm;

pub(crate) use build::{BuildOptions, build, is_usable};
pub(crate) use start::{SELECTOR_BOOT_CODE, SELECTOR_BOOT_DATA};
