//! PVH: an ELF file whose note names a 32-bit entry point (Xen's docs/misc/pvh.pandoc).

use super::kernel::{CMDLINE, HIGH_MEMORY, load_initrd, memory_map};
use super::{acpi, loader_memory, write};
use crate::MachineError;
use crate::config::KernelConfig;
use crate::memory::GuestMemory;
use crate::vcpu::backend::Start;
use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use martlet_units::Gpa;
use std::fs::File;

/// Where the start information and what it points to lie.
const START_INFO: Gpa = Gpa(0x6000);
const MODULE_LIST: Gpa = Gpa(0x6800);
const MEMORY_MAP: Gpa = Gpa(0x7000);

/// XEN_HVM_START_MAGIC_VALUE: "xEn3" with the highest bit of the E set.
const START_MAGIC: u32 = 0x336e_c578;
/// The version with a memory map.
const START_VERSION: u32 = 1;
const MAP_TYPE_RAM: u32 = 1;
/// Without a mapped page table and with flat 32-bit segments nothing else can be reached.
const ENTRY_LIMIT: u64 = 1 << 32;

pub(super) fn load(
    config: &KernelConfig,
    file: &mut File,
    memory: &GuestMemory,
) -> Result<Start, MachineError> {
    let name = config.kernel.display();
    let loaded = loader_memory::view(memory, |view| {
        Elf::load(view, None, file, None)
            .map_err(|error| MachineError::Config { reason: format!("kernel {name}: {error}") })
    })?;
    let entry = match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(entry) if entry.0 < ENTRY_LIMIT => entry.0,
        PvhBootCapability::PvhEntryPresent(_)
        | PvhBootCapability::PvhEntryNotPresent
        | PvhBootCapability::PvhEntryIgnored => {
            let reason = format!("kernel {name}: an ELF file without PVH entry point");
            return Err(MachineError::Config { reason });
        }
    };
    let kernel_end = loaded.kernel_end.max(HIGH_MEMORY);
    let initrd = load_initrd(config, memory, kernel_end, ENTRY_LIMIT - 1)?;

    let map = memory_map(memory);
    let mut bytes = Vec::new();
    for entry in &map {
        bytes.extend([entry.start, entry.bytes, u64::from(MAP_TYPE_RAM)].map(u64::to_le_bytes));
    }
    write(memory, MEMORY_MAP, bytes.as_flattened(), "the memory map")?;
    if let Some(initrd) = initrd {
        let module = [initrd.start, initrd.bytes, 0, 0].map(u64::to_le_bytes);
        write(memory, MODULE_LIST, module.as_flattened(), "the module list")?;
    }
    let (modules, module_list) = initrd.map_or((0, 0), |_| (1, MODULE_LIST.0));
    let entries = u64::try_from(map.len()).unwrap_or(0);
    let start_info = [
        u64::from(START_MAGIC) | u64::from(START_VERSION) << 32,
        modules << 32,
        module_list,
        CMDLINE.0,
        acpi::ROOT.0,
        MEMORY_MAP.0,
        entries,
    ]
    .map(u64::to_le_bytes);
    write(memory, START_INFO, start_info.as_flattened(), "the start information")?;
    Ok(Start::Pvh { entry, start_info: START_INFO.0 })
}
