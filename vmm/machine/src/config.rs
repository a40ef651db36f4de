//! What a machine is made of, as its owner says it.

use crate::MachineError;
use martlet_guest_program::{Plan, ProgramParams, VCPUS_MAX as PROGRAM_VCPUS_MAX};
use martlet_units::{ByteCount, Gfn, PAGE_SIZE, PageCount, PageRange};
use std::fmt;
use std::path::PathBuf;

/// What executes the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accel {
    /// The kernel's virtual machines.
    #[default]
    Kvm,
    /// Threads of this process; for the built-in program only, with the feature `threads`.
    Threads,
}

/// Why there are none.
#[cfg(not(feature = "threads"))]
pub(crate) const NO_THREADS: &str = "this program was built without guests on threads";

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "kvm",
            Accel::Threads => "threads",
        })
    }
}

/// Set for a process that takes threads guests over TCP from the same user on this host, as those
/// of one `demo` do from each other: no proxy of this user lets others in.
pub const THREADS_BY_TCP_VARIABLE: &str = "MARTLET_THREADS_BY_TCP";

/// How KVM tracks dirty pages. Threads have one way only.
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

/// Where the guest's serial port goes. Output never holds the guest up: bytes that can't be
/// written at once are lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SerialOut {
    /// This process's standard output, and its standard input if that is a terminal.
    Stdio,
    /// A file, appended to, or a FIFO; not a symbolic link. A new one is its owner's alone. Output
    /// only.
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

/// What a new guest runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boot {
    /// The built-in program.
    Program(ProgramParams),
    /// A kernel; with KVM only.
    Kernel(KernelConfig),
}

/// A machine for a new guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineConfig {
    /// All memory, whole pages, [`MEMORY_MIN`] to [`MEMORY_MAX`]. Taken from the host as the
    /// guest touches it.
    pub memory: ByteCount,
    /// 1 to [`VCPUS_MAX`].
    pub vcpus: u16,
    /// What executes it.
    pub accel: Accel,
    /// How its dirty pages are found.
    pub tracking: Tracking,
    /// What it runs.
    pub boot: Boot,
    /// Where its serial port goes.
    pub serial: SerialOut,
}

/// Memory of the smallest machine.
pub const MEMORY_MIN: ByteCount = ByteCount(16 << 20);
/// Memory of the largest machine: what one KVM slot holds, rounded down to a power of two.
pub const MEMORY_MAX: ByteCount = ByteCount(4 << 40);
/// vCPUs of the largest machine: APIC ids of 8 bits, one of which addresses all.
pub const VCPUS_MAX: u16 = 254;

const _: () = assert!(VCPUS_MAX <= PROGRAM_VCPUS_MAX);

/// Memory below 4 GiB ends here; the rest begins at 4 GiB. The hole is for devices, and KVM's
/// interrupt controllers are in it.
const LOW_MEMORY_END: u64 = 3 << 30;
pub(crate) const HIGH_MEMORY_START: u64 = 4 << 30;

impl MachineConfig {
    /// Checks everything that can be checked without making anything.
    pub fn validate(&self) -> Result<(), MachineError> {
        let refuse = |reason| Err(MachineError::Config { reason });
        if self.memory.to_whole_pages().is_none() {
            return refuse(format!("memory of {} bytes is not whole pages", self.memory.0));
        }
        if self.memory < MEMORY_MIN || self.memory > MEMORY_MAX {
            return refuse(format!(
                "memory of {} is not between {MEMORY_MIN} and {MEMORY_MAX}",
                self.memory
            ));
        }
        if self.vcpus == 0 || self.vcpus > VCPUS_MAX {
            return refuse(format!("{} vCPUs are not between 1 and {VCPUS_MAX}", self.vcpus));
        }
        match &self.boot {
            Boot::Program(params) => Plan::validate(self.memory, self.vcpus, params)
                .map_err(|error| MachineError::Config { reason: error.to_string() }),
            Boot::Kernel(_) if self.accel == Accel::Threads => {
                refuse("a kernel needs KVM; without it only the built-in program runs".into())
            }
            Boot::Kernel(_) => Ok(()),
        }
    }

    /// The frames of its memory, around the hole.
    pub(crate) fn layout(&self) -> Vec<PageRange> {
        layout(self.memory)
    }
}

/// See [`MachineConfig::layout`]; `memory` is not 0 and whole pages.
fn layout(memory: ByteCount) -> Vec<PageRange> {
    let low = memory.0.min(LOW_MEMORY_END);
    let pieces = [(0, low), (HIGH_MEMORY_START, memory.0 - low)];
    pieces
        .into_iter()
        .filter_map(|(start, bytes)| {
            PageRange::try_new(Gfn(start / PAGE_SIZE), PageCount(bytes / PAGE_SIZE))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> MachineConfig {
        MachineConfig {
            memory: ByteCount(1 << 30),
            vcpus: 1,
            accel: Accel::Kvm,
            tracking: Tracking::Auto,
            boot: Boot::Program(ProgramParams::default()),
            serial: SerialOut::None,
        }
    }

    #[test]
    fn memory_goes_around_the_hole() {
        let ranges = |memory| -> Vec<_> {
            layout(ByteCount(memory)).iter().map(|r| (r.start().0, r.pages().0)).collect()
        };
        assert_eq!(ranges(1 << 30), [(0, 1 << 18)]);
        assert_eq!(ranges(3 << 30), [(0, 3 << 18)]);
        assert_eq!(ranges((3 << 30) + 4096), [(0, 3 << 18), (1 << 20, 1)]);
        assert_eq!(ranges(64 << 30), [(0, 3 << 18), (1 << 20, 61 << 18)]);
    }

    #[test]
    fn impossible_machines_are_refused() {
        assert!(config().validate().is_ok());
        let kernel = KernelConfig { kernel: "k".into(), initrd: None, cmdline: String::new() };
        let refused = [
            MachineConfig { memory: ByteCount(0), ..config() },
            MachineConfig { memory: ByteCount((1 << 30) + 1), ..config() },
            MachineConfig { memory: ByteCount(MEMORY_MIN.0 - 4096), ..config() },
            MachineConfig { memory: ByteCount(MEMORY_MAX.0 + 4096), ..config() },
            MachineConfig { memory: ByteCount(64 << 20), ..config() },
            MachineConfig { vcpus: 0, ..config() },
            MachineConfig { vcpus: VCPUS_MAX + 1, ..config() },
            MachineConfig { accel: Accel::Threads, boot: Boot::Kernel(kernel), ..config() },
        ];
        for config in refused {
            let error = config.validate().unwrap_err();
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
}
