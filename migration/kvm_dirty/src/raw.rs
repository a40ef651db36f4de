//! KVM's calls of dirty tracking, each as one function.
#![allow(unsafe_code)]
// UNSAFETY: system calls that take pointers, and memory shared with the kernel (the dirty ring of a
// vCPU). Everything that could be got wrong about either is in this module.

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_PAGE_OFFSET, KVMIO, kvm_clear_dirty_log,
    kvm_dirty_gfn, kvm_dirty_log, kvm_enable_cap, kvm_userspace_memory_region,
};
use martlet_ram::RamRegion;
use martlet_units::PAGE_SIZE;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_ref};
use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

// Numbers from linux/kvm.h.
ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
ioctl_iow_nr!(KVM_SET_USER_MEMORY_REGION, KVMIO, 0x46, kvm_userspace_memory_region);
ioctl_iow_nr!(KVM_ENABLE_CAP, KVMIO, 0xa3, kvm_enable_cap);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a region of guest memory a slot of a VM, or changes its flags.
///
/// # Safety
/// The region outlives the last run of a vCPU of the VM: its guest reaches whatever is mapped there.
pub(crate) unsafe fn set_slot(
    vm: &OwnedFd,
    slot: u32,
    flags: u32,
    region: &RamRegion,
) -> io::Result<()> {
    let memory = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: region.range().start().0 * PAGE_SIZE,
        memory_size: region.len_bytes(),
        userspace_addr: region.host_ptr(0).expose_provenance() as u64,
    };
    // SAFETY: the structure is complete; the memory behind it is a live mapping, by the caller's
    // promise for as long as it matters.
    check(unsafe { ioctl_with_ref(vm, KVM_SET_USER_MEMORY_REGION(), &memory) })
}

/// Reads a slot's whole dirty log: bit `b` of word `w` is page `64 * w + b`. `words` must have one
/// bit for each page, rounded up to 64.
///
/// # Safety
/// The slot has `pages` pages: the kernel writes a bit for each, and knows nothing of `words`.
pub(crate) unsafe fn get_dirty_log(
    vm: &OwnedFd,
    slot: u32,
    pages: u64,
    words: &mut [u64],
) -> io::Result<()> {
    assert!(words.len() as u64 >= pages.div_ceil(64), "the log has a bit for each page");
    let mut log = kvm_dirty_log { slot, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
    // SAFETY: the kernel writes one bit a page, rounded up to a long (virt/kvm/kvm_main.c,
    // kvm_dirty_bitmap_bytes), which is inside of `words` as asserted and promised.
    check(unsafe { ioctl_with_ref(vm, KVM_GET_DIRTY_LOG(), &log) })
}

/// Catches the next write to the pages whose bits are set. `first_page` is a multiple of 64, and
/// so is `pages` unless it ends with the slot (Documentation/virt/kvm/api.rst, 4.117).
pub(crate) fn clear_dirty_log(
    vm: &OwnedFd,
    slot: u32,
    first_page: u64,
    pages: u32,
    words: &[u64],
) -> io::Result<()> {
    assert!(words.len() as u64 >= u64::from(pages).div_ceil(64), "a bit for each page");
    let mut log = kvm_clear_dirty_log { slot, num_pages: pages, first_page, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = words.as_ptr().cast_mut().cast();
    // SAFETY: the kernel reads one bit a page, inside of `words` as asserted; it does not write.
    check(unsafe { ioctl_with_ref(vm, KVM_CLEAR_DIRTY_LOG(), &log) })
}

/// Makes clearing the log ours (Documentation/virt/kvm/api.rst, 7.18): bit 0. Bit 1, all pages dirty
/// at first, would make the first round clear (and KVM write-protect) every page of the guest,
/// touched or not.
pub(crate) fn enable_manual_protect(vm: &OwnedFd) -> io::Result<()> {
    let mut request =
        kvm_enable_cap { cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, ..Default::default() };
    request.args[0] = 1;
    // SAFETY: the kernel reads exactly this structure.
    check(unsafe { ioctl_with_ref(vm, KVM_ENABLE_CAP(), &request) })
}

/// Catches the next write to all pages whose ring entries were harvested, in all rings.
pub(crate) fn reset_dirty_rings(vm: &OwnedFd) -> io::Result<()> {
    // SAFETY: takes no argument.
    check(unsafe { ioctl(vm, KVM_RESET_DIRTY_RINGS()) })
}

/// The dirty ring of one vCPU (Documentation/virt/kvm/api.rst, 8.29).
#[derive(Debug)]
pub(crate) struct DirtyRing {
    start: NonNull<kvm_dirty_gfn>,
    entries: u32,
    /// The next entry to look at; counts on and on.
    next: u32,
}

// SAFETY: memory shared with the kernel, valid in every thread until the drop.
unsafe impl Send for DirtyRing {}

const DIRTY_GFN_F_DIRTY: u32 = 1;
const DIRTY_GFN_F_RESET: u32 = 2;

impl DirtyRing {
    /// `entries` as in the capability: a power of two.
    pub(crate) fn map(vcpu: BorrowedFd<'_>, entries: u32) -> io::Result<DirtyRing> {
        assert!(entries.is_power_of_two());
        let offset = u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE;
        // SAFETY: a new mapping at an address of the kernel's choice harms nobody.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let bytes = ring_bytes(entries);
            rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, vcpu, offset)
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(DirtyRing { start, entries, next: 0 })
    }

    /// Takes all entries that KVM has published, in order, and gives them back for the reset.
    /// Returns how many there were.
    pub(crate) fn harvest(&mut self, mut each: impl FnMut(u32, u64)) -> u32 {
        let mut taken = 0;
        while taken < self.entries {
            let index = (self.next & (self.entries - 1)) as usize;
            let entry = self.start.as_ptr().wrapping_add(index);
            // SAFETY: below `entries`, so inside the mapping; the kernel writes the flags with a
            // release after the rest (virt/kvm/dirty_ring.c, kvm_dirty_gfn_set_dirtied).
            let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
            // Acquire: slot and offset are read after the flag that publishes them.
            if flags.load(Ordering::Acquire) & DIRTY_GFN_F_DIRTY == 0 {
                break;
            }
            // SAFETY: as above; published, so the kernel does not write it before the reset.
            let (slot, offset) =
                unsafe { ((&raw const (*entry).slot).read(), (&raw const (*entry).offset).read()) };
            each(slot, offset);
            // Release: the kernel's reset, which reads this flag with an acquire, comes after the
            // reads above.
            flags.store(DIRTY_GFN_F_RESET, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            taken += 1;
        }
        taken
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: made by `map` with this length, and nobody holds a pointer into it.
        let _ = unsafe { rustix::mm::munmap(start, ring_bytes(self.entries)) };
    }
}

fn ring_bytes(entries: u32) -> usize {
    entries as usize * size_of::<kvm_dirty_gfn>()
}
