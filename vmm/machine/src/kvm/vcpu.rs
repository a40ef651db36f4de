//! One vCPU under KVM.

use super::kick::KvmKicker;
use super::msrs::MsrTable;
use super::raw::{self, RunArea, XsaveSize};
use super::saved::{SavedVcpu, decode, encode};
use super::tsc::TscPlan;
use super::warm::{self, WarmUp};
use super::{start, state};
use crate::clock;
use crate::dirty::RingShare;
use crate::vcpu::backend::{BackendError, Exit, Kicker, Start, VcpuBackend};
use kvm_bindings::{
    KVM_EXIT_DIRTY_RING_FULL, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO,
    KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_EXIT_SYSTEM_EVENT, KVM_SYSTEM_EVENT_RESET,
};
use kvm_ioctls::VcpuFd;
use martlet_units::PAGE_SIZE;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Exits for nothing of interest before the one that ends the warm-up.
const WARM_UP_EXITS_MAX: u32 = 1000;

/// What the vCPUs of a VM have in common.
pub(super) struct VcpuCommon {
    pub(super) msrs: MsrTable,
    pub(super) xsave: XsaveSize,
    pub(super) has_sregs2: bool,
    pub(super) tsc_khz: u32,
    pub(super) tsc: TscPlan,
    pub(super) has_nested_state: bool,
    pub(super) has_pre_fault: bool,
    pub(super) vm_loads: VmLoads,
}

/// Whether the VM's own part of a state is being loaded, which some of a vCPU's must follow.
#[derive(Default)]
pub(super) struct VmLoads(AtomicBool);

impl VmLoads {
    pub(super) fn begin(&self) {
        // Ordered before the order to load, which is a sequentially consistent store.
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        // Release: what the load set up is there for vCPUs that see this.
        self.0.store(false, Ordering::Release);
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
    warm_up: Option<Arc<WarmUp>>,
    /// The last exit was an access whose instruction is not complete.
    is_io_pending: bool,
    /// What was loaded last; the guest has not run since.
    loaded: Option<SavedVcpu>,
    /// Pages that were mapped for it.
    pre_faulted: [Option<u64>; 3],
    fd: VcpuFd,
}

impl KvmVcpu {
    pub(super) fn new(
        fd: VcpuFd,
        run_bytes: usize,
        ring: Option<RingShare>,
        common: Arc<VcpuCommon>,
        warm_up: Option<Arc<WarmUp>>,
    ) -> Result<KvmVcpu, BackendError> {
        let map = || RunArea::map(&fd, run_bytes).map_err(BackendError::host("map kvm_run"));
        let (area, kickers_area) = (map()?, map()?);
        let kicker = Arc::new(KvmKicker::new(kickers_area));
        Ok(KvmVcpu {
            area,
            ring,
            kicker,
            common,
            warm_up,
            is_io_pending: false,
            loaded: None,
            pre_faulted: [None; 3],
            fd,
        })
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
                Some(libc::EINTR | libc::EAGAIN) => Ok(None),
                _ => Err(BackendError::Host { operation: "KVM_RUN", source: error }),
            },
        }
    }

    fn exit(&mut self, reason: u32) -> Exit<'_> {
        match reason {
            KVM_EXIT_IO => self.port_exit(),
            KVM_EXIT_MMIO => {
                self.is_io_pending = true;
                match self.area.mmio_read() {
                    Some(data) => Exit::MmioRead { data },
                    None => Exit::MmioWrite,
                }
            }
            KVM_EXIT_DIRTY_RING_FULL => {
                if let Some(ring) = &mut self.ring {
                    ring.on_full();
                }
                Exit::Interrupted
            }
            KVM_EXIT_SHUTDOWN => Exit::Ended("triple fault".into()),
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

    /// Maps the pages that the vCPU needs first, where KVM can do that ahead of time (Linux 6.11,
    /// with two-dimensional paging). A page that was mapped for the state before is not asked for
    /// again; one that can't be mapped is mapped when it is used.
    fn pre_fault(&mut self, saved: &SavedVcpu) {
        if !self.common.has_pre_fault {
            return;
        }
        let linear = [saved.regs.rip, saved.regs.rsp].map(|address| {
            let translated = self.fd.translate_gva(address).ok().filter(|t| t.valid != 0);
            translated.map(|t| t.physical_address)
        });
        let [code, stack] = linear;
        let pages = [code, stack, Some(saved.sregs.cr3)].map(|a| a.map(|a| a & !(PAGE_SIZE - 1)));
        for page in pages.into_iter().flatten() {
            if !self.pre_faulted.contains(&Some(page)) {
                let _ = raw::pre_fault(&self.fd, page, PAGE_SIZE);
            }
        }
        self.pre_faulted = pages;
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
        let Some(warm_up) = self.warm_up.take() else { return Ok(()) };
        start::apply(&self.fd, warm_up.start())?;
        for _ in 0..WARM_UP_EXITS_MAX {
            self.kicker.clear();
            match self.run()? {
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

    fn set_start(&mut self, start: &Start) -> Result<(), BackendError> {
        start::apply(&self.fd, start)
    }

    fn run(&mut self) -> Result<Exit<'_>, BackendError> {
        self.loaded = None;
        match self.enter()? {
            Some(reason) => Ok(self.exit(reason)),
            None => Ok(Exit::Interrupted),
        }
    }

    fn finish_io(&mut self) -> Result<Exit<'_>, BackendError> {
        if !self.is_io_pending {
            return Ok(Exit::Interrupted);
        }
        self.kicker.hold_back();
        self.run()
    }

    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        Ok(encode(&state::save(&self.fd, &self.common)?))
    }

    fn load(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        let saved: SavedVcpu = decode(bytes).map_err(BackendError::state)?;
        self.is_io_pending = false;
        // Taken out: after an error nothing is known.
        let before = self.loaded.take();
        state::load(&self.fd, &self.common, &saved, before.as_ref())?;
        self.pre_fault(&saved);
        self.loaded = Some(saved);
        Ok(())
    }

    fn enter_and_leave(&mut self) -> Result<Duration, BackendError> {
        let begin = clock::now();
        self.kicker.hold_back();
        // With the flag set KVM returns before it enters the guest.
        self.enter()?;
        Ok(clock::now().since(begin))
    }
}
