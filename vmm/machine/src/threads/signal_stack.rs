//! The stack on which a vCPU's thread handles signals, so that the kernel writes nothing into the
//! guest's.
#![allow(unsafe_code)]
// UNSAFETY: maps memory and gives it to the kernel as a stack.

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ptr;

/// A frame with all of AVX-512 and AMX has 12 KiB.
const STACK_BYTES: usize = 64 << 10;
/// Below the stack: an overflow faults instead of writing somewhere.
const GUARD_BYTES: usize = 4 << 10;

/// The calling thread's signal stack while it lives. To be dropped by the same thread.
pub(super) struct SignalStack {
    mapping: *mut c_void,
    previous: libc::stack_t,
}

impl SignalStack {
    /// Maps a stack and makes it the calling thread's.
    pub(super) fn activate() -> io::Result<SignalStack> {
        let length = GUARD_BYTES + STACK_BYTES;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, whose first page is then
        // taken away from it.
        let mapping = unsafe {
            let mapping =
                rustix::mm::mmap_anonymous(ptr::null_mut(), length, protection, MapFlags::PRIVATE)?;
            rustix::mm::mprotect(mapping, GUARD_BYTES, MprotectFlags::empty())?;
            mapping
        };
        let mut previous =
            libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        let stack = libc::stack_t {
            ss_sp: mapping.wrapping_byte_add(GUARD_BYTES),
            ss_flags: 0,
            ss_size: STACK_BYTES,
        };
        // SAFETY: the stack stays mapped until it is replaced in the drop.
        let result = unsafe { libc::sigaltstack(&raw const stack, &raw mut previous) };
        let error = io::Error::last_os_error();
        if result != 0 {
            // SAFETY: the mapping made above, which nobody uses.
            let _ = unsafe { rustix::mm::munmap(mapping, length) };
            return Err(error);
        }
        Ok(SignalStack { mapping, previous })
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        // SAFETY: what the kernel gave when this stack replaced it; then nobody uses the mapping.
        unsafe {
            if libc::sigaltstack(&raw const self.previous, ptr::null_mut()) == 0 {
                let _ = rustix::mm::munmap(self.mapping, GUARD_BYTES + STACK_BYTES);
            }
        }
    }
}
