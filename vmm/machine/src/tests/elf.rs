//! Tiny PVH kernels, made of bytes.

use crate::{Accel, Boot, KernelConfig, MachineConfig, SerialOut, Tracking};
use martlet_units::ByteCount;
use std::path::{Path, PathBuf};

/// Where the code is loaded and entered.
pub(super) const ENTRY: u32 = 0x10_0000;

/// A file that is removed at the end.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(name: &str, content: &[u8]) -> Scratch {
        let name = format!("martlet-machine-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, content).expect("the temporary directory is writable");
        Scratch(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An ELF file (System V ABI, gABI chapter 4) with one segment of code and Xen's note.
pub(super) fn pvh(code: &[u8]) -> Vec<u8> {
    let note_at: u64 = 64 + 2 * 56;
    let mut note = Vec::new();
    // Sizes of name and descriptor, type XEN_ELFNOTE_PHYS32_ENTRY.
    for word in [4u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(ENTRY.to_le_bytes());
    let code_at = note_at + note.len() as u64;

    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [u64::from(ENTRY), 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    for half in [0u16, 0, 64, 56, 2, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let code_bytes = code.len() as u64;
    for (kind, at, address, bytes) in
        [(1u32, code_at, u64::from(ENTRY), code_bytes), (4, note_at, 0, note.len() as u64)]
    {
        elf.extend(kind.to_le_bytes());
        elf.extend(7u32.to_le_bytes());
        for word in [at, address, address, bytes, bytes, 1] {
            elf.extend(word.to_le_bytes());
        }
    }
    elf.extend(note);
    elf.extend(code);
    elf
}

/// A machine that boots a kernel file.
pub(super) fn boots(kernel: &Path, memory_mib: u64) -> MachineConfig {
    MachineConfig {
        memory: ByteCount(memory_mib << 20),
        vcpus: 1,
        accel: Accel::Kvm,
        tracking: Tracking::Auto,
        boot: Boot::Kernel(KernelConfig {
            kernel: kernel.to_owned(),
            initrd: None,
            cmdline: "quiet".into(),
        }),
        serial: SerialOut::None,
    }
}
