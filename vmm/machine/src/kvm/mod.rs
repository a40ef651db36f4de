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

use crate::vcpu::backend::BackendError;
use std::io;

pub(crate) use build::{BuildOptions, build, is_usable};
pub(crate) use start::{SELECTOR_BOOT_CODE, SELECTOR_BOOT_DATA};

/// The outcome of a request of KVM's.
fn kvm<T>(
    operation: &'static str,
    result: Result<T, kvm_ioctls::Error>,
) -> Result<T, BackendError> {
    result.map_err(io::Error::from).map_err(BackendError::host(operation))
}
