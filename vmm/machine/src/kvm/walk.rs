//! Where something of a guest lies in its memory, by its own page tables.
//!
//! `KVM_TRANSLATE` knows, too, but marks each entry that it passes as accessed (arch/x86/kvm/mmu/
//! paging_tmpl.h, update_accessed_dirty_bits). In a rehearsal that must not be: memory is not
//! complete, and what was a table once may hold data by now, which nobody would send again.

use super::saved::SavedSregs;
use crate::memory::GuestMemory;
use martlet_units::Gpa;

const CR0_PG: u64 = 1 << 31;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

/// Of a table's entry (Intel SDM volume 3, 4.5).
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Bits of an address that a page has, that a table adds, and that the largest page has.
const PAGE_BITS: u32 = 12;
const TABLE_BITS: u32 = 9;
const LARGEST_BITS: u32 = 30;

/// The guest physical address behind a linear one: without paging, or with 64-bit paging. `None`
/// where nothing is mapped, and of other guests.
pub(super) fn translate(memory: &GuestMemory, sregs: &SavedSregs, linear: u64) -> Option<u64> {
    if sregs.cr0 & CR0_PG == 0 {
        return Some(linear);
    }
    if sregs.efer & EFER_LMA == 0 {
        return None;
    }
    let levels = if sregs.cr4 & CR4_LA57 == 0 { 4 } else { 5 };
    let mut table = sregs.cr3 & ADDRESS;
    for level in (0..levels).rev() {
        let bits = PAGE_BITS + level * TABLE_BITS;
        let mut entry = [0; 8];
        if !memory.read(Gpa(table + (linear >> bits & 511) * 8), &mut entry) {
            return None;
        }
        let entry = u64::from_le_bytes(entry);
        if entry & PRESENT == 0 {
            return None;
        }
        if level == 0 || (entry & LARGE != 0 && bits <= LARGEST_BITS) {
            let within = (1 << bits) - 1;
            return Some(entry & ADDRESS & !within | linear & within);
        }
        table = entry & ADDRESS;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_ram::GuestRam;
    use martlet_units::{Gfn, PageCount, PageRange};
    use std::sync::Arc;

    fn memory(entries: &[(u64, u64)]) -> GuestMemory {
        let range = PageRange::try_new(Gfn(0), PageCount(16)).unwrap();
        let memory = GuestMemory::new(Arc::new(GuestRam::create(&[range]).unwrap()));
        for (at, entry) in entries {
            assert!(memory.write(Gpa(*at), &entry.to_le_bytes()));
        }
        memory
    }

    fn sregs(cr4: u64) -> SavedSregs {
        // The lowest bits of CR3 are no address.
        SavedSregs { cr0: CR0_PG, cr3: 0x1018, cr4, efer: EFER_LMA, ..Default::default() }
    }

    #[test]
    fn pages_of_all_sizes_are_found() {
        let no_execute = 1 << 63;
        let memory = memory(&[
            (0x1000 + 511 * 8, 0x2003),
            (0x2000 + 510 * 8, 0x3003),
            (0x2000 + 511 * 8, 0x83 | 7 << 30),
            (0x3000 + 7 * 8, 0x4003),
            (0x3000 + 8 * 8, 0x0060_1083),
            (0x4000 + 9 * 8, 0xabcd_e003 | no_execute),
        ]);
        let find = |linear| translate(&memory, &sregs(0), linear);
        let base = 0xffff_ff80_0000_0000 | 510 << 30;
        assert_eq!(find(base | 7 << 21 | 9 << 12 | 0x123), Some(0xabcd_e123));
        // Bit 12 of a large page's entry is no address.
        assert_eq!(find(base | 8 << 21 | 0x1_2345), Some(0x61_2345));
        assert_eq!(
            find(0xffff_ff80_0000_0000 | 511 << 30 | 0x123_4567),
            Some(7 << 30 | 0x123_4567)
        );
        assert_eq!(find(base | 9 << 21), None, "not present");
        assert_eq!(find(0), None, "not present at the top");
    }

    #[test]
    fn five_levels_no_paging_and_tables_that_are_not_there() {
        let memory = memory(&[(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x00ff_f003)]);
        assert_eq!(translate(&memory, &sregs(CR4_LA57), 5), None, "a table beyond the memory");
        assert_eq!(translate(&memory, &SavedSregs::default(), 5), Some(5));
        let legacy = SavedSregs { efer: 0, ..sregs(0) };
        assert_eq!(translate(&memory, &legacy, 5), None);
    }
}
