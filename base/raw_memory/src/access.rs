//! Copies in and out, and clearing.
#![allow(unsafe_code)]
// UNSAFETY: memory that others write meanwhile is only reached by raw pointers, in assembly that
// the compiler neither sees nor splits.

use crate::MemoryFault;

/// Fills `into` from memory. 1, 2, 4 or 8 bytes are read as one; of others each byte is read once,
/// in any order. After an error some of `into` is filled.
///
/// # Safety
/// As many bytes at `from` as `into` has are mapped for reading. Others may write them meanwhile,
/// and no Rust reference to them lives but of atomics.
pub unsafe fn read(from: *const u8, into: &mut [u8]) -> Result<(), MemoryFault> {
    // SAFETY: the caller's promise for `from`; `into` is ours alone and so doesn't overlap.
    unsafe { copy(into.as_mut_ptr(), from, into.len()) }
}

/// Writes `bytes` to memory. 1, 2, 4 or 8 bytes are written as one. After an error some of them are
/// written.
///
/// # Safety
/// As for [`read`], for writing.
pub unsafe fn write(to: *mut u8, bytes: &[u8]) -> Result<(), MemoryFault> {
    // SAFETY: the caller's promise for `to`.
    unsafe { copy(to, bytes.as_ptr(), bytes.len()) }
}

/// Sets memory to zero. After an error some of it is.
///
/// # Safety
/// As for [`write`], for `bytes` bytes.
pub unsafe fn clear(to: *mut u8, bytes: usize) -> Result<(), MemoryFault> {
    // SAFETY: the caller's promise.
    match unsafe { imp::martlet_raw_memory_clear(to, bytes) } {
        0 => Ok(()),
        _ => Err(MemoryFault),
    }
}

/// Whether the page of this byte can be read now.
///
/// # Safety
/// As for [`read`], for one byte.
pub unsafe fn is_reachable(at: *const u8) -> bool {
    // SAFETY: the caller's promise.
    unsafe { read(at, &mut [0]) }.is_ok()
}

/// # Safety
/// The caller of `read` or `write` promises it for one side; the other is a slice.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Result<(), MemoryFault> {
    // SAFETY: the caller's promise.
    match unsafe { imp::martlet_raw_memory_copy(to, from, bytes) } {
        0 => Ok(()),
        _ => Err(MemoryFault),
    }
}

#[cfg(target_arch = "x86_64")]
mod imp {
    unsafe extern "sysv64" {
        /// 0, or something else after a fault.
        pub(super) fn martlet_raw_memory_copy(to: *mut u8, from: *const u8, bytes: usize) -> u32;
        /// The same.
        pub(super) fn martlet_raw_memory_clear(to: *mut u8, bytes: usize) -> u32;
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

    macro_rules! one {
        ($atomic:ident, $to:ident, $from:ident) => {{
            let from = unsafe { $atomic::from_ptr($from.cast_mut().cast()) };
            unsafe { $atomic::from_ptr($to.cast()) }
                .store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }};
    }

    pub(super) unsafe fn martlet_raw_memory_copy(
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> u32 {
        let aligned = to.addr().is_multiple_of(bytes) && from.addr().is_multiple_of(bytes);
        match bytes {
            2 if aligned => one!(AtomicU16, to, from),
            4 if aligned => one!(AtomicU32, to, from),
            8 if aligned => one!(AtomicU64, to, from),
            _ => {
                for at in 0..bytes {
                    let (to, from) = (to.wrapping_add(at), from.wrapping_add(at));
                    one!(AtomicU8, to, from);
                }
            }
        }
        0
    }

    pub(super) unsafe fn martlet_raw_memory_clear(to: *mut u8, bytes: usize) -> u32 {
        for at in 0..bytes {
            unsafe { AtomicU8::from_ptr(to.wrapping_add(at)) }.store(0, Ordering::Relaxed);
        }
        0
    }
}
