//! One vCPU under KVM.

use super::kick::KvmKicker;
use super::msrs::{self, MsrTable};
use super::raw::{self, MmioAccess, RunArea, XsaveSize};
use super::saved::{SavedNumbered, SavedVcpu, decode, encode};
use super::tsc::TscPlan;
use super::warm::{self, BLOCK_BYTES, WarmVcpu};
use super::{rehearsal, start, state, walk};
use crate::clock;
use crate::memory::GuestMemory;
use crate::vcpu::backend::{BackendError, Exit, Kicker, Start, VcpuBackend};
use kvm_bindings::{
    KVM_EXIT_DIRTY_RING_FULL, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO,
    KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_EXIT_SYSTEM_EVENT, KVM_SYSTEM_EVENT_RESET,
};
use kvm_ioctls::VcpuFd;
use martlet_engine::LoadFor;
use martlet_kvm_dirty::RingShare;
use martlet_units::{Gpa, Instant, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Exits for nothing of interest before the one that ends a run of our own code.
const OWN_EXITS_MAX: u32 = 1000;

/// A guest that stood for longer is told so, or its watchdogs take the time for one in which it
/// hung (Documentation/virt/kvm/api.rst, KVM_KVMCLOCK_CTRL). They wait for ten seconds and more.
const STOOD: Duration = Duration::from_secs(1);

/// What the vCPUs of a VM have in common.
pub(super) struct VcpuCommon {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) msrs: MsrTable,
    pub(super) xsave: XsaveSize,
    pub(super) has_sregs2: bool,
    pub(super) tsc_khz: u32,
    /// The host's counter counts at another rate: the two differ by more than an offset.
    pub(super) tsc_is_scaled: bool,
    pub(super) tsc: TscPlan,
    pub(super) has_nested_state: bool,
    pub(super) has_pre_fault: bool,
    pub(super) vm_loads: VmLoads,
    /// Where a guest that came and has not run here wanted the wall clock written; else 0.
    pub(super) wall_clock: AtomicU64,
    /// The blackout is near.
    pub(super) is_armed: AtomicBool,
}

impl VcpuCommon {
    /// Whether all of this is guest memory.
    fn is_ram(&self, gpa: u64, bytes: u64) -> bool {
        let Some(last) = gpa.checked_add(bytes - 1) else { return false };
        let ram = self.memory.ram();
        match (ram.find(Gpa(gpa).to_gfn()), ram.find(Gpa(last).to_gfn())) {
            (Some((a, page)), Some((b, last))) => a == b && last - page == bytes / PAGE_SIZE - 1,
            _ => false,
        }
    }
}

/// Whether the VM's own part of a state is being loaded, which some of a vCPU's must follow.
#[derive(Default)]
pub(super) struct VmLoads(AtomicBool);

impl VmLoads {
    pub(super) fn begin(&self) {
        // Ordered before the order to load, which is a sequentially consistent store.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Does the load that was begun; whatever comes of it, nobody waits for it behind that.
    pub(super) fn during<T>(&self, load: impl FnOnce() -> T) -> T {
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                // Release: what the load set up is there for vCPUs that see this.
                self.0.store(false, Ordering::Release);
            }
        }
        let _end = End(&self.0);
        load()
    }

    /// Some tens of microseconds, so the waiting vCPU stays awake.
    pub(super) fn wait(&self) {
        while self.0.load(Ordering::Acquire) {
            rustix::thread::sched_yield();
        }
    }
}

pub(super) struct KvmVcpu {
    // Before the descriptor: the mappings and the ring's entries are of its file.
    area: RunArea,
    ring: Option<RingShare>,
    kicker: Arc<KvmKicker>,
    common: Arc<VcpuCommon>,
    /// At a destination, until its guest starts.
    warm: Option<WarmVcpu>,
    /// The last exit was an access whose instruction is not complete.
    is_io_pending: bool,
    /// What was loaded last; the guest has not run since.
    loaded: Option<SavedVcpu>,
    /// What of it makes KVM write guest memory; until the guest runs.
    held: Vec<SavedNumbered>,
    /// The guest was in here, and may have switched on what its power-on state has off.
    has_run: bool,
    /// When the guest was left for an order; until it runs again.
    left: Option<Instant>,
    fd: Arc<VcpuFd>,
}

impl KvmVcpu {
    pub(super) fn new(
        fd: Arc<VcpuFd>,
        run_bytes: usize,
        ring: Option<RingShare>,
        common: Arc<VcpuCommon>,
        warm: Option<WarmVcpu>,
    ) -> Result<KvmVcpu, BackendError> {
        let map = || RunArea::map(&fd, run_bytes).map_err(BackendError::host("map kvm_run"));
        let (area, kickers_area) = (map()?, map()?);
        let kicker = Arc::new(KvmKicker::new(kickers_area));
        Ok(KvmVcpu {
            area,
            ring,
            kicker,
            common,
            warm,
            is_io_pending: false,
            loaded: None,
            held: Vec::new(),
            has_run: false,
            left: None,
            fd,
        })
    }

    /// As [`VcpuBackend::run`], whosever code it is.
    fn run_any(&mut self) -> Result<Exit<'_>, BackendError> {
        self.loaded = None;
        match self.enter()? {
            Some(reason) => Ok(self.exit(reason)),
            None => Ok(Exit::Interrupted),
        }
    }

    /// Enters the guest, or only completes pending I/O if the kicker says so. `None` if it left
    /// for nothing of interest.
    fn enter(&mut self) -> Result<Option<u32>, BackendError> {
        self.kicker.set_inside(true);
        let entered = self.area.enter(&self.fd);
        self.kicker.set_inside(false);
        self.is_io_pending = false;
        match entered {
            Ok(reason) => Ok(Some(reason)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => self.check_poison().map(|()| None),
                _ => Err(BackendError::Host { operation: "KVM_RUN", source: error }),
            },
        }
    }

    /// Fails if the guest touched poisoned memory: KVM tells by a signal, and would again.
    fn check_poison(&self) -> Result<(), BackendError> {
        let ram = self.common.memory.ram();
        match martlet_raw_memory::take_poisoned().and_then(|at| ram.lost_at(at)) {
            None => Ok(()),
            Some(page) => Err(BackendError::Host { operation: "KVM_RUN", source: page.into() }),
        }
    }

    fn exit(&mut self, reason: u32) -> Exit<'_> {
        match reason {
            KVM_EXIT_IO => self.port_exit(),
            KVM_EXIT_MMIO => {
                self.is_io_pending = true;
                match self.area.mmio() {
                    MmioAccess::Read { gpa, data } => Exit::MmioRead { gpa, data },
                    MmioAccess::Write { gpa, data } => Exit::MmioWrite { gpa, data },
                }
            }
            KVM_EXIT_DIRTY_RING_FULL => {
                if let Some(ring) = &mut self.ring {
                    ring.on_full();
                }
                Exit::Interrupted
            }
            KVM_EXIT_SHUTDOWN => Exit::TripleFault,
            KVM_EXIT_SYSTEM_EVENT if self.area.system_event() == KVM_SYSTEM_EVENT_RESET => {
                Exit::Reset
            }
            KVM_EXIT_SYSTEM_EVENT => Exit::Shutdown,
            KVM_EXIT_INTERNAL_ERROR => {
                Exit::Ended(format!("KVM internal error {}", self.area.internal_error()))
            }
            KVM_EXIT_FAIL_ENTRY => Exit::Ended(format!(
                "entry failed, hardware reason {:#x}",
                self.area.entry_failure()
            )),
            // Interrupt windows and the like concern user-space interrupt controllers.
            kvm_bindings::KVM_EXIT_INTR | kvm_bindings::KVM_EXIT_IRQ_WINDOW_OPEN => {
                Exit::Interrupted
            }
            other => Exit::Ended(format!("unknown exit {other}")),
        }
    }

    /// Blocks of guest memory that the vCPU needs first: its code, its stack.
    fn first_blocks(&self, saved: &SavedVcpu) -> Vec<u64> {
        let block = |linear| {
            let gpa = walk::translate(&self.common.memory, &saved.sregs, linear)?;
            let block = gpa / BLOCK_BYTES * BLOCK_BYTES;
            self.common.is_ram(block, BLOCK_BYTES).then_some(block)
        };
        [saved.regs.rip, saved.regs.rsp].into_iter().filter_map(block).collect()
    }

    /// Maps these blocks ahead of time: by KVM itself where it can (Linux 6.11, two-dimensional
    /// paging), else by reading them. Returns whether the vCPU's state was lost over it. A block
    /// that can't be mapped now is mapped when it is used.
    fn map_blocks(&mut self, saved: &SavedVcpu, blocks: &[u64]) -> Result<bool, BackendError> {
        let Some(warm) = &mut self.warm else { return Ok(false) };
        let Some(start) = warm.read_blocks(blocks) else { return Ok(false) };
        if self.common.has_pre_fault
            && blocks.iter().all(|block| raw::pre_fault(&self.fd, *block, BLOCK_BYTES).is_ok())
        {
            return Ok(false);
        }
        start::apply(&self.fd, &start)?;
        start::apply_mode(&self.fd, &saved.sregs)?;
        start::clear_events(&self.fd)?;
        if let Err(error) = self.run_own_code() {
            tracing::debug!(%error, "guest memory could not be read ahead of time");
        }
        Ok(true)
    }

    /// Where there is time for it, makes the memory ready that the guest will need first. The
    /// vCPU's state is afterwards as it was loaded.
    fn look_ahead(&mut self, saved: &SavedVcpu) -> Result<(), BackendError> {
        if self.common.is_armed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let blocks = self.first_blocks(saved);
        if self.map_blocks(saved, &blocks)? {
            state::load(&self.fd, &self.common, saved, None, LoadFor::Rehearsal)?;
        }
        Ok(())
    }

    /// Runs the VMM's own code until it says that it is done. KVM knows of no memory that it
    /// writes for this vCPU's guest: that is held back.
    fn run_own_code(&mut self) -> Result<(), BackendError> {
        for _ in 0..OWN_EXITS_MAX {
            self.kicker.clear();
            match self.run_any()? {
                Exit::Out { port: warm::PORT, .. } => {
                    while !matches!(self.finish_io()?, Exit::Interrupted) {}
                    return Ok(());
                }
                Exit::Interrupted => {}
                other => return Err(BackendError::state(format!("warming up: {other:?}"))),
            }
        }
        Err(BackendError::state("warming up: the vCPU does not get on"))
    }

    fn port_exit(&mut self) -> Exit<'_> {
        self.is_io_pending = true;
        let Some(access) = self.area.port_access() else {
            return Exit::Ended("KVM describes an impossible port access".into());
        };
        let (port, size) = (access.port, access.size);
        let data = self.area.port_data(access);
        if access.is_in { Exit::In { port, size, data } } else { Exit::Out { port, size, data } }
    }
}

impl VcpuBackend for KvmVcpu {
    fn attach(&mut self) -> Result<(), BackendError> {
        self.kicker.attach().map_err(BackendError::host("prepare for kicks"))
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kicker) as Arc<dyn Kicker>
    }

    fn warm_up(&mut self) -> Result<(), BackendError> {
        let Some(warm) = &self.warm else { return Ok(()) };
        let start = warm.start(0, 0);
        start::apply(&self.fd, &start)?;
        self.run_own_code()
    }

    fn set_start(&mut self, start: &Start) -> Result<(), BackendError> {
        start::apply(&self.fd, start)
    }

    fn run(&mut self) -> Result<Exit<'_>, BackendError> {
        let left = self.left.take();
        if left.is_some_and(|left| clock::now().since(left) > STOOD) {
            // An error means that the guest has no such clock.
            let _ = self.fd.kvmclock_ctrl();
        }
        if !self.held.is_empty() {
            let held = msrs::of_the_vcpu(&std::mem::take(&mut self.held));
            state::release(&self.fd, &self.common, &held)?;
        }
        self.has_run = true;
        self.run_any()
    }

    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError> {
        self.left.get_or_insert_with(clock::now);
        if !self.is_io_pending {
            return Ok(Exit::Interrupted);
        }
        self.kicker.hold_back();
        self.run_any()
    }

    /// To read its state has a vCPU take a start-up message that came, for which one that is in a
    /// guest's own guest leaves that, and KVM writes so to guest memory (arch/x86/kvm/lapic.c,
    /// kvm_apic_accept_events; svm/nested.c, nested_svm_vmexit). A message that another vCPU sends
    /// later, on its own way out, is read with the state.
    fn settle(&mut self) -> Result<(), BackendError> {
        state::mp_state(&self.fd).map(drop)
    }

    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        let mut saved = state::save(&self.fd, &self.common)?;
        // Of a guest that came and has not run here, these are not in the vCPU.
        for msr in &mut saved.msrs {
            let held = self.held.iter().find(|held| held.index == msr.index);
            *msr = *held.unwrap_or(msr);
        }
        Ok(encode(&saved))
    }

    fn load(&mut self, bytes: &[u8], what_for: LoadFor) -> Result<(), BackendError> {
        let saved: SavedVcpu = decode(bytes).map_err(BackendError::state)?;
        self.is_io_pending = false;
        self.held.clear();
        // Taken out: after an error nothing is known.
        let before = self.loaded.take();
        let saved = match what_for {
            LoadFor::Rehearsal => rehearsal::hold_back(saved),
            LoadFor::Start { .. } => saved,
        };
        state::load(&self.fd, &self.common, &saved, before.as_ref(), what_for)?;
        match what_for {
            LoadFor::Rehearsal => self.look_ahead(&saved)?,
            LoadFor::Start { .. } => {
                if self.has_run {
                    // It is reset: what it switched on is off.
                    self.common.msrs.write_all(&self.fd, &msrs::switched_off(&saved.msrs))?;
                }
                self.held = msrs::held(&saved.msrs);
                // All vCPUs say the same; read when all have loaded.
                self.common.wall_clock.store(msrs::wall_clock(&saved.msrs), Ordering::Relaxed);
            }
        }
        self.loaded = Some(saved);
        Ok(())
    }

    fn enter_and_leave(&mut self) -> Result<(), BackendError> {
        self.kicker.hold_back();
        // With the flag set KVM returns before it enters the guest.
        self.enter().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// It would stay awake for ever, and whoever ends the machine would wait for its thread.
    #[test]
    fn no_vcpu_waits_for_a_load_that_panicked() {
        let loads = VmLoads::default();
        loads.begin();
        let load = || loads.during(|| panic!("a test wants it"));
        assert!(catch_unwind(AssertUnwindSafe(load)).is_err());
        assert!(!loads.0.load(Ordering::Acquire), "it is over");
        loads.wait();
    }
}
