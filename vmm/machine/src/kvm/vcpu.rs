//! One vCPU under KVM.

use super::kick::KvmKicker;
use super::msrs::{self, MSR_IA32_TSC, MSR_IA32_TSC_DEADLINE, MsrTable};
use super::raw::{self, RunArea, XsaveSize};
use super::saved::{SavedNumbered, SavedVcpu, decode, encode};
use super::start;
use super::tsc::TscPlan;
use super::warm::{self, WarmUp};
use crate::clock;
use crate::dirty::RingShare;
use crate::vcpu::backend::{BackendError, Exit, Kicker, Start, VcpuBackend};
use kvm_bindings::{
    KVM_EXIT_DIRTY_RING_FULL, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO,
    KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_EXIT_SYSTEM_EVENT, KVM_SYSTEM_EVENT_RESET,
    kvm_lapic_state, kvm_mp_state, kvm_sregs, kvm_sregs2, kvm_xcr, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// `struct kvm_lapic_state`.
const LAPIC_BYTES: usize = 1024;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LMA: u64 = 1 << 10;
/// Exits for nothing of interest before the one that ends the warm-up.
const WARM_UP_EXITS_MAX: u32 = 1000;
const SREGS2_FLAGS_PDPTRS_VALID: u64 = 1;

/// What the vCPUs of a VM have in common.
pub(super) struct VcpuCommon {
    pub(super) msrs: MsrTable,
    pub(super) xsave: XsaveSize,
    pub(super) has_sregs2: bool,
    pub(super) tsc_khz: u32,
    pub(super) tsc: TscPlan,
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
    fd: VcpuFd,
}

/// Maps an error of kvm-ioctls and names what failed.
fn kvm<T>(
    operation: &'static str,
    result: Result<T, kvm_ioctls::Error>,
) -> Result<T, BackendError> {
    result.map_err(io::Error::from).map_err(BackendError::host(operation))
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
        Ok(KvmVcpu { area, ring, kicker, common, warm_up, is_io_pending: false, fd })
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
                let access = self.area.mmio_access();
                let address = access.address;
                let data = self.area.mmio_data(access);
                if access.is_write {
                    Exit::MmioWrite { address, data }
                } else {
                    Exit::MmioRead { address, data }
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

    fn port_exit(&mut self) -> Exit<'_> {
        self.is_io_pending = true;
        let Some(access) = self.area.port_access() else {
            return Exit::Ended("KVM describes an impossible port access".into());
        };
        let (port, size) = (access.port, access.size);
        let data = self.area.port_data(access);
        if access.is_in { Exit::In { port, size, data } } else { Exit::Out { port, size, data } }
    }

    fn get_pdptrs(&self, sregs: &kvm_sregs) -> Result<Option<[u64; 4]>, BackendError> {
        let pages_with_pae =
            sregs.cr0 & CR0_PG != 0 && sregs.cr4 & CR4_PAE != 0 && sregs.efer & EFER_LMA == 0;
        if !pages_with_pae || !self.common.has_sregs2 {
            return Ok(None);
        }
        let sregs2 = raw::get_sregs2(&self.fd).map_err(BackendError::host("KVM_GET_SREGS2"))?;
        Ok((sregs2.flags & SREGS2_FLAGS_PDPTRS_VALID != 0).then_some(sregs2.pdptrs))
    }

    fn set_sregs(&self, saved: &SavedVcpu) -> Result<(), BackendError> {
        let sregs = kvm_sregs::from(&saved.sregs);
        match saved.pdptrs {
            Some(pdptrs) if self.common.has_sregs2 => {
                let sregs2 = kvm_sregs2 {
                    cs: sregs.cs,
                    ds: sregs.ds,
                    es: sregs.es,
                    fs: sregs.fs,
                    gs: sregs.gs,
                    ss: sregs.ss,
                    tr: sregs.tr,
                    ldt: sregs.ldt,
                    gdt: sregs.gdt,
                    idt: sregs.idt,
                    cr0: sregs.cr0,
                    cr2: sregs.cr2,
                    cr3: sregs.cr3,
                    cr4: sregs.cr4,
                    cr8: sregs.cr8,
                    efer: sregs.efer,
                    apic_base: sregs.apic_base,
                    flags: SREGS2_FLAGS_PDPTRS_VALID,
                    pdptrs,
                };
                raw::set_sregs2(&self.fd, &sregs2).map_err(BackendError::host("KVM_SET_SREGS2"))
            }
            _ => kvm("KVM_SET_SREGS", self.fd.set_sregs(&sregs)),
        }
    }

    fn get_xsave(&self) -> Result<Vec<u8>, BackendError> {
        let mut area = vec![0; self.common.xsave.bytes()];
        raw::get_xsave(&self.fd, self.common.xsave, &mut area)
            .map_err(BackendError::host("KVM_GET_XSAVE"))?;
        let used = area.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        area.truncate(used);
        Ok(area)
    }

    fn set_xsave(&self, saved: &[u8]) -> Result<(), BackendError> {
        let bytes = self.common.xsave.bytes();
        if saved.len() > bytes {
            let reason = format!("{} bytes of XSAVE state, this host has {bytes}", saved.len());
            return Err(BackendError::state(reason));
        }
        let mut area = vec![0; bytes];
        area[..saved.len()].copy_from_slice(saved);
        raw::set_xsave(&self.fd, self.common.xsave, &area)
            .map_err(BackendError::host("KVM_SET_XSAVE"))
    }

    fn set_xcrs(&self, saved: &[SavedNumbered]) -> Result<(), BackendError> {
        let mut xcrs = kvm_xcrs::default();
        if saved.len() > xcrs.xcrs.len() {
            return Err(BackendError::state(format!("{} extended control registers", saved.len())));
        }
        for (slot, xcr) in xcrs.xcrs.iter_mut().zip(saved) {
            *slot = kvm_xcr { xcr: xcr.index, value: xcr.value, ..Default::default() };
            xcrs.nr_xcrs += 1;
        }
        kvm("KVM_SET_XCRS", self.fd.set_xcrs(&xcrs))
    }

    fn get_lapic(&self) -> Result<Vec<u8>, BackendError> {
        let lapic = kvm("KVM_GET_LAPIC", self.fd.get_lapic())?;
        Ok(lapic.regs.iter().map(|byte| byte.to_ne_bytes()[0]).collect())
    }

    fn set_lapic(&self, saved: &[u8]) -> Result<(), BackendError> {
        if saved.len() != LAPIC_BYTES {
            return Err(BackendError::state(format!("{} bytes of local APIC", saved.len())));
        }
        let mut lapic = kvm_lapic_state::default();
        for (register, byte) in lapic.regs.iter_mut().zip(saved) {
            *register = libc::c_char::from_ne_bytes([*byte]);
        }
        kvm("KVM_SET_LAPIC", self.fd.set_lapic(&lapic))
    }

    /// The time stamp counter, advanced by the time that the guest stood, and then its deadline:
    /// armed earlier it would be compared with the wrong counter.
    fn set_tsc(&self, saved: &SavedVcpu) -> Result<(), BackendError> {
        let offset = saved.tsc_offset.and_then(|offset| self.common.tsc.destination_offset(offset));
        let is_set = offset.is_some_and(|offset| raw::set_tsc_offset(&self.fd, offset).is_ok());
        if !is_set {
            let elapsed_ns = self.common.tsc.elapsed_ns(saved.realtime_ns, clock::realtime_ns());
            let cycles = u128::from(elapsed_ns) * u128::from(self.common.tsc_khz) / 1_000_000;
            let cycles = u64::try_from(cycles).unwrap_or(0);
            let value = saved.tsc.wrapping_add(cycles);
            msrs::write(&self.fd, &[SavedNumbered { index: MSR_IA32_TSC, value }])?;
        }
        // The rehearsals' deadlines are of no consequence: the vCPU does not run, and each load
        // sets it anew.
        let deadline = SavedNumbered { index: MSR_IA32_TSC_DEADLINE, value: saved.tsc_deadline };
        msrs::write(&self.fd, &[deadline])?;
        Ok(())
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

    /// The order is that of the kernel's own needs: events last are read first, so that nothing
    /// read before them can change them.
    fn save(&mut self) -> Result<Vec<u8>, BackendError> {
        // KVM turns pending INIT and SIPI into mp_state when that is read, so it goes first
        // (arch/x86/kvm/x86.c, kvm_arch_vcpu_ioctl_get_mpstate).
        let mp_state = kvm("KVM_GET_MP_STATE", self.fd.get_mp_state())?.mp_state;
        let events = kvm("KVM_GET_VCPU_EVENTS", self.fd.get_vcpu_events())?;
        let regs = kvm("KVM_GET_REGS", self.fd.get_regs())?;
        let sregs = kvm("KVM_GET_SREGS", self.fd.get_sregs())?;
        let xcrs = kvm("KVM_GET_XCRS", self.fd.get_xcrs())?;
        let debug = kvm("KVM_GET_DEBUGREGS", self.fd.get_debug_regs())?;
        let used = xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize);
        let xcrs = used.map(|xcr| SavedNumbered { index: xcr.xcr, value: xcr.value }).collect();
        let apart = msrs::read(&self.fd, &[MSR_IA32_TSC, MSR_IA32_TSC_DEADLINE])?;
        let value = |place: usize| apart.get(place).map_or(0, |msr| msr.value);
        let saved = SavedVcpu {
            regs: (&regs).into(),
            pdptrs: self.get_pdptrs(&sregs)?,
            sregs: (&sregs).into(),
            xcrs,
            xsave: self.get_xsave()?,
            debug: (&debug).into(),
            lapic: self.get_lapic()?,
            msrs: self.common.msrs.save(&self.fd)?,
            tsc: value(0),
            tsc_offset: raw::get_tsc_offset(&self.fd).ok(),
            tsc_deadline: value(1),
            mp_state,
            events: (&events).into(),
            nested: None,
            realtime_ns: clock::realtime_ns(),
        };
        Ok(encode(&saved))
    }

    /// The order matters: the APIC's base (in the special registers) decides how the APIC's
    /// registers are read; XCR0 decides what of the XSAVE area counts; the deadline needs the
    /// APIC's timer mode and the TSC; events come last, because most other calls drop them.
    fn load(&mut self, state: &[u8]) -> Result<(), BackendError> {
        let saved: SavedVcpu = decode(state).map_err(BackendError::state)?;
        if saved.nested.is_some() {
            return Err(BackendError::state("the guest runs guests of its own"));
        }
        self.is_io_pending = false;
        kvm("KVM_SET_REGS", self.fd.set_regs(&(&saved.regs).into()))?;
        self.set_sregs(&saved)?;
        self.set_xcrs(&saved.xcrs)?;
        self.set_xsave(&saved.xsave)?;
        kvm("KVM_SET_DEBUGREGS", self.fd.set_debug_regs(&(&saved.debug).into()))?;
        self.set_lapic(&saved.lapic)?;
        self.common.msrs.load(&self.fd, &saved.msrs)?;
        self.set_tsc(&saved)?;
        let mp_state = kvm_mp_state { mp_state: saved.mp_state };
        kvm("KVM_SET_MP_STATE", self.fd.set_mp_state(mp_state))?;
        kvm("KVM_SET_VCPU_EVENTS", self.fd.set_vcpu_events(&(&saved.events).into()))
    }

    fn enter_and_leave(&mut self) -> Result<Duration, BackendError> {
        let begin = clock::now();
        self.kicker.hold_back();
        // With the flag set KVM returns before it enters the guest.
        self.enter()?;
        Ok(clock::now().since(begin))
    }
}
