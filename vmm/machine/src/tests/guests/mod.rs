//! Guests in assembly, which the compiler of the tests assembles.
#![allow(unsafe_code)]
// UNSAFETY: assembly, which is data here and never executed; its labels are its bounds.

use std::arch::global_asm;
use std::ptr::addr_of;

global_asm!(
    include_str!("long_mode.s"),
    include_str!("timers.s"),
    include_str!("pages.s"),
    options(att_syntax)
);

unsafe extern "C" {
    static guest_timers_begin: u8;
    static guest_timers_end: u8;
    static guest_pages_begin: u8;
    static guest_pages_end: u8;
}

fn between(begin: *const u8, end: *const u8) -> Vec<u8> {
    let bytes = end as usize - begin as usize;
    // SAFETY: both labels are of one block of read-only data, in this order.
    unsafe { std::slice::from_raw_parts(begin, bytes) }.to_vec()
}

/// Counts a timer's ticks; the numbers are those that `timers.s` explains.
pub(super) fn timers(kind: u32, period: u32) -> Vec<u8> {
    let mut code = between(addr_of!(guest_timers_begin), addr_of!(guest_timers_end));
    code[4..8].copy_from_slice(&kind.to_le_bytes());
    code[8..12].copy_from_slice(&period.to_le_bytes());
    code
}

/// Has KVM write guest memory.
pub(super) fn pages() -> Vec<u8> {
    between(addr_of!(guest_pages_begin), addr_of!(guest_pages_end))
}
