//! The guest, as a file in memory.
#![allow(unsafe_code)]
// UNSAFETY: the assembler lays the file out; two labels say where it is.

use crate::Fail;
use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use std::io::Cursor;
use vm_memory::GuestMemoryMmap;

/// Where the guest writes its ticks' numbers, four bytes each.
pub(crate) const TICK_PORT: u16 = 0x500;

std::arch::global_asm!(include_str!("guest.s"), options(att_syntax));

unsafe extern "C" {
    static stranger_guest_begin: u8;
    static stranger_guest_end: u8;
}

/// Loads it; returns its 32-bit entry point.
pub(crate) fn load(memory: &GuestMemoryMmap) -> Result<u64, Fail> {
    let begin = &raw const stranger_guest_begin;
    let length = (&raw const stranger_guest_end).addr() - begin.addr();
    // SAFETY: the bytes between two labels of one section of this program, which nobody writes.
    let file = unsafe { std::slice::from_raw_parts(begin, length) };
    match Elf::load(memory, None, &mut Cursor::new(file), None)?.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(entry) => Ok(entry.0),
        other => Err(format!("the guest: {other}").into()),
    }
}
