//! vCPUs without KVM: each is a host thread that executes the guest's instructions itself.
//!
//! Guest physical address `x` is at host address [`GUEST_BASE`]` + x`, in every process, so the
//! guest's pointers stay true when it moves. What the processor refuses to a process, the ports
//! above all, comes back as a signal and becomes an exit; see `signals.rs`.
//!
//! This is for trying martlet where there is no KVM, with the built-in program, and it is no
//! protection: **the guest is part of the process**. Whoever can send it a guest can have any code
//! executed. So a destination takes one only if it was told to, and only from a process of the same
//! user over a Unix socket, whose peer the kernel knows. Over TCP it does so within this host, where
//! the kernel knows it as well, but only if its environment says that no proxy of that user lets
//! others in ([`THREADS_BY_TCP_VARIABLE`]). Nothing secret is needed or sent. Either peer is a
//! process of the same host, which the guest can't leave: its time stamp counter is the host's.

mod decode;
mod description;
mod frame;
mod pagemap;
mod saved;
mod signal_stack;
mod signals;
mod tsc;
mod vcpu;

#[cfg(test)]
mod tests;

use crate::Accel;
use crate::THREADS_BY_TCP_VARIABLE;
use crate::vcpu::backend::{BackendError, Built, VcpuBackend, VmBackend};
use description::Description;
use martlet_engine::LoadFor;
use martlet_engine::Peer;
use martlet_ram::{DirtySource, GuestRam, TrackError};
use martlet_units::PageRange;
use pagemap::PagemapTracker;
use std::sync::Arc;
use vcpu::ThreadVcpu;

/// Host address of guest physical address 0: far from what the kernel picks for programs,
/// libraries, heaps and stacks, and with 32 TiB to the first of them.
pub(crate) const GUEST_BASE: usize = 0x2000_0000_0000;

/// Memory for a guest of threads: at the same host address in every process, so one guest at a
/// time in each.
pub(crate) fn create_ram(layout: &[PageRange]) -> Result<GuestRam, BackendError> {
    GuestRam::create_at(layout, GUEST_BASE).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        let cause = cause.unwrap_or_default();
        let reason = format!("{error} at {GUEST_BASE:#x} (one guest a process){cause}");
        BackendError::Unsupported { reason }
    })
}

/// Whether this peer may have its code run here.
pub(crate) fn check_peer(peer: Peer) -> Result<(), String> {
    let by_tcp = std::env::var_os(THREADS_BY_TCP_VARIABLE).is_some();
    if peer == Peer::SameUser || (peer == Peer::SameUserByTcp && by_tcp) {
        let own = rustix::process::geteuid().as_raw();
        let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
        if !stands_for_others(own, overflow.ok().as_deref()) {
            return Ok(());
        }
        return Err(format!(
            "this process runs as user {own}, for which the kernel takes everybody whom this user \
             namespace does not know: it can't tell whether the guest on threads, which would be a \
             part of it, comes from the same user"
        ));
    }
    Err(format!(
        "a guest on threads is a part of this process, so it comes only over a Unix socket from a \
         process of the same user, or within this host where {THREADS_BY_TCP_VARIABLE} is set"
    ))
}

/// Whether the kernel shows users whom a namespace does not know under this number, too
/// (Documentation/admin-guide/sysctl/kernel.rst, overflowuid).
fn stands_for_others(user: u32, overflow: Option<&str>) -> bool {
    const NOBODY: u32 = 65534;
    user == overflow.and_then(|text| text.trim().parse().ok()).unwrap_or(NOBODY)
}

/// Builds the backend; `description` is what the source's [`VmBackend::description`] gave, none
/// for a new guest.
pub(crate) fn build(
    ram: &Arc<GuestRam>,
    vcpus: u16,
    description: Option<&[u8]>,
) -> Result<Built, BackendError> {
    let base = base_of(ram)?;
    let here = Description::here(base);
    if let Some(bytes) = description {
        Description::from_bytes(bytes)?.check(&here)?;
    }
    let vcpus = (0..vcpus)
        .map(|_| Box::new(ThreadVcpu::new(Arc::clone(ram), base)) as Box<dyn VcpuBackend>)
        .collect();
    let vm = Arc::new(ThreadVm { ram: Arc::clone(ram), base, description: here });
    Ok(Built { vm, vcpus })
}

/// Host address of guest physical address 0, the same from every region.
fn base_of(ram: &GuestRam) -> Result<u64, BackendError> {
    let mut bases = ram.regions().iter().map(|region| {
        let gpa = region.range().start().checked_to_gpa()?.0;
        (region.host_ptr(0).expose_provenance() as u64).checked_sub(gpa)
    });
    let first = bases.next().flatten();
    match first {
        Some(base) if bases.all(|other| other == first) => Ok(base),
        _ => {
            let reason = "guest memory that is not as `create_ram` makes it".into();
            Err(BackendError::Unsupported { reason })
        }
    }
}

struct ThreadVm {
    ram: Arc<GuestRam>,
    base: u64,
    description: Description,
}

impl VmBackend for ThreadVm {
    fn accel(&self) -> Accel {
        Accel::Threads
    }

    fn tracking_name(&self) -> &'static str {
        "userfaultfd"
    }

    fn description(&self) -> Vec<u8> {
        self.description.to_bytes()
    }

    /// There are no interrupt controllers and timers; the clock is the host's.
    fn save(&self) -> Result<Vec<u8>, BackendError> {
        Ok(Vec::new())
    }

    fn load(&self, state: &[u8], _: LoadFor) -> Result<(), BackendError> {
        if state.is_empty() {
            return Ok(());
        }
        Err(BackendError::state(format!("{} bytes for devices that there are not", state.len())))
    }

    fn set_irq(&self, _: u32, _: bool) {}

    fn track(&self) -> Result<Box<dyn DirtySource>, TrackError> {
        Ok(Box::new(PagemapTracker::new(Arc::clone(&self.ram))?))
    }

    fn tsc_khz(&self) -> u32 {
        self.description.tsc_khz()
    }

    fn guest_base(&self) -> u64 {
        self.base
    }
}
