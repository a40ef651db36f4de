//! Putting a new guest into its memory: the built-in program, a PVH ELF or a bzImage.

mod acpi;
mod bzimage;
mod kernel;
mod loader_memory;
mod program;
mod pvh;
pub(crate) mod tables;

use crate::config::{Boot, MachineConfig};
use crate::devices::virtio::MMIO_END;
use crate::memory::GuestMemory;
use crate::vcpu::backend::{Start, VmBackend};
use crate::{Accel, MachineError};
use martlet_guest_program::NicPlace;

/// Writes what the guest needs into its memory, which is empty, and says where each vCPU starts.
pub(crate) fn prepare(
    config: &MachineConfig,
    memory: &GuestMemory,
    vm: &dyn VmBackend,
    nics: &[NicPlace],
) -> Result<Vec<Start>, MachineError> {
    match (&config.boot, vm.accel()) {
        (Boot::Program(params), accel) => {
            let tables = match accel {
                Accel::Kvm => {
                    let mmio_end = if nics.is_empty() { 0 } else { MMIO_END };
                    tables::install(memory, mmio_end, vm.has_gigabyte_pages())?
                }
                Accel::Threads => Default::default(),
            };
            program::prepare(params, config.vcpus, memory, vm, tables, nics)
        }
        (Boot::Kernel(kernel), Accel::Kvm) => kernel::prepare(kernel, config.vcpus, memory, nics),
        (Boot::Kernel(_), Accel::Threads) => Err(MachineError::Config {
            reason: "a kernel needs KVM; without it only the built-in program runs".into(),
        }),
    }
}

/// Writes to guest memory that was planned to be there.
fn write(
    memory: &GuestMemory,
    gpa: martlet_units::Gpa,
    bytes: &[u8],
    what: &str,
) -> Result<(), MachineError> {
    if memory.write(gpa, bytes) {
        return Ok(());
    }
    let reason = format!("no memory for {} bytes of {what} at {gpa}", bytes.len());
    Err(MachineError::Config { reason })
}
