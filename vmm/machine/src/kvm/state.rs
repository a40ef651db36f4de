//! Reading and writing a vCPU's whole state.

use super::kvm;
use super::msrs::{self, MSR_IA32_TSC, MSR_IA32_TSC_DEADLINE, MSR_KVM_SYSTEM_TIME_NEW};
use super::raw;
use super::saved::{SavedNumbered, SavedVcpu};
use super::vcpu::VcpuCommon;
use crate::clock;
use crate::vcpu::backend::BackendError;
use kvm_bindings::{kvm_lapic_state, kvm_mp_state, kvm_sregs, kvm_sregs2, kvm_xcr, kvm_xcrs};
use kvm_ioctls::VcpuFd;
use martlet_engine::LoadFor;
use martlet_units::Instant;

/// `struct kvm_lapic_state`.
const LAPIC_BYTES: usize = 1024;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LMA: u64 = 1 << 10;
const SREGS2_FLAGS_PDPTRS_VALID: u64 = 1;
/// Allows the guest to switch on VMX, which a nested state needs; a host's 0 switches it off.
const MSR_IA32_FEATURE_CONTROL: u32 = 0x3a;

/// Reads everything. The vCPU is out of the guest and its last instruction is complete.
pub(super) fn save(fd: &VcpuFd, common: &VcpuCommon) -> Result<SavedVcpu, BackendError> {
    let mp_state = mp_state(fd)?;
    let events = kvm("KVM_GET_VCPU_EVENTS", fd.get_vcpu_events())?;
    let regs = kvm("KVM_GET_REGS", fd.get_regs())?;
    let sregs = kvm("KVM_GET_SREGS", fd.get_sregs())?;
    let xcrs = kvm("KVM_GET_XCRS", fd.get_xcrs())?;
    let debug = kvm("KVM_GET_DEBUGREGS", fd.get_debug_regs())?;
    let used = xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize);
    let xcrs = used.map(|xcr| SavedNumbered { index: xcr.xcr, value: xcr.value }).collect();
    let mut msrs = common.msrs.save(fd)?;
    let (monotonic_ns, realtime_ns) = (Some(clock::now().0), clock::realtime_ns());
    let tsc = msrs::take(&mut msrs, MSR_IA32_TSC);
    let tsc_deadline = msrs::take(&mut msrs, MSR_IA32_TSC_DEADLINE);
    Ok(SavedVcpu {
        regs: regs.into(),
        pdptrs: get_pdptrs(fd, common, &sregs)?,
        sregs: sregs.into(),
        xcrs,
        xsave: get_xsave(fd, common)?,
        debug: debug.into(),
        lapic: get_lapic(fd)?,
        msrs,
        tsc,
        tsc_offset: raw::get_tsc_offset(fd).ok(),
        tsc_deadline,
        mp_state,
        events: events.into(),
        // Some kernels name the capability and then give nothing.
        nested: common.has_nested_state.then(|| raw::get_nested_state(fd).ok()).flatten(),
        realtime_ns,
        monotonic_ns,
    })
}

/// Writes everything, but for what is as it was `before`, which was loaded last and not run; and
/// but for [`release`]'s part. A rehearsal has no clock to set.
///
/// The order matters: a vCPU that a reset finds in VMX operation has to leave it before its special
/// registers can be as at the power-on; the APIC's base (in the special registers) decides how the
/// APIC's registers are read, and EFER whether there can be a nested state; XCR0 decides what of
/// the XSAVE area counts; the VM's I/O APIC may raise interrupts in the local ones as it is loaded,
/// so those follow it; the APIC's timer is set going by the TSC, and the deadline needs its mode;
/// events come last, because most other calls drop them.
pub(super) fn load(
    fd: &VcpuFd,
    common: &VcpuCommon,
    saved: &SavedVcpu,
    before: Option<&SavedVcpu>,
    what_for: LoadFor,
) -> Result<(), BackendError> {
    if before.is_none() {
        set_feature_control(fd, saved)?;
    }
    if before.map(|b| (&b.sregs, b.pdptrs)) != Some((&saved.sregs, saved.pdptrs)) {
        set_sregs(fd, common, saved)?;
    }
    if before.map(|b| &b.nested) != Some(&saved.nested) {
        set_nested(fd, saved)?;
    }
    kvm("KVM_SET_REGS", fd.set_regs(&saved.regs.clone().into()))?;
    if before.map(|b| &b.xcrs) != Some(&saved.xcrs) {
        set_xcrs(fd, &saved.xcrs)?;
    }
    if before.map(|b| &b.xsave) != Some(&saved.xsave) {
        set_xsave(fd, common, &saved.xsave)?;
    }
    if before.map(|b| &b.debug) != Some(&saved.debug) {
        kvm("KVM_SET_DEBUGREGS", fd.set_debug_regs(&saved.debug.clone().into()))?;
    }
    common.vm_loads.wait();
    if matches!(what_for, LoadFor::Start { .. }) {
        set_tsc(fd, common, saved)?;
    }
    set_lapic(fd, &saved.lapic)?;
    common.msrs.load(fd, &saved.msrs, before.map_or(&[], |b| &b.msrs))?;
    // Also if it is 0: an earlier state may have armed it.
    let deadline = SavedNumbered { index: MSR_IA32_TSC_DEADLINE, value: saved.tsc_deadline };
    msrs::write(fd, &[deadline])?;
    // Of all that is loaded only the special registers and the nested state can change it.
    let as_before = Some((&saved.sregs, &saved.nested, saved.mp_state));
    if before.map(|b| (&b.sregs, &b.nested, b.mp_state)) != as_before {
        kvm("KVM_SET_MP_STATE", fd.set_mp_state(kvm_mp_state { mp_state: saved.mp_state }))?;
    }
    kvm("KVM_SET_VCPU_EVENTS", fd.set_vcpu_events(&saved.events.clone().into()))
}

/// Writes what was held back of a loaded state: the vCPU enters the guest next, and its memory is
/// complete.
pub(super) fn release(
    fd: &VcpuFd,
    common: &VcpuCommon,
    held: &[SavedNumbered],
) -> Result<(), BackendError> {
    common.msrs.write_all(fd, held)?;
    let is_clock = |msr: &SavedNumbered| msr.index == MSR_KVM_SYSTEM_TIME_NEW && msr.value & 1 == 1;
    if held.iter().any(is_clock) {
        // The guest was stopped: its watchdogs should know. An error means that it has no clock.
        let _ = fd.kvmclock_ctrl();
    }
    Ok(())
}

/// KVM turns pending INIT and SIPI into this when it is read, so it is read before all else
/// (arch/x86/kvm/x86.c, kvm_arch_vcpu_ioctl_get_mpstate).
pub(super) fn mp_state(fd: &VcpuFd) -> Result<u32, BackendError> {
    Ok(kvm("KVM_GET_MP_STATE", fd.get_mp_state())?.mp_state)
}

fn get_pdptrs(
    fd: &VcpuFd,
    common: &VcpuCommon,
    sregs: &kvm_sregs,
) -> Result<Option<[u64; 4]>, BackendError> {
    let pages_with_pae =
        sregs.cr0 & CR0_PG != 0 && sregs.cr4 & CR4_PAE != 0 && sregs.efer & EFER_LMA == 0;
    if !pages_with_pae || !common.has_sregs2 {
        return Ok(None);
    }
    let sregs2 = raw::get_sregs2(fd).map_err(BackendError::host("KVM_GET_SREGS2"))?;
    Ok((sregs2.flags & SREGS2_FLAGS_PDPTRS_VALID != 0).then_some(sregs2.pdptrs))
}

fn set_sregs(fd: &VcpuFd, common: &VcpuCommon, saved: &SavedVcpu) -> Result<(), BackendError> {
    let sregs = kvm_sregs::from(saved.sregs.clone());
    match saved.pdptrs {
        Some(pdptrs) if common.has_sregs2 => {
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
            raw::set_sregs2(fd, &sregs2).map_err(BackendError::host("KVM_SET_SREGS2"))
        }
        Some(_) | None => kvm("KVM_SET_SREGS", fd.set_sregs(&sregs)),
    }
}

/// With 0, as at the power-on, KVM ends VMX operation (arch/x86/kvm/vmx/vmx.c, vmx_set_msr). While
/// that lasts it refuses a CR4 without VMXE, and so the power-on's special registers
/// (vmx/nested.h, nested_cr4_valid).
fn set_feature_control(fd: &VcpuFd, saved: &SavedVcpu) -> Result<(), BackendError> {
    let control = saved.msrs.iter().find(|msr| msr.index == MSR_IA32_FEATURE_CONTROL);
    // A host without it refuses it: nobody is in VMX operation there.
    control.map_or(Ok(()), |control| msrs::write(fd, &[*control]).map(drop))
}

fn set_nested(fd: &VcpuFd, saved: &SavedVcpu) -> Result<(), BackendError> {
    let Some(nested) = &saved.nested else { return Ok(()) };
    set_feature_control(fd, saved)?;
    match raw::set_nested_state(fd, nested) {
        Ok(()) => Ok(()),
        // A host that can't nest takes a guest that could and does not.
        Err(_) if is_idle(nested) => Ok(()),
        Err(source) => Err(BackendError::Host { operation: "KVM_SET_NESTED_STATE", source }),
    }
}

/// Whether a nested state says that there is no hypervisor in the guest: no VMXON region on
/// Intel; nothing but the global interrupt flag on AMD (struct kvm_nested_state).
pub(super) fn is_idle(nested: &[u8]) -> bool {
    const FORMAT_VMX: [u8; 2] = [0, 0];
    const GIF_SET: u16 = 0x100;
    let flags = nested.get(..2).map_or(u16::MAX, |b| u16::from_ne_bytes([b[0], b[1]]));
    if nested.get(2..4) == Some(&FORMAT_VMX) {
        nested.get(8..16) == Some(&[0xff; 8])
    } else {
        flags & !GIF_SET == 0
    }
}

fn get_xsave(fd: &VcpuFd, common: &VcpuCommon) -> Result<Vec<u8>, BackendError> {
    let mut area = vec![0; common.xsave.bytes()];
    raw::get_xsave(fd, common.xsave, &mut area).map_err(BackendError::host("KVM_GET_XSAVE"))?;
    let used = area.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    area.truncate(used);
    Ok(area)
}

fn set_xsave(fd: &VcpuFd, common: &VcpuCommon, saved: &[u8]) -> Result<(), BackendError> {
    let bytes = common.xsave.bytes();
    if saved.len() > bytes {
        let reason = format!("{} bytes of XSAVE state, this host has {bytes}", saved.len());
        return Err(BackendError::state(reason));
    }
    let mut area = vec![0; bytes];
    area[..saved.len()].copy_from_slice(saved);
    raw::set_xsave(fd, common.xsave, &area).map_err(BackendError::host("KVM_SET_XSAVE"))
}

fn set_xcrs(fd: &VcpuFd, saved: &[SavedNumbered]) -> Result<(), BackendError> {
    let mut xcrs = kvm_xcrs::default();
    if saved.len() > xcrs.xcrs.len() {
        return Err(BackendError::state(format!("{} extended control registers", saved.len())));
    }
    for (slot, xcr) in xcrs.xcrs.iter_mut().zip(saved) {
        *slot = kvm_xcr { xcr: xcr.index, value: xcr.value, ..Default::default() };
        xcrs.nr_xcrs += 1;
    }
    kvm("KVM_SET_XCRS", fd.set_xcrs(&xcrs))
}

fn get_lapic(fd: &VcpuFd) -> Result<Vec<u8>, BackendError> {
    let lapic = kvm("KVM_GET_LAPIC", fd.get_lapic())?;
    Ok(lapic.regs.iter().map(|byte| byte.to_ne_bytes()[0]).collect())
}

fn set_lapic(fd: &VcpuFd, saved: &[u8]) -> Result<(), BackendError> {
    if saved.len() != LAPIC_BYTES {
        return Err(BackendError::state(format!("{} bytes of local APIC", saved.len())));
    }
    let mut lapic = kvm_lapic_state::default();
    for (register, byte) in lapic.regs.iter_mut().zip(saved) {
        *register = libc::c_char::from_ne_bytes([*byte]);
    }
    kvm("KVM_SET_LAPIC", fd.set_lapic(&lapic))
}

/// The time stamp counter, advanced by the time that the guest stood.
fn set_tsc(fd: &VcpuFd, common: &VcpuCommon, saved: &SavedVcpu) -> Result<(), BackendError> {
    let offset = saved.tsc_offset.and_then(|offset| common.tsc.destination_offset(offset));
    let is_set = offset.is_some_and(|offset| raw::set_tsc_offset(fd, offset).is_ok());
    if !is_set {
        let saved_at = saved.monotonic_ns.map(Instant);
        let value = common.tsc.advance(saved.tsc, saved_at, common.tsc_khz)?;
        msrs::write(fd, &[SavedNumbered { index: MSR_IA32_TSC, value }])?;
    }
    Ok(())
}
