//! bzImage by its 64-bit entry (Documentation/arch/x86/boot.rst and zero-page.rst).

use super::kernel::{CMDLINE, HIGH_MEMORY, load_initrd, memory_map};
use super::{loader_memory, write};
use crate::MachineError;
use crate::config::KernelConfig;
use crate::kvm::{SELECTOR_BOOT_CODE, SELECTOR_BOOT_DATA};
use crate::memory::GuestMemory;
use crate::vcpu::backend::Start;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::{BzImage, KernelLoader};
use martlet_units::{Gpa, PAGE_SIZE};
use std::fs::File;
use vm_memory::{ByteValued, GuestAddress};

const GDT: Gpa = Gpa(0x1000);
const ZERO_PAGE: Gpa = Gpa(0x7000);
/// Page tables: the top one, the next, and one page directory for each of four gibibytes.
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xa000;
const PAGE_DIRECTORIES: u64 = 0xb000;
const GIBIBYTES: u64 = 4;

/// Bytes from where the protected-mode code was loaded to the 64-bit entry.
const ENTRY_64: u64 = 0x200;
/// Bit 0 of `xloadflags`: there is a 64-bit entry.
const XLF_KERNEL_64: u16 = 1;
/// The oldest protocol with that field.
const PROTOCOL_MIN: u16 = 0x020c;
/// A loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
/// `loadflags`: the kernel may use memory up to `heap_end_ptr`; harmless, unused by 64-bit entry.
const E820_RAM: u32 = 1;
const PRESENT_WRITABLE: u64 = 0x3;
const LARGE: u64 = 0x80;

pub(super) fn load(
    config: &KernelConfig,
    file: &mut File,
    memory: &GuestMemory,
    cmdline_bytes: usize,
) -> Result<Start, MachineError> {
    let name = config.kernel.display();
    let refuse = |why: &str| MachineError::Config { reason: format!("kernel {name}: {why}") };
    let loaded = loader_memory::view(memory, |view| {
        BzImage::load(view, None, file, Some(GuestAddress(HIGH_MEMORY)))
            .map_err(|error| refuse(&format!("neither PVH ELF nor bzImage ({error})")))
    })?;
    let Some(header) = loaded.setup_header else { return Err(refuse("no setup header")) };
    if header.version < PROTOCOL_MIN || header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(refuse("no 64-bit kernel"));
    }
    let cmdline_max = usize::try_from(header.cmdline_size).unwrap_or(usize::MAX);
    if cmdline_bytes > cmdline_max.saturating_add(1) {
        return Err(refuse(&format!("takes {cmdline_max} bytes of command line")));
    }
    // The kernel unpacks itself in place, into `init_size` bytes.
    let needed = loaded.kernel_load.0.saturating_add(u64::from(header.init_size));
    let kernel_end = loaded.kernel_end.max(needed);
    let low_end = memory.guest().first().map_or(0, |r| r.range().end().0 * PAGE_SIZE);
    if kernel_end > low_end {
        return Err(refuse(&format!("needs memory up to {kernel_end:#x}")));
    }
    let initrd = load_initrd(config, memory, kernel_end, header.initrd_addr_max.into())?;

    let mut params = boot_params { hdr: header, ..Default::default() };
    params.acpi_rsdp_addr = super::acpi::ROOT.0;
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = narrow(CMDLINE.0)?;
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = narrow(initrd.start)?;
        params.hdr.ramdisk_size = narrow(initrd.bytes)?;
    }
    for (slot, entry) in params.e820_table.iter_mut().zip(memory_map(memory)) {
        *slot = boot_e820_entry { addr: entry.start, size: entry.bytes, r#type: E820_RAM };
        params.e820_entries += 1;
    }
    write(memory, ZERO_PAGE, params.as_slice(), "the boot parameters")?;
    write_tables(memory)?;
    Ok(Start::Linux64 {
        entry: loaded.kernel_load.0 + ENTRY_64,
        boot_params: ZERO_PAGE.0,
        page_tables: PML4,
        gdt: GDT.0,
    })
}

/// Linux wants 64-bit code at selector 0x10, data at 0x18, and itself mapped at its own address.
fn write_tables(memory: &GuestMemory) -> Result<(), MachineError> {
    const { assert!(SELECTOR_BOOT_CODE == 0x10 && SELECTOR_BOOT_DATA == 0x18) };
    let gdt = [0, 0, 0x00af_9b00_0000_ffff_u64, 0x00cf_9300_0000_ffff].map(u64::to_le_bytes);
    write(memory, GDT, gdt.as_flattened(), "the descriptor table")?;
    let mut tables = vec![(PML4, vec![PDPT | PRESENT_WRITABLE])];
    let directory = |gib: u64| PAGE_DIRECTORIES + gib * PAGE_SIZE;
    tables.push((PDPT, (0..GIBIBYTES).map(|gib| directory(gib) | PRESENT_WRITABLE).collect()));
    for gib in 0..GIBIBYTES {
        let entry = |index: u64| (gib << 30 | index << 21) | PRESENT_WRITABLE | LARGE;
        tables.push((directory(gib), (0..512).map(entry).collect()));
    }
    for (gpa, entries) in tables {
        let bytes: Vec<u8> = entries.into_iter().flat_map(u64::to_le_bytes).collect();
        write(memory, Gpa(gpa), &bytes, "page tables")?;
    }
    Ok(())
}

/// Addresses and sizes below 4 GiB, as the loaded parts are.
fn narrow(value: u64) -> Result<u32, MachineError> {
    u32::try_from(value)
        .map_err(|_| MachineError::Config { reason: format!("{value:#x} is not below 4 GiB") })
}
