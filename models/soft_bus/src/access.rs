//! Copies between memory that others write at the same time and memory of our own.
#![allow(unsafe_code)]
// UNSAFETY: shared memory is a raw pointer. It is read and written by relaxed atomics of the
// largest size that fits each address, so that words stay whole, as on a bus.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

macro_rules! step {
    ($from_shared:ident, $to_shared:ident, $atomic:ty, $int:ty) => {
        /// # Safety
        /// `shared` is valid and aligned for an access of this size.
        unsafe fn $from_shared(shared: *mut u8, own: &mut [u8]) {
            // SAFETY: by the caller's promise.
            let value: $int = unsafe { <$atomic>::from_ptr(shared.cast()) }.load(Ordering::Relaxed);
            own.copy_from_slice(&value.to_ne_bytes());
        }

        /// # Safety
        /// `shared` is valid and aligned for an access of this size.
        unsafe fn $to_shared(shared: *mut u8, own: &[u8]) {
            let mut bytes = [0; size_of::<$int>()];
            bytes.copy_from_slice(own);
            let value = <$int>::from_ne_bytes(bytes);
            // SAFETY: by the caller's promise.
            unsafe { <$atomic>::from_ptr(shared.cast()) }.store(value, Ordering::Relaxed);
        }
    };
}

step!(load_8, store_8, AtomicU8, u8);
step!(load_16, store_16, AtomicU16, u16);
step!(load_32, store_32, AtomicU32, u32);
step!(load_64, store_64, AtomicU64, u64);

/// The largest access, in bytes, for this address and this many bytes that are left.
fn step_bytes(address: usize, left: usize) -> usize {
    [8, 4, 2].into_iter().find(|size| left >= *size && address.is_multiple_of(*size)).unwrap_or(1)
}

/// Fills `own` from `shared`.
///
/// # Safety
/// `shared` is valid for reads of `own.len()` bytes, and does not overlap `own`.
pub(crate) unsafe fn read(shared: *mut u8, own: &mut [u8]) {
    let (mut at, mut rest) = (shared, own);
    while !rest.is_empty() {
        if at.addr().is_multiple_of(8) && rest.len() >= 16 {
            // Whole words, in a loop of nothing else: mailboxes and frames are mostly that.
            let (words, later) = rest.as_chunks_mut::<8>();
            for word in words {
                // SAFETY: as below, for each word.
                unsafe { load_64(at, word) };
                at = at.wrapping_add(8);
            }
            rest = later;
            continue;
        }
        let size = step_bytes(at.addr(), rest.len());
        let (now, later) = rest.split_at_mut(size);
        // SAFETY: `size` bytes are inside of what the caller promised, and aligned.
        unsafe {
            match size {
                8 => load_64(at, now),
                4 => load_32(at, now),
                2 => load_16(at, now),
                _ => load_8(at, now),
            }
        }
        (at, rest) = (at.wrapping_add(size), later);
    }
}

/// Writes `own` to `shared`.
///
/// # Safety
/// `shared` is valid for writes of `own.len()` bytes, and does not overlap `own`.
pub(crate) unsafe fn write(shared: *mut u8, own: &[u8]) {
    let (mut at, mut rest) = (shared, own);
    while !rest.is_empty() {
        if at.addr().is_multiple_of(8) && rest.len() >= 16 {
            let (words, later) = rest.as_chunks::<8>();
            for word in words {
                // SAFETY: as below, for each word.
                unsafe { store_64(at, word) };
                at = at.wrapping_add(8);
            }
            rest = later;
            continue;
        }
        let size = step_bytes(at.addr(), rest.len());
        let (now, later) = rest.split_at(size);
        // SAFETY: `size` bytes are inside of what the caller promised, and aligned.
        unsafe {
            match size {
                8 => store_64(at, now),
                4 => store_32(at, now),
                2 => store_16(at, now),
                _ => store_8(at, now),
            }
        }
        (at, rest) = (at.wrapping_add(size), later);
    }
}

/// One byte of shared memory.
///
/// # Safety
/// `shared` is valid for as long as the result is used.
pub(crate) unsafe fn byte<'a>(shared: *mut u8) -> &'a AtomicU8 {
    // SAFETY: by the caller's promise; a byte is always aligned.
    unsafe { AtomicU8::from_ptr(shared) }
}
