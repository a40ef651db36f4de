//! Page tables and descriptor tables for guests that have none of their own at their start.

use super::write;
use crate::MachineError;
use crate::memory::GuestMemory;
use crate::vcpu::backend::Level3Tables;
use martlet_units::{Gpa, PAGE_SIZE};

/// Present, writable, for level 3; accessed and dirty from the start, so that no processor needs
/// to write to the tables.
pub(crate) const ENTRY_FLAGS: u64 = 0x67;
/// The same for an entry that maps a large page itself.
pub(crate) const LARGE_FLAGS: u64 = ENTRY_FLAGS | 0x80;
const ENTRIES: u64 = 512;
const GIB: u64 = 1 << 30;
const MIB2: u64 = 2 << 20;

/// The memory that the guest leaves to the VMM, below 640 KiB.
const GDT: u64 = 0x1000;
const PML4: u64 = 0x5000;
const PDPT: u64 = 0x6000;
const PAGE_DIRECTORIES: u64 = 0x7000;
const PAGE_DIRECTORIES_END: u64 = 0x9_0000;

/// Gibibytes mapped by 2 MiB pages; those above take 1 GiB pages.
const SMALL_GIB_MAX: u64 = (PAGE_DIRECTORIES_END - PAGE_DIRECTORIES) / PAGE_SIZE;

/// Last byte's offset in the table that [`level3_gdt`] makes.
pub(crate) const LEVEL3_GDT_LIMIT: u16 = 7 * 8 - 1;

/// Null, code and data for level 0, and the same for level 3: 32-bit code, data, 64-bit code.
pub(crate) fn level3_gdt() -> Vec<u8> {
    let entries = [
        0,
        0x00af_9a00_0000_ffff,
        0x00cf_9200_0000_ffff,
        0,
        0x00cf_fa00_0000_ffff,
        0x00cf_f200_0000_ffff,
        0x00af_fa00_0000_ffff,
    ];
    entries.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Writes tables for level 3 and maps all memory at its own address, and devices below `mmio_end`.
pub(crate) fn install(
    memory: &GuestMemory,
    mmio_end: u64,
    has_gigabyte_pages: bool,
) -> Result<Level3Tables, MachineError> {
    write(memory, Gpa(GDT), &level3_gdt(), "descriptor tables")?;
    let end = memory.guest().last().map_or(0, |region| region.range().end().0 * PAGE_SIZE);
    for (gpa, bytes) in identity(end.max(mmio_end), has_gigabyte_pages)? {
        write(memory, gpa, &bytes, "page tables")?;
    }
    Ok(Level3Tables { cr3: PML4, gdt: (GDT, LEVEL3_GDT_LIMIT) })
}

/// Page tables that map addresses from 0 to `end` to themselves.
fn identity(end: u64, has_gigabyte_pages: bool) -> Result<Vec<(Gpa, Vec<u8>)>, MachineError> {
    let gibibytes = end.div_ceil(GIB);
    let most = if has_gigabyte_pages { ENTRIES } else { SMALL_GIB_MAX };
    if gibibytes > most {
        let reason = format!("the built-in program can use {most} GiB of addresses here");
        return Err(MachineError::Config { reason });
    }
    let small = gibibytes.min(SMALL_GIB_MAX);
    let words = |entries: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
        entries.flat_map(u64::to_le_bytes).collect()
    };
    let mut tables = vec![(Gpa(PML4), words(&mut [PDPT | ENTRY_FLAGS].into_iter()))];
    let pdpt = |gib| {
        if gib < small {
            (PAGE_DIRECTORIES + gib * PAGE_SIZE) | ENTRY_FLAGS
        } else {
            (gib * GIB) | LARGE_FLAGS
        }
    };
    tables.push((Gpa(PDPT), words(&mut (0..gibibytes).map(pdpt))));
    for gib in 0..small {
        let entry = |index| (gib * GIB + index * MIB2) | LARGE_FLAGS;
        let gpa = Gpa(PAGE_DIRECTORIES + gib * PAGE_SIZE);
        tables.push((gpa, words(&mut (0..ENTRIES).map(entry))));
    }
    Ok(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_maps_to_itself() {
        let tables = identity(200 * GIB, true).unwrap();
        let entry = |table: u64, index: u64| {
            let (_, bytes) = tables.iter().find(|(gpa, _)| gpa.0 == table).unwrap();
            let at = usize::try_from(index * 8).unwrap();
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        let address = |entry: u64| entry & 0xf_ffff_ffff_f000;
        for gpa in [0, MIB2, 3 * GIB + 5 * MIB2, SMALL_GIB_MAX * GIB, 199 * GIB] {
            let pdpt = address(entry(PML4, 0));
            let third = entry(pdpt, gpa / GIB);
            let mapped = if third & 0x80 != 0 {
                address(third) + gpa % GIB
            } else {
                address(entry(address(third), gpa % GIB / MIB2)) + gpa % MIB2
            };
            assert_eq!(mapped, gpa);
        }
        assert!(identity(SMALL_GIB_MAX * GIB + 1, false).is_err());
    }

    #[test]
    fn tables_stay_below_the_legacy_hole() {
        for (gpa, bytes) in identity(200 * GIB, true).unwrap() {
            assert!(gpa.0 >= PML4 && gpa.0 + bytes.len() as u64 <= PAGE_DIRECTORIES_END);
        }
        assert_eq!(level3_gdt().len() - 1, usize::from(LEVEL3_GDT_LIMIT));
    }
}
