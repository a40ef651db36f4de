//! What the CPU does where the device does not.
#![allow(unsafe_code)]
// UNSAFETY: a trait's method is given a page that others may write, as a raw pointer.

/// The CPU's way to check a page for zero: the caller's, who knows the processor.
pub trait CpuCheck: Send {
    /// Whether all 4096 bytes are zero.
    ///
    /// # Safety
    /// `page` is the address of a mapped page, a multiple of 4096, that stays mapped during the
    /// call. Others may write it meanwhile.
    unsafe fn is_zero(&self, page: *const u8) -> bool;
}

/// The address of a page of a run.
pub(crate) fn pointer(address: u64) -> *const u8 {
    let address = usize::try_from(address).expect("an address of this process");
    std::ptr::with_exposed_provenance(address)
}
