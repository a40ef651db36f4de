//! What kvm-ioctls lacks of the kernel's interface, each call as one safe function.
#![allow(unsafe_code)]
// UNSAFETY: system calls that take pointers, and memory shared with the kernel (the run area and
// the dirty ring of a vCPU). Everything that could be got wrong about either is in this module.

use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr, kvm_nested_state,
    kvm_pre_fault_memory, kvm_run, kvm_sregs2, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU8;
use vmm_sys_util::ioctl::{
    ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref,
};
use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iow_nr, ioctl_iowr_nr};

// Numbers from linux/kvm.h.
ioctl_io_nr!(KVM_RUN, KVMIO, 0x80);
ioctl_ior_nr!(KVM_GET_XSAVE, KVMIO, 0xa4, kvm_xsave);
ioctl_iow_nr!(KVM_SET_XSAVE, KVMIO, 0xa5, kvm_xsave);
ioctl_iowr_nr!(KVM_GET_NESTED_STATE, KVMIO, 0xbe, kvm_nested_state);
ioctl_iow_nr!(KVM_SET_NESTED_STATE, KVMIO, 0xbf, kvm_nested_state);
ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
ioctl_ior_nr!(KVM_GET_XSAVE2, KVMIO, 0xcf, kvm_xsave);
ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// Bytes of an XSAVE area without extensions, and the least that KVM writes and reads.
pub(crate) const XSAVE_BYTES_MIN: usize = 4096;

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(crate) fn get_sregs2(vcpu: &VcpuFd) -> io::Result<kvm_sregs2> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: the kernel writes exactly this structure.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

pub(crate) fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> io::Result<()> {
    // SAFETY: the kernel reads exactly this structure.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

/// How XSAVE areas are moved in a VM: which call, and how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XsaveSize {
    /// What KVM_CAP_XSAVE2 says, at least [`XSAVE_BYTES_MIN`].
    bytes: usize,
    extended: bool,
}

impl XsaveSize {
    /// From the answer to KVM_CAP_XSAVE2 on the VM; 0 where it is not known.
    pub(crate) fn from_capability(bytes: i32) -> XsaveSize {
        let bytes = usize::try_from(bytes).unwrap_or(0);
        XsaveSize { bytes: bytes.max(XSAVE_BYTES_MIN), extended: bytes > XSAVE_BYTES_MIN }
    }

    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }
}

pub(crate) fn get_xsave(vcpu: &VcpuFd, size: XsaveSize, area: &mut [u8]) -> io::Result<()> {
    assert!(area.len() >= size.bytes);
    let request = if size.extended { KVM_GET_XSAVE2() } else { KVM_GET_XSAVE() };
    // SAFETY: KVM_GET_XSAVE writes 4096 bytes, KVM_GET_XSAVE2 at most what the capability says;
    // `area` has as many. The kernel copies bytes, so alignment does not matter.
    check(unsafe { ioctl_with_mut_ptr(vcpu, request, area.as_mut_ptr()) })
}

pub(crate) fn set_xsave(vcpu: &VcpuFd, size: XsaveSize, area: &[u8]) -> io::Result<()> {
    assert!(area.len() >= size.bytes);
    // SAFETY: KVM_SET_XSAVE reads at most what the capability says; `area` has as many.
    check(unsafe { ioctl_with_ptr(vcpu, KVM_SET_XSAVE(), area.as_ptr()) })
}

/// The largest state of a hypervisor inside of a guest: a header and two control structures
/// (arch/x86/include/uapi/asm/kvm.h, struct kvm_nested_state).
pub(crate) const NESTED_STATE_BYTES_MAX: usize = 128 + 2 * 4096;
/// Where its `size` is.
const NESTED_STATE_SIZE: std::ops::Range<usize> = 4..8;

/// The state of a hypervisor inside of the guest, as the kernel lays it out.
pub(crate) fn get_nested_state(vcpu: &VcpuFd) -> io::Result<Vec<u8>> {
    let mut state = vec![0; NESTED_STATE_BYTES_MAX];
    let capacity = u32::try_from(state.len()).map_err(io::Error::other)?;
    state[NESTED_STATE_SIZE].copy_from_slice(&capacity.to_ne_bytes());
    // SAFETY: the kernel reads the size from the header and writes no more than that; it copies
    // bytes, so alignment does not matter.
    check(unsafe { ioctl_with_mut_ptr(vcpu, KVM_GET_NESTED_STATE(), state.as_mut_ptr()) })?;
    let mut size = [0; 4];
    size.copy_from_slice(&state[NESTED_STATE_SIZE]);
    state.truncate(u32::from_ne_bytes(size) as usize);
    Ok(state)
}

/// Loads what [`get_nested_state`] gave; bytes that contradict themselves are refused.
pub(crate) fn set_nested_state(vcpu: &VcpuFd, state: &[u8]) -> io::Result<()> {
    let size = state.get(NESTED_STATE_SIZE).map(|bytes| {
        let mut size = [0; 4];
        size.copy_from_slice(bytes);
        u32::from_ne_bytes(size) as usize
    });
    if size != Some(state.len()) || state.len() < size_of::<kvm_nested_state>() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // SAFETY: the kernel reads as many bytes as the header says, which is the length; whatever
    // they are, it checks them.
    check(unsafe { ioctl_with_ptr(vcpu, KVM_SET_NESTED_STATE(), state.as_ptr()) })
}

/// Maps guest pages into the VM's second-level page tables before they are used.
pub(crate) fn pre_fault(vcpu: &VcpuFd, gpa: u64, bytes: u64) -> io::Result<()> {
    let mut range = kvm_pre_fault_memory { gpa, size: bytes, ..Default::default() };
    // SAFETY: the kernel reads and writes exactly this structure.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut range) })
}

/// The guest's time stamp counter minus the host's (Documentation/virt/kvm/devices/vcpu.rst, 4).
pub(crate) fn get_tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0u64;
    let attribute = tsc_offset_attribute(ptr::from_mut(&mut offset).expose_provenance());
    // SAFETY: the attribute is 8 bytes, written to `offset`, which outlives the call.
    check(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) })?;
    // SAFETY: initialised above, perhaps written by the kernel, which the compiler can't see.
    Ok(unsafe { ptr::from_ref(&offset).read_volatile() })
}

pub(crate) fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> io::Result<()> {
    let attribute = tsc_offset_attribute(ptr::from_ref(&offset).expose_provenance());
    // SAFETY: the attribute is 8 bytes, read from `offset`, which outlives the call.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) })
}

fn tsc_offset_attribute(address: usize) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: address as u64,
        ..Default::default()
    }
}

/// `struct kvm_run` and what follows it: where KVM says why the guest left.
#[derive(Debug)]
pub(crate) struct RunArea {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory shared with the kernel, valid in every thread until the drop.
unsafe impl Send for RunArea {}
// SAFETY: as above; accesses are atomic, or made by the vCPU's thread alone.
unsafe impl Sync for RunArea {}

impl Drop for RunArea {
    fn drop(&mut self) {
        // SAFETY: made by `map` with this length, and nobody holds a pointer into it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A port access, as KVM describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAccess {
    pub(crate) is_in: bool,
    pub(crate) size: u8,
    pub(crate) port: u16,
    offset: usize,
    bytes: usize,
}

impl RunArea {
    /// `bytes` is what KVM_GET_VCPU_MMAP_SIZE says.
    pub(crate) fn map(vcpu: &VcpuFd, bytes: usize) -> io::Result<RunArea> {
        assert!(bytes >= size_of::<kvm_run>());
        // SAFETY: the descriptor is open as long as `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        // SAFETY: a new mapping at an address of the kernel's choice harms nobody.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(RunArea { start, bytes })
    }

    /// While this is not 0, KVM_RUN completes pending I/O and returns EINTR before it enters the
    /// guest.
    pub(crate) fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: a byte of the mapping, which lives as long as `self`; the kernel reads it with
        // a single access, every other user goes through this function.
        unsafe { AtomicU8::from_ptr(&raw mut (*self.run()).immediate_exit) }
    }

    fn run(&self) -> *mut kvm_run {
        self.start.as_ptr().cast()
    }

    /// Enters the guest; `Ok` is an exit reason.
    pub(crate) fn enter(&mut self, vcpu: &VcpuFd) -> io::Result<u32> {
        // SAFETY: takes no argument; what the kernel writes is read from the mapping below.
        check(unsafe { ioctl(vcpu, KVM_RUN()) })?;
        // SAFETY: inside the mapping; only this thread, which holds `&mut self`, enters.
        Ok(unsafe { (&raw const (*self.run()).exit_reason).read_volatile() })
    }

    /// After KVM_EXIT_IO; `None` if what the kernel says points outside the area.
    pub(crate) fn port_access(&self) -> Option<PortAccess> {
        // SAFETY: inside the mapping; all bit patterns are valid numbers.
        let io = unsafe { (&raw const (*self.run()).__bindgen_anon_1.io).read_volatile() };
        let bytes = usize::try_from(io.count).ok()?.checked_mul(usize::from(io.size))?;
        let offset = usize::try_from(io.data_offset).ok()?;
        let end = offset.checked_add(bytes)?;
        let is_in = u32::from(io.direction) == kvm_bindings::KVM_EXIT_IO_IN;
        (end <= self.bytes).then_some(PortAccess {
            is_in,
            size: io.size,
            port: io.port,
            offset,
            bytes,
        })
    }

    /// The bytes of a port access.
    pub(crate) fn port_data(&mut self, access: PortAccess) -> &mut [u8] {
        assert!(access.offset + access.bytes <= self.bytes);
        // SAFETY: inside the mapping; the kernel touches it only in KVM_RUN, which needs
        // `&mut self` too.
        unsafe {
            let data = self.start.as_ptr().add(access.offset);
            std::slice::from_raw_parts_mut(data, access.bytes)
        }
    }

    /// After KVM_EXIT_MMIO: what the guest does, and the bytes that it wrote or that it reads.
    pub(crate) fn mmio(&mut self) -> MmioAccess<'_> {
        // SAFETY: inside the mapping; all bit patterns are valid numbers. The kernel touches it
        // only in KVM_RUN, which needs `&mut self` too.
        let mmio = unsafe { &mut (*self.run()).__bindgen_anon_1.mmio };
        let (gpa, bytes) = (mmio.phys_addr, (mmio.len as usize).min(mmio.data.len()));
        let data = &mut mmio.data[..bytes];
        if mmio.is_write == 0 {
            MmioAccess::Read { gpa, data }
        } else {
            MmioAccess::Write { gpa, data }
        }
    }

    /// After KVM_EXIT_INTERNAL_ERROR: its number.
    pub(crate) fn internal_error(&self) -> u32 {
        // SAFETY: inside the mapping; all bit patterns are valid numbers.
        unsafe { (&raw const (*self.run()).__bindgen_anon_1.internal.suberror).read_volatile() }
    }

    /// After KVM_EXIT_FAIL_ENTRY: the hardware's reason.
    pub(crate) fn entry_failure(&self) -> u64 {
        // SAFETY: inside the mapping; all bit patterns are valid numbers.
        unsafe {
            let fail = &raw const (*self.run()).__bindgen_anon_1.fail_entry;
            (&raw const (*fail).hardware_entry_failure_reason).read_volatile()
        }
    }

    /// After KVM_EXIT_SYSTEM_EVENT: its kind.
    pub(crate) fn system_event(&self) -> u32 {
        // SAFETY: inside the mapping; all bit patterns are valid numbers.
        unsafe { (&raw const (*self.run()).__bindgen_anon_1.system_event.type_).read_volatile() }
    }
}

/// An access to memory that is no RAM, at most 8 bytes of one.
pub(crate) enum MmioAccess<'a> {
    /// The bytes are to be filled before the vCPU runs again.
    Read { gpa: u64, data: &'a mut [u8] },
    /// The bytes were written.
    Write { gpa: u64, data: &'a [u8] },
}
