//! ACPI tables (specification 6.5), by which a kernel learns of the vCPUs, the interrupt
//! controllers, the serial port and the virtio-mmio devices, and how to reset the machine and to
//! turn it off.

use super::write;
use crate::MachineError;
use crate::devices::board::{PM1_CONTROL, PM1_EVENT, SCI_LINE, SLEEP_TYPE_OFF};
use crate::devices::virtio::{MMIO_STRIDE, Nics};
use crate::devices::{RESET_CONTROL, RESET_CONTROL_RESET, SERIAL, SERIAL_IRQ};
use crate::memory::GuestMemory;
use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Name, ONE, Package, ResourceTemplate, Scope,
    ZERO,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, facs::FACS};
use martlet_guest_program::NicPlace;
use martlet_units::Gpa;

/// The root pointer, where a kernel that is not told of it looks (5.2.5.1); the tables follow. No
/// map calls this memory usable.
pub(super) const ROOT: Gpa = Gpa(0xe_0000);
const END: u64 = 0x10_0000;
/// More than any table wants; FACS wants 64.
const ALIGNMENT: usize = 64;

const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;

const OEM: [u8; 6] = *b"MARTLT";
const OEM_TABLE: [u8; 8] = *b"MACHINE ";
const OEM_REVISION: u32 = 1;

/// `IAPC_BOOT_ARCH` (table 5.11): neither VGA nor MSI nor ASPM. The clock at ports 0x70 and 0x71 can
/// be read, but has no interrupt, so it is not told of; nor is a keyboard controller.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5;
/// `RESET_VALUE`: a hard reset, as the register of the PIIX wants it.
const RESET_VALUE: u8 = RESET_CONTROL_RESET | 1 << 1;
/// Flags of a local APIC table: there are 8259s, too (5.2.12).
const PCAT_COMPAT: u32 = 1;
const MADT_HEADER_BYTES: u32 = 44;
/// Flags of an interrupt source override (table 5.26).
const ACTIVE_HIGH_LEVEL: u8 = 0b1101;

/// Puts the tables into memory.
pub(super) fn install(
    memory: &GuestMemory,
    vcpus: u16,
    nics: &[NicPlace],
) -> Result<(), MachineError> {
    write(memory, ROOT, &tables(vcpus, nics), "the ACPI tables")
}

/// All of it, for [`ROOT`].
fn tables(vcpus: u16, nics: &[NicPlace]) -> Vec<u8> {
    let mut image = vec![0; Rsdp::len()];
    let mut add = |table: &dyn Aml| {
        image.resize(image.len().next_multiple_of(ALIGNMENT), 0);
        let at = ROOT.0 + image.len() as u64;
        table.to_aml_bytes(&mut image);
        at
    };
    let dsdt = add(&dsdt(nics));
    let facs = add(&FACS::new());
    let fadt = add(&fadt(dsdt, facs));
    let madt = add(&madt(vcpus));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = add(&xsdt);
    let mut root = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut root);
    image[..root.len()].copy_from_slice(&root);
    assert!(ROOT.0 + image.len() as u64 <= END, "{} bytes of ACPI tables", image.len());
    image
}

fn fadt(dsdt: u64, facs: u64) -> impl Aml {
    let low = |gpa: u64| u32::try_from(gpa).expect("the tables lie below 1 MiB");
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_32(low(dsdt))
        .firmware_ctrl_32(low(facs))
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // Not among the fixed registers: a sleep button, and the clock's wake-up.
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::ResetRegSup);
    fadt.sci_int = u16::try_from(SCI_LINE).expect("an ISA line").into();
    // No SMI command: the machine is always in ACPI mode (4.8.2.5).
    fadt.pm1a_evt_blk = u32::from(PM1_EVENT).into();
    fadt.pm1a_cnt_blk = u32::from(PM1_CONTROL).into();
    (fadt.pm1_evt_len, fadt.pm1_cnt_len) = (4, 2);
    // Neither C2 nor C3 (5.2.9).
    (fadt.p_lvl2_lat, fadt.p_lvl3_lat) = (101.into(), 1001.into());
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    let register = u64::from(RESET_CONTROL);
    fadt.reset_reg = GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, register);
    fadt.reset_value = RESET_VALUE;
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"MARTLET ").into();
    fadt.finalize()
}

fn madt(vcpus: u16) -> Sdt {
    // KVM routes each line to the pin of its number, the timer's too: that is what no override says.
    // Fields of an override: ISA bus, line, pin, flags (5.2.12.5).
    let [line, ..] = SCI_LINE.to_le_bytes();
    let level = [2, 10, 0, line, line, 0, 0, 0, ACTIVE_HIGH_LEVEL, 0];
    // LINT1 of all processors is the non-maskable interrupt (5.2.12.7).
    let nmi = [4, 6, 0xff, 0, 0, 1];
    let mut structures = Vec::new();
    // The machine has no more than a byte can number.
    for id in (0..=u8::MAX).take(usize::from(vcpus)) {
        ProcessorLocalApic::new(id, id, EnabledStatus::Enabled).to_aml_bytes(&mut structures);
    }
    IoApic::new(0, IO_APIC, 0).to_aml_bytes(&mut structures);
    structures.extend(level.iter().chain(&nmi));
    let mut madt = Sdt::new(*b"APIC", MADT_HEADER_BYTES, 5, OEM, OEM_TABLE, OEM_REVISION);
    madt.write_u32(36, LOCAL_APIC);
    madt.write_u32(40, PCAT_COMPAT);
    madt.append_slice(&structures);
    madt
}

fn dsdt(nics: &[NicPlace]) -> Sdt {
    let mut bytes = Vec::new();
    let off = [SLEEP_TYPE_OFF, SLEEP_TYPE_OFF, 0, 0];
    let off = Package::new(off.iter().map(|value| value as &dyn Aml).collect());
    Name::new("_S5_".into(), &off).to_aml_bytes(&mut bytes);

    let irq = edge(SERIAL_IRQ);
    let ports = IO::new(SERIAL, SERIAL, 1, 8);
    let resources = ResourceTemplate::new(vec![&irq, &ports]);
    let (id, number) = (EISAName::new("PNP0501"), ZERO);
    let (id, number) = (Name::new("_HID".into(), &id), Name::new("_UID".into(), &number));
    let resources = Name::new("_CRS".into(), &resources);
    let serial = Device::new("COM1".into(), vec![&id, &number, &resources]);
    Scope::new("_SB_".into(), vec![&serial]).to_aml_bytes(&mut bytes);

    for (card, nic) in nics.iter().enumerate() {
        if let Some(line) = Nics::line(card) {
            virtio_mmio(&mut bytes, card, nic.registers, line);
        }
    }
    let mut dsdt = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, OEM_REVISION);
    dsdt.append_slice(&bytes);
    dsdt
}

/// A device that Linux knows by this name (drivers/virtio/virtio_mmio.c), number `number`.
fn virtio_mmio(bytes: &mut Vec<u8>, number: usize, registers: Gpa, line: u32) {
    let base = u32::try_from(registers.0).expect("registers lie below 4 GiB");
    let length = u32::try_from(MMIO_STRIDE).expect("a page");
    let (memory, irq) = (Memory32Fixed::new(true, base, length), edge(line));
    let resources = ResourceTemplate::new(vec![&memory, &irq]);
    let id = Name::new("_HID".into(), &"LNRO0005");
    let unique = Name::new("_UID".into(), &number);
    let coherent = Name::new("_CCA".into(), &ONE);
    let resources = Name::new("_CRS".into(), &resources);
    let path = format!("V{number:03X}");
    let device = Device::new(path.as_str().into(), vec![&id, &unique, &coherent, &resources]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(bytes);
}

fn edge(line: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte))
    }

    fn number(bytes: &[u8], at: usize) -> u64 {
        bytes[at..at + 4].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// The table at this guest physical address, of the length that it tells.
    fn at(image: &[u8], gpa: u64) -> &[u8] {
        let rest = &image[usize::try_from(gpa - ROOT.0).unwrap()..];
        &rest[..usize::try_from(number(rest, 4)).unwrap()]
    }

    #[test]
    fn tables_point_to_each_other_and_their_sums_are_zero() {
        let nic = |page: u64| NicPlace {
            registers: Gpa(0xd000_0000 + page * 0x1000),
            pairs: 1,
            queue_size_max: 256,
        };
        for vcpus in [1, 2, 254] {
            let image = tables(vcpus, &[nic(0), nic(1)]);
            assert_eq!(
                (&image[..8], sum(&image[..20]), sum(&image[..36])),
                (&b"RSD PTR "[..], 0, 0)
            );
            let xsdt = at(&image, number(&image, 24));
            assert_eq!((&xsdt[..4], xsdt.len(), sum(xsdt)), (&b"XSDT"[..], 36 + 2 * 8, 0));
            let fadt = at(&image, number(xsdt, 36));
            assert_eq!((&fadt[..4], fadt.len(), sum(fadt)), (&b"FACP"[..], 276, 0));
            let madt = at(&image, number(xsdt, 44));
            assert_eq!((&madt[..4], sum(madt)), (&b"APIC"[..], 0));
            assert_eq!(madt.len(), 44 + usize::from(vcpus) * 8 + 12 + 10 + 6);
            assert_eq!(&at(&image, number(fadt, 36))[..4], b"FACS");
            let dsdt = at(&image, number(fadt, 40));
            assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
            let count = |what: &[u8]| dsdt.windows(what.len()).filter(|part| *part == what).count();
            assert_eq!((count(b"LNRO0005"), count(b"COM1"), count(b"_S5_")), (2, 1, 1));
            assert_eq!(count(&0xd000_1000_u32.to_le_bytes()), 1);
        }
    }

    /// Typed from the specification's table 5.9: what of it a kernel goes by here.
    #[test]
    fn the_fixed_description_is_as_specified() {
        let mut fadt = Vec::new();
        super::fadt(0xe_0040, 0xe_0080).to_aml_bytes(&mut fadt);
        assert_eq!(fadt[46..48], [15, 0], "SCI_INT");
        assert_eq!(fadt[48..53], [0; 5], "SMI_CMD, ACPI_ENABLE");
        assert_eq!(fadt[56..60], [0, 6, 0, 0], "PM1a_EVT_BLK");
        assert_eq!(fadt[64..68], [4, 6, 0, 0], "PM1a_CNT_BLK");
        assert_eq!(fadt[88..90], [4, 2], "PM1_EVT_LEN, PM1_CNT_LEN");
        assert_eq!(fadt[109..111], [0x3c, 0], "IAPC_BOOT_ARCH");
        assert_eq!(fadt[112..116], [0x65, 0x04, 0, 0], "flags; a fixed power button has none");
        assert_eq!(fadt[116..129], [1, 8, 0, 1, 0xf9, 0xc, 0, 0, 0, 0, 0, 0, 6], "RESET_REG");
    }
}
