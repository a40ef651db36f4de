//! A small KVM machine whose guest can be moved away: memory, vCPUs, interrupt controllers, a
//! serial port, network cards backed by vDPA devices; saved and restored completely.
//!
//! [`Machine`] is what a source has, [`Factory`] what a destination has; both speak to
//! `martlet-engine` through its traits. What executes the guest's instructions is behind one seam
//! (`vcpu/backend.rs`): KVM, or, with the feature `threads`, threads of this process where there is no
//! KVM.
//!
//! ```text
//! owner --> Machine <-- engine            phase.rs: who may order what
//!             |  \__ Group: vCPU threads, one order word, the permit while the guest runs
//!             |          \__ VcpuBackend: kvm/vcpu.rs | threads/
//!             |__ VmBackend: kvm/vm.rs | threads/     \__ Bus: serial, reset, power button, clock,
//!             |                                            debug port, cards
//!             |__ Nics: devices/virtio/, over whatever `VdpaDevice`s the owner gives
//!             |__ GuestMemory
//! ```
//!
//! vCPUs are called out of the guest by SIGSTKFLT, which nothing else on x86-64 sends; its handler
//! is installed with the first of them. A machine of threads also takes the faults (SIGSEGV and its
//! like), and passes on what is no guest's.

mod boot;
mod clock;
mod config;
mod destination;
mod devices;
mod error;
mod kvm;
mod machine;
mod memory;
mod observed;
mod phase;
mod power_on;
mod reset;
mod saved;
mod source;
#[cfg(test)]
mod tests;
#[cfg(feature = "threads")]
mod threads;
mod vcpu;

pub use config::{
    Accel, Boot, KernelConfig, MEMORY_MAX, MEMORY_MIN, MachineConfig, SerialOut,
    THREADS_BY_TCP_VARIABLE, Tracking, VCPUS_MAX,
};
pub use destination::{Factory, FactoryConfig};
pub use error::MachineError;
pub use machine::{EndCause, GuestStatus, Machine, MachineInfo, OwnerError, kvm_is_usable};
pub use observed::{FrameCheck, GuestCheck, Observed};
