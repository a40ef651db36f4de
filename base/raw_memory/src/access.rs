//! Copies in and out, and clearing.
#![allow(unsafe_code)]
// UNSAFETY: memory that others write meanwhile is only reached by raw pointers, in assembly that
// the compiler neither sees nor splits.

use crate::MemoryFault;
use core::ops::Range;

/// Fills `into` from memory, from its start to its end. Each byte is read once; words of 2, 4 and 8
/// bytes that lie at a multiple of their size are read whole. After an error some of `into` is
/// filled.
///
/// # Safety
/// As many bytes at `from` as `into` has are mapped for reading. Others may write them meanwhile,
/// and no Rust reference to them lives but of atomics.
pub unsafe fn read(from: *const u8, into: &mut [u8]) -> Result<(), MemoryFault> {
    steps(from, into.len(), |place| {
        let now = &mut into[place.clone()];
        // SAFETY: the caller's promise for `from`; `into` is ours alone and so doesn't overlap.
        unsafe { copy(now.as_mut_ptr(), from.wrapping_add(place.start), now.len()) }
    })
}

/// Writes `bytes` to memory, as [`read`] reads it. After an error some of them are written.
///
/// # Safety
/// As for [`read`], for writing.
pub unsafe fn write(to: *mut u8, bytes: &[u8]) -> Result<(), MemoryFault> {
    steps(to, bytes.len(), |place| {
        let now = &bytes[place.clone()];
        // SAFETY: the caller's promise for `to`.
        unsafe { copy(to.wrapping_add(place.start), now.as_ptr(), now.len()) }
    })
}

/// Sets memory to zero. After an error some of it is.
///
/// # Safety
/// As for [`write`], for `bytes` bytes.
pub unsafe fn clear(to: *mut u8, bytes: usize) -> Result<(), MemoryFault> {
    // SAFETY: the caller's promise.
    match unsafe { martlet_raw_memory_clear(to, bytes) } {
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

const WORD_BYTES: usize = 8;

/// Cuts bytes at `at` into steps: word by word up to the first multiple of the largest word's size,
/// and all the rest, which then begins there.
fn steps(
    at: *const u8,
    bytes: usize,
    mut step: impl FnMut(Range<usize>) -> Result<(), MemoryFault>,
) -> Result<(), MemoryFault> {
    let mut done = 0;
    while done < bytes && !at.addr().wrapping_add(done).is_multiple_of(WORD_BYTES) {
        let fits = |size: &usize| {
            *size <= bytes - done && at.addr().wrapping_add(done).is_multiple_of(*size)
        };
        let size = [4, 2].into_iter().find(fits).unwrap_or(1);
        step(done..done + size)?;
        done += size;
    }
    if done < bytes { step(done..bytes) } else { Ok(()) }
}

/// # Safety
/// The caller of `read` or `write` promises it for one side; the other is a slice.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Result<(), MemoryFault> {
    // SAFETY: the caller's promise.
    match unsafe { martlet_raw_memory_copy(to, from, bytes) } {
        0 => Ok(()),
        _ => Err(MemoryFault),
    }
}

unsafe extern "sysv64" {
    /// 0, or something else after a fault.
    fn martlet_raw_memory_copy(to: *mut u8, from: *const u8, bytes: usize) -> u32;
    /// The same.
    fn martlet_raw_memory_clear(to: *mut u8, bytes: usize) -> u32;
}
