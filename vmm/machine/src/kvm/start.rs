//! Registers of a vCPU at the start of a new guest.

use super::kvm;
use super::saved::SavedSregs;
use crate::vcpu::backend::{BackendError, Level3Tables, Start};
use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW,
    KVM_VCPUEVENT_VALID_SMM, kvm_fpu, kvm_mp_state, kvm_regs, kvm_segment, kvm_sregs,
    kvm_vcpu_events,
};
use kvm_ioctls::VcpuFd;

const CR0_PE: u64 = 1;
const CR0_MP: u64 = 1 << 1;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const CR4_OSFXSR: u64 = 1 << 9;
const CR4_OSXMMEXCPT: u64 = 1 << 10;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Always 1.
const RFLAGS_RESERVED: u64 = 1 << 1;
/// Lets level 3 use all ports.
const RFLAGS_IOPL3: u64 = 3 << 12;

/// Segment types, Intel SDM volume 3, 3.4.5.1 and 3.5.
const TYPE_CODE: u8 = 0xb;
const TYPE_DATA: u8 = 0x3;
const TYPE_BUSY_TSS: u8 = 0xb;

/// Selectors in the tables that `boot` writes; the lowest two bits are the privilege level.
pub(crate) const SELECTOR_CODE64_USER: u16 = 0x33;
pub(crate) const SELECTOR_DATA_USER: u16 = 0x2b;
/// Linux's boot protocol names these (Documentation/arch/x86/boot.rst).
pub(crate) const SELECTOR_BOOT_CODE: u16 = 0x10;
pub(crate) const SELECTOR_BOOT_DATA: u16 = 0x18;

/// The default control word of a freshly initialised FPU, and all SSE exceptions masked.
const FPU_CONTROL: u16 = 0x37f;
const MXCSR: u32 = 0x1f80;

/// Puts a vCPU at its start. A parked one stays as KVM made it: waiting for INIT and SIPI.
pub(super) fn apply(fd: &VcpuFd, start: &Start) -> Result<(), BackendError> {
    let mut sregs = kvm("KVM_GET_SREGS", fd.get_sregs())?;
    let mut regs = kvm_regs { rflags: RFLAGS_RESERVED, ..Default::default() };
    match *start {
        Start::Parked => return Ok(()),
        Start::Level3 { rip, rsp, rdi, rsi, tables } => {
            level3(&mut sregs, tables);
            let rflags = RFLAGS_RESERVED | RFLAGS_IOPL3;
            regs = kvm_regs { rip, rsp, rdi, rsi, rflags, ..regs };
        }
        Start::Pvh { entry, start_info } => {
            pvh(&mut sregs);
            regs = kvm_regs { rip: entry, rbx: start_info, ..regs };
        }
        Start::Linux64 { entry, boot_params, page_tables, gdt } => {
            linux64(&mut sregs, page_tables, gdt);
            regs = kvm_regs { rip: entry, rsi: boot_params, ..regs };
        }
    }
    // KVM makes all vCPUs but the first wait for a start-up message.
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    kvm("KVM_SET_MP_STATE", fd.set_mp_state(runnable))?;
    let fpu = kvm_fpu { fcw: FPU_CONTROL, mxcsr: MXCSR, ..Default::default() };
    kvm("KVM_SET_FPU", fd.set_fpu(&fpu))?;
    kvm("KVM_SET_SREGS", fd.set_sregs(&sregs))?;
    kvm("KVM_SET_REGS", fd.set_regs(&regs))
}

/// Forgets events that were loaded: an interrupt or exception that was under way, and what the
/// vCPU would meet at its next entry. KVM writes its registers to memory for one of those.
pub(super) fn clear_events(fd: &VcpuFd) -> Result<(), BackendError> {
    let flags =
        KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW | KVM_VCPUEVENT_VALID_SMM;
    let none = kvm_vcpu_events { flags, ..Default::default() };
    kvm("KVM_SET_VCPU_EVENTS", fd.set_vcpu_events(&none))
}

/// Gives a vCPU that is at a [`Start::Level3`] the paging mode of a saved one, if that pages in the
/// same way, so that what KVM makes of its page tables is good for both.
pub(super) fn apply_mode(fd: &VcpuFd, saved: &SavedSregs) -> Result<(), BackendError> {
    if saved.efer & EFER_LMA == 0 || saved.cr4 & CR4_LA57 != 0 || saved.cr0 & CR0_PG == 0 {
        return Ok(());
    }
    let mut sregs = kvm("KVM_GET_SREGS", fd.get_sregs())?;
    (sregs.cr0, sregs.cr4, sregs.efer) = (saved.cr0, saved.cr4, saved.efer);
    kvm("KVM_SET_SREGS", fd.set_sregs(&sregs))
}

fn segment(selector: u16, type_: u8, dpl: u8) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

fn set_data(sregs: &mut kvm_sregs, data: kvm_segment) {
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
}

/// A task state segment, which a processor must have, though nobody uses it.
fn set_task(sregs: &mut kvm_sregs) {
    sregs.tr = kvm_segment { limit: 0x67, type_: TYPE_BUSY_TSS, present: 1, ..Default::default() };
}

/// 64-bit code at privilege level 3 that may use all ports.
fn level3(sregs: &mut kvm_sregs, tables: Level3Tables) {
    let code = segment(SELECTOR_CODE64_USER, TYPE_CODE, 3);
    sregs.cs = kvm_segment { db: 0, l: 1, ..code };
    set_data(sregs, segment(SELECTOR_DATA_USER, TYPE_DATA, 3));
    set_task(sregs);
    (sregs.gdt.base, sregs.gdt.limit) = tables.gdt;
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr3 = tables.cr3;
    sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
    sregs.cr4 = CR4_PAE | CR4_OSFXSR | CR4_OSXMMEXCPT;
    sregs.efer = EFER_LME | EFER_LMA;
}

/// The Xen project's x86 HVM direct boot ABI: protected mode, flat segments, no paging.
fn pvh(sregs: &mut kvm_sregs) {
    sregs.cs = segment(SELECTOR_BOOT_CODE, TYPE_CODE, 0);
    set_data(sregs, segment(SELECTOR_BOOT_DATA, TYPE_DATA, 0));
    set_task(sregs);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
}

/// Documentation/arch/x86/boot.rst, "64-bit Boot Protocol".
fn linux64(sregs: &mut kvm_sregs, page_tables: u64, gdt: u64) {
    let code = segment(SELECTOR_BOOT_CODE, TYPE_CODE, 0);
    sregs.cs = kvm_segment { db: 0, l: 1, ..code };
    set_data(sregs, segment(SELECTOR_BOOT_DATA, TYPE_DATA, 0));
    set_task(sregs);
    (sregs.gdt.base, sregs.gdt.limit) = (gdt, 4 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr3 = page_tables;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
}
