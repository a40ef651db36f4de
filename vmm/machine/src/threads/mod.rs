//! vCPUs without KVM (being written).

use crate::vcpu::backend::{BackendError, Built};
use martlet_ram::GuestRam;
use martlet_units::PageRange;
use std::sync::Arc;

/// Memory for a guest of threads: at the same host address in every process.
pub(crate) fn create_ram(_layout: &[PageRange]) -> Result<GuestRam, BackendError> {
    Err(BackendError::Unsupported { reason: "threads are not built in yet".into() })
}

/// Builds the backend; `description` is what the source's [`VmBackend::description`] gave, none
/// for a new guest.
///
/// [`VmBackend::description`]: crate::vcpu::backend::VmBackend::description
pub(crate) fn build(
    _ram: &Arc<GuestRam>,
    _vcpus: u16,
    _description: Option<&[u8]>,
) -> Result<Built, BackendError> {
    Err(BackendError::Unsupported { reason: "threads are not built in yet".into() })
}
