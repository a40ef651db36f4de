//! The seam between what a machine does with vCPUs (pause together, save in parallel, rehearse,
//! arm, throttle, serve ports) and what executes the guest's instructions: KVM (`kvm/`) or the
//! process's own threads (`threads/`).
//!
//! A backend is built for a whole machine at once and hands over a [`Built`]. Each vCPU is then
//! moved into a thread of its own, which calls [`VcpuBackend::attach`] once and from then on is
//! the only one to touch it; everybody else has its [`Kicker`].

use crate::Accel;
use martlet_engine::LoadFor;
use martlet_ram::{DirtySource, TrackError};
use std::io;
use std::sync::Arc;

/// Everything that a backend makes for one machine.
pub(crate) struct Built {
    /// What is shared by the vCPUs.
    pub(crate) vm: Arc<dyn VmBackend>,
    /// The vCPUs in order of their number.
    pub(crate) vcpus: Vec<Box<dyn VcpuBackend>>,
}

/// Why the guest left. A backend handles everything else inside [`VcpuBackend::run`].
#[derive(Debug)]
pub(crate) enum Exit<'a> {
    /// The guest wrote to a port: `data` is one or more items of `size` bytes (1, 2 or 4), all to
    /// this port, in order (`rep outs` gives several).
    Out { port: u16, size: u8, data: &'a [u8] },
    /// The guest reads from a port: the caller fills `data` (items as above) before the next call
    /// of any method of the backend.
    In { port: u16, size: u8, data: &'a mut [u8] },
    /// The guest reads memory that is no RAM; the caller fills `data` as for `In`.
    MmioRead { gpa: u64, data: &'a mut [u8] },
    /// The guest wrote memory that is no RAM.
    MmioWrite { gpa: u64, data: &'a [u8] },
    /// A kick, or nothing of interest: the caller looks at its orders and runs again.
    Interrupted,
    /// The guest asked to be reset.
    Reset,
    /// The processor gave up: a fault while it handled one while it handled one.
    TripleFault,
    /// The guest shut itself down.
    Shutdown,
    /// The guest can't go on: a triple fault, a state that can't be run. The text is for the
    /// owner, e.g. `triple fault`. Running again is pointless but allowed.
    Ended(String),
}

/// Why a backend could not do something. Never a panic, whatever the bytes or the kernel say.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BackendError {
    /// The kernel refused.
    #[error("{operation}: {source}")]
    Host {
        /// What was asked of it, e.g. `KVM_SET_SREGS`.
        operation: &'static str,
        /// What it said. Part of the text, since these errors end as one line.
        source: io::Error,
    },
    /// A saved state that can't be loaded; whose bytes they were is known to the caller.
    #[error("state refused: {reason}")]
    State {
        /// What is wrong with it, with the values concerned.
        reason: String,
    },
    /// A panic, whose place the log has.
    #[error("a defect of martlet: {what}")]
    Defect {
        /// What it panicked with.
        what: String,
    },
    /// This host can't run what is described.
    #[error("{reason}")]
    Unsupported {
        /// What is missing, e.g. `destination CPU lacks: avx512f`.
        reason: String,
    },
}

impl BackendError {
    pub(crate) fn host(operation: &'static str) -> impl FnOnce(io::Error) -> BackendError {
        move |source| BackendError::Host { operation, source }
    }

    pub(crate) fn state(reason: impl Into<String>) -> BackendError {
        BackendError::State { reason: reason.into() }
    }
}

/// An error if a machine that is being built is not wanted any more.
pub(crate) fn check_wanted(is_wanted: &dyn Fn() -> bool) -> Result<(), BackendError> {
    let reason = "nobody wants it any more".to_owned();
    if is_wanted() { Ok(()) } else { Err(BackendError::Unsupported { reason }) }
}

/// Where a vCPU of a new guest begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// 64-bit code at privilege level 3, interrupts not deliverable, all ports open. Addresses
    /// are the guest's own linear addresses (for KVM: identity mapped by [`Level3Tables`]; for
    /// threads: the host's, tables unused).
    Level3 { rip: u64, rsp: u64, rdi: u64, rsi: u64, tables: Level3Tables },
    /// PVH: 32-bit protected mode without paging, `ebx` points to the start info.
    Pvh { entry: u64, start_info: u64 },
    /// Linux's 64-bit entry: identity page tables, `rsi` points to the boot parameters.
    Linux64 { entry: u64, boot_params: u64, page_tables: u64, gdt: u64 },
    /// An application processor that waits for its start-up message.
    Parked,
}

/// Guest physical addresses of what the processor needs to stay at level 3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Level3Tables {
    /// The top page table.
    pub(crate) cr3: u64,
    /// The global descriptor table and its last byte's offset.
    pub(crate) gdt: (u64, u16),
}

/// One vCPU. Lives on its own thread after [`VcpuBackend::attach`].
pub(crate) trait VcpuBackend: Send {
    /// Called once, on the thread that will call everything below: the place to learn the thread
    /// id for kicks, to set up signal stacks and masks.
    fn attach(&mut self) -> Result<(), BackendError>;

    /// Called once after `attach` at a destination, on all vCPUs at once: whatever makes the first
    /// `run` fast, without a guest being there.
    fn warm_up(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Makes this vCPU leave the guest. May be asked for before `attach`.
    fn kicker(&self) -> Arc<dyn Kicker>;

    /// Puts the registers of a new guest in place.
    fn set_start(&mut self, start: &Start) -> Result<(), BackendError>;

    /// Enters the guest until it leaves. After a kick since the last [`Kicker::clear`] it returns
    /// [`Exit::Interrupted`] without executing a guest instruction, or soon.
    fn run(&mut self) -> Result<Exit<'_>, BackendError>;

    /// Completes the instruction of the last port or MMIO exit without executing another one, so
    /// that [`save`](VcpuBackend::save) is exact. [`Exit::Interrupted`] says that it is complete
    /// (or that there was nothing to do); any other exit is one more part of the same
    /// instruction, to be served before the call is repeated.
    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError>;

    /// After `finish_io`, before the vCPU counts as out: has whatever a save would write to guest
    /// memory written now.
    fn settle(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// The vCPU's complete state, in an encoding of the backend's own. Only after `finish_io`, and
    /// of a guest that stopped only when all vCPUs are out: others send it interrupts until then.
    fn save(&mut self) -> Result<Vec<u8>, BackendError>;

    /// Loads what `save` gave, perhaps in another process. The bytes are hostile. Must be
    /// repeatable: rehearsals load older states into the same vCPU. Guest memory is not complete
    /// yet and not written; nothing counts or acts by itself after a rehearsal's.
    fn load(&mut self, state: &[u8], what_for: LoadFor) -> Result<(), BackendError>;

    /// Goes the way into the guest and back without executing an instruction of it, so that the
    /// next `run` finds everything warm. Called after each `load`.
    fn enter_and_leave(&mut self) -> Result<(), BackendError>;
}

/// Makes a vCPU leave the guest, from any thread.
pub(crate) trait Kicker: Send + Sync {
    /// Makes the current or, if the vCPU is outside, the next `run` return soon. Never blocks and
    /// may be called at any time: before `attach` and after the thread's end it only sets the flag.
    fn kick(&self);

    /// Forgets a kick. Called by the vCPU's thread before it looks at its orders, so that a kick
    /// that follows a new order is never lost. Sequentially consistent.
    fn clear(&self);

    /// The vCPU's thread is about to end: no more signals to it.
    fn detach(&self);
}

/// What the vCPUs of a machine share.
pub(crate) trait VmBackend: Send + Sync {
    /// Which kind this is.
    fn accel(&self) -> Accel;

    /// The blackout is near: loads from now on do what is necessary and nothing else.
    fn arm(&self) {}

    /// Kind of dirty tracking, for people: `KVM log`, `KVM dirty ring`, `userfaultfd`.
    fn tracking_name(&self) -> &'static str;

    /// Processor features and clock rate that a destination must have, in an encoding of the
    /// backend's own. Given to the backend's `build` at the destination, where it is hostile.
    fn description(&self) -> Vec<u8>;

    /// Interrupt controllers, timers, clock. Called while no vCPU runs; in a rehearsal while they
    /// do, then the result need only be loadable.
    fn save(&self) -> Result<Vec<u8>, BackendError>;

    /// A load begins: `load` and all vCPUs' [`VcpuBackend::load`] are called at once. A vCPU that
    /// needs the VM's part to be loaded first waits until `load` has returned.
    fn begin_load(&self) {}

    /// Loads what `save` gave; hostile, repeatable. After `begin_load`. Nothing counts or acts by
    /// itself after a rehearsal's.
    fn load(&self, state: &[u8], what_for: LoadFor) -> Result<(), BackendError>;

    /// The guest is about to run, for the first time here or again: what a load held back because
    /// it counts by itself is set going.
    fn begin_run(&self) {}

    /// Sets the level of an interrupt line; nothing where there are no interrupts.
    fn set_irq(&self, line: u32, is_high: bool);

    /// Starts dirty tracking; see [`DirtySource`].
    fn track(&self) -> Result<Box<dyn DirtySource>, TrackError>;

    /// Whether the guest's page tables may have pages of 1 GiB.
    fn has_gigabyte_pages(&self) -> bool {
        false
    }

    /// Rate of the guest's time stamp counter.
    fn tsc_khz(&self) -> u32;

    /// Where guest physical address 0 lies in the guest's linear address space: 0 under KVM.
    fn guest_base(&self) -> u64;
}
