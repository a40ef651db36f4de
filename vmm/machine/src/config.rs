//! What a machine is made of, as its owner says it.

use martlet_guest_program as _;
use martlet_units::ByteCount;
use std::path::PathBuf;

/// What executes the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The kernel's virtual machines.
    Kvm,
    /// Threads of this process; for the built-in program only.
    Threads,
}

/// How KVM tracks dirty pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tracking {
    /// One bit a page, read and cleared by range.
    Log,
    /// A ring of page numbers for each vCPU.
    Ring,
    /// What suits: the log.
    #[default]
    Auto,
}

/// Where the guest's serial port goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SerialOut {
    /// This process's standard input and output.
    Stdio,
    /// A file or FIFO, output only. A FIFO whose reader stalls loses bytes; the guest never waits.
    File(PathBuf),
    /// A listening socket for one client at a time, both directions.
    Unix(PathBuf),
    /// Nowhere.
    #[default]
    None,
}

/// A kernel to boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelConfig {
    /// PVH ELF or bzImage.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub cmdline: String,
}

/// Bytes of memory of the smallest machine.
pub const MEMORY_MIN: ByteCount = ByteCount(16 << 20);
