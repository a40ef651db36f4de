//! A kernel from a file: which format it is, its initial RAM disk, its command line.

use super::{acpi, bzimage, loader_memory, pvh, write};
use crate::MachineError;
use crate::config::KernelConfig;
use crate::memory::GuestMemory;
use crate::vcpu::backend::Start;
use martlet_guest_program::NicPlace;
use martlet_units::{Gpa, PAGE_SIZE};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;
use vm_memory::{Bytes, GuestAddress};

/// Where the command line goes, and the longest that fits there with its zero. Linux takes 2048.
pub(super) const CMDLINE: Gpa = Gpa(0x2_0000);
const CMDLINE_BYTES_MAX: usize = 0x1_0000;
/// Kernels and RAM disks are loaded from here on; what is below is for tables.
pub(super) const HIGH_MEMORY: u64 = 0x10_0000;
/// End of the memory below 640 KiB that a kernel may use; what is above, up to [`HIGH_MEMORY`], is a
/// BIOS's.
const LOW_MEMORY_END: u64 = 0x9_fc00;

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

/// A run of guest memory in a map for a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapEntry {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

/// A RAM disk in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Initrd {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

/// Opens a file and says which one if that fails.
pub(super) fn file_error<'a>(
    what: &'static str,
    path: &'a Path,
) -> impl Fn(io::Error) -> MachineError + 'a {
    move |source| MachineError::File { what, path: path.to_owned(), source }
}

/// Loads it and says where the vCPUs start: the first at the kernel, the others parked.
pub(super) fn prepare(
    config: &KernelConfig,
    vcpus: u16,
    memory: &GuestMemory,
    nics: &[NicPlace],
) -> Result<Vec<Start>, MachineError> {
    let cmdline = cmdline(&config.cmdline)?;
    write(memory, CMDLINE, &cmdline, "the command line")?;
    acpi::install(memory, vcpus, nics)?;
    let mut file = File::open(&config.kernel).map_err(file_error("kernel", &config.kernel))?;
    let mut magic = [0; 4];
    let is_elf = match file.read_exact(&mut magic) {
        Ok(()) => magic == ELF_MAGIC,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(file_error("kernel", &config.kernel)(error)),
    };
    file.rewind().map_err(file_error("kernel", &config.kernel))?;
    let first = if is_elf {
        pvh::load(config, &mut file, memory)?
    } else {
        bzimage::load(config, &mut file, memory, cmdline.len())?
    };
    let mut starts = vec![first];
    starts.resize(usize::from(vcpus), Start::Parked);
    Ok(starts)
}

/// The command line with its zero.
fn cmdline(text: &str) -> Result<Vec<u8>, MachineError> {
    let mut bytes = text.as_bytes().to_vec();
    if bytes.contains(&0) || bytes.len() >= CMDLINE_BYTES_MAX {
        let reason =
            format!("a command line is at most {} bytes, none of them 0", CMDLINE_BYTES_MAX - 1);
        return Err(MachineError::Config { reason });
    }
    bytes.push(0);
    Ok(bytes)
}

/// The guest's memory as a kernel may use it.
pub(super) fn memory_map(memory: &GuestMemory) -> Vec<MapEntry> {
    let mut map = Vec::new();
    for region in memory.guest() {
        let (start, end) =
            (region.range().start().0 * PAGE_SIZE, region.range().end().0 * PAGE_SIZE);
        if start == 0 {
            map.push(MapEntry { start, bytes: end.min(LOW_MEMORY_END) });
            if end > HIGH_MEMORY {
                map.push(MapEntry { start: HIGH_MEMORY, bytes: end - HIGH_MEMORY });
            }
        } else {
            map.push(MapEntry { start, bytes: end - start });
        }
    }
    map
}

/// Loads the RAM disk, if there is one, as high as it may lie, behind the kernel.
pub(super) fn load_initrd(
    config: &KernelConfig,
    memory: &GuestMemory,
    kernel_end: u64,
    last_byte_max: u64,
) -> Result<Option<Initrd>, MachineError> {
    let Some(path) = &config.initrd else { return Ok(None) };
    let mut file = File::open(path).map_err(file_error("initrd", path))?;
    let bytes = file.metadata().map_err(file_error("initrd", path))?.len();
    let low_end = memory.guest().first().map_or(0, |r| r.range().end().0 * PAGE_SIZE);
    let end = low_end.min(last_byte_max.saturating_add(1));
    let start = end.checked_sub(bytes).map(|start| start / PAGE_SIZE * PAGE_SIZE);
    let Some(start) = start.filter(|start| *start >= kernel_end.max(HIGH_MEMORY)) else {
        let reason = format!("{}: {bytes} bytes of initrd do not fit", path.display());
        return Err(MachineError::Config { reason });
    };
    let count = usize::try_from(bytes)
        .map_err(|_| MachineError::Config { reason: "the initrd is too large".into() })?;
    loader_memory::view(memory, |view| {
        view.read_exact_volatile_from(GuestAddress(start), &mut file, count).map_err(|error| {
            MachineError::File {
                what: "initrd",
                path: path.clone(),
                source: io::Error::other(error),
            }
        })
    })?;
    Ok(Some(Initrd { start, bytes }))
}
