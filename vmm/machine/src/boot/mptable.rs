//! Tables of the MultiProcessor Specification 1.4, by which a kernel without ACPI learns of the
//! vCPUs and the I/O APIC.

use super::write;
use crate::MachineError;
use crate::memory::GuestMemory;
use martlet_units::Gpa;

/// In the last kilobyte of base memory, where kernels look (chapter 4). Before it, and not in a
/// map of usable memory, so is everything up to 640 KiB.
pub(super) const ADDRESS: u64 = 0x9_fc00;
const SPACE: usize = 0xa_0000 - 0x9_fc00;
/// The floating pointer is 16 bytes; the table follows.
const POINTER_BYTES: u64 = 16;
/// vCPUs that the tables name; more than these fit only into ACPI's.
const VCPUS_MAX: u16 = 32;

const SPEC_REVISION: u8 = 4;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
const APIC_VERSION: u8 = 0x14;
const IO_APIC_VERSION: u8 = 0x11;
const ISA_BUS: u8 = 0;
const ISA_IRQS: u8 = 16;

const ENTRY_PROCESSOR: u8 = 0;
const ENTRY_BUS: u8 = 1;
const ENTRY_IO_APIC: u8 = 2;
const ENTRY_IO_INTERRUPT: u8 = 3;
const ENTRY_LOCAL_INTERRUPT: u8 = 4;

const ENABLED: u8 = 1;
const BOOT_PROCESSOR: u8 = 2;
const INTERRUPT_INT: u8 = 0;
const INTERRUPT_NMI: u8 = 1;
const INTERRUPT_EXTINT: u8 = 3;
const ALL_APICS: u8 = 0xff;
/// Family 6, as a kernel expects of an integrated APIC; and a floating point unit and an APIC.
const CPU_SIGNATURE: u32 = 0x600;
const CPU_FEATURES: u32 = 0x201;

pub(super) fn install(memory: &GuestMemory, vcpus: u16) -> Result<(), MachineError> {
    let bytes = tables(vcpus.min(VCPUS_MAX));
    assert!(bytes.len() <= SPACE, "{} bytes of MP tables", bytes.len());
    if vcpus > VCPUS_MAX {
        tracing::warn!(vcpus, shown = VCPUS_MAX, "a kernel learns of fewer vCPUs than there are");
    }
    write(memory, Gpa(ADDRESS), &bytes, "the MP tables")
}

fn tables(vcpus: u16) -> Vec<u8> {
    let io_apic_id = u8::try_from(vcpus).unwrap_or(u8::MAX);
    let mut count = 0u16;
    let mut entries = Vec::new();
    let mut add = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..io_apic_id {
        let flags = if id == 0 { ENABLED | BOOT_PROCESSOR } else { ENABLED };
        let mut entry = vec![ENTRY_PROCESSOR, id, APIC_VERSION, flags];
        entry.extend(CPU_SIGNATURE.to_le_bytes());
        entry.extend(CPU_FEATURES.to_le_bytes());
        entry.extend([0; 8]);
        add(&entry);
    }
    add(&[&[ENTRY_BUS, ISA_BUS], b"ISA   ".as_slice()].concat());
    let io_apic = [ENTRY_IO_APIC, io_apic_id, IO_APIC_VERSION, ENABLED];
    add(&[&io_apic, IO_APIC.to_le_bytes().as_slice()].concat());
    for irq in 0..ISA_IRQS {
        // KVM routes line 0, the timer, to pin 2 as PCs do.
        let pin = match irq {
            0 => 2,
            2 => continue,
            other => other,
        };
        add(&[ENTRY_IO_INTERRUPT, INTERRUPT_INT, 0, 0, ISA_BUS, irq, io_apic_id, pin]);
    }
    add(&[ENTRY_LOCAL_INTERRUPT, INTERRUPT_EXTINT, 0, 0, ISA_BUS, 0, 0, 0]);
    add(&[ENTRY_LOCAL_INTERRUPT, INTERRUPT_NMI, 0, 0, ISA_BUS, 0, ALL_APICS, 1]);

    let pointer_target = u32::try_from(ADDRESS + POINTER_BYTES).expect("below 1 MiB");
    let mut pointer = b"_MP_".to_vec();
    pointer.extend(pointer_target.to_le_bytes());
    pointer.extend([1, SPEC_REVISION, 0, 0, 0, 0, 0, 0]);
    seal(&mut pointer, 10);

    let length = u16::try_from(44 + entries.len()).expect("fits in a kilobyte");
    let mut table = b"PCMP".to_vec();
    table.extend(length.to_le_bytes());
    table.extend([SPEC_REVISION, 0]);
    table.extend(b"MARTLET MACHINE     ");
    table.extend([0; 6]);
    table.extend(count.to_le_bytes());
    table.extend(LOCAL_APIC.to_le_bytes());
    table.extend([0; 4]);
    table.extend(entries);
    seal(&mut table, 7);

    [pointer, table].concat()
}

/// Sets the byte at `place` so that all bytes add up to 0.
fn seal(bytes: &mut [u8], place: usize) {
    let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    bytes[place] = bytes[place].wrapping_sub(sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_zero_and_lengths_true() {
        for vcpus in [1, 2, VCPUS_MAX] {
            let bytes = tables(vcpus);
            assert!(bytes.len() <= SPACE);
            let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            let (pointer, table) = bytes.split_at(16);
            assert_eq!((sum(pointer), sum(table)), (0, 0));
            assert_eq!(&table[..4], b"PCMP");
            assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
            let count = u16::from_le_bytes([table[34], table[35]]);
            assert_eq!(table.len(), 44 + usize::from(vcpus) * 20 + usize::from(count - vcpus) * 8);
        }
    }
}
