//! The built-in guest: a program that shows whether a migration lost anything.
//!
//! It fills memory with pages whose every word is known, rewrites a working set at a set rate,
//! checks all pages again and again, and keeps a heartbeat on a port and in memory. It sends numbered
//! frames on its network cards, if it has some, and checks what comes back. The same
//! position-independent bytes run at privilege level 3 of a KVM vCPU and as a thread of a process.
//!
//! ```text
//! ProgramParams --+
//! memory layout --+--> Plan --> what to write where, and the registers of each vCPU
//! vCPUs, TSC -----+
//!                               read_counters <-- guest memory, at any moment, in any process
//! ```
//!
//! # What the VMM provides
//! * Memory from guest physical address 0; the first [`MACHINE_RESERVED`] bytes are the VMM's own,
//!   for page tables and the like. Nothing else writes the rest.
//! * A linear address space in which guest physical address `x` is at `base + x`, readable,
//!   writable and executable at level 3; SSE switched on (CR4.OSFXSR); any value of `base`.
//! * Ports [`HEARTBEAT_PORT`] (bytes) and [`WRONG_PAGE_PORT`] (32 bits), open at level 3.
//! * For each network card, registers as virtio 1.3, 4.2 has them, in the same address space. They
//!   are accessed by two instructions only: `mov eax, [rdx]` (8b 02) and `mov [rdx], eax` (89 02).
//! * A time stamp counter of the rate that the plan was made with.

#[path = "guest/abi.rs"]
#[allow(unreachable_pub, reason = "public to the program, which is another crate")]
mod abi;
mod counters;
mod nic_plan;
#[path = "guest/page.rs"]
#[allow(unsafe_code)]
// UNSAFETY: what the program does with its own pages, compiled a second time for the library's
// sake; the library only calls what is safe.
#[allow(dead_code, unreachable_pub, reason = "half of it is for the program, another crate")]
mod page;
mod params;
mod plan;

pub use abi::{BEAT, HEARTBEAT_PORT, NICS_MAX, READY, WRONG_PAGE_PORT};
pub use counters::{GuestCounters, NicCounters, WrongPage, read_counters};
pub use params::{NicParams, ParamsError, ProgramParams, Rate, RatePer};
pub use plan::{MACHINE_RESERVED, NicPlace, Plan, PlanError, VCPUS_MAX, VcpuStart};

/// The program's bytes. They run at any page-aligned address and hold no variable.
pub fn image() -> &'static [u8] {
    include_bytes!(concat!(env!("OUT_DIR"), "/guest.bin"))
}

mod built {
    include!(concat!(env!("OUT_DIR"), "/image.rs"));
}

/// What word `index` of a filled page holds when its frame number and version are these: the
/// program's own rule, for those who check memory from outside. Version 1 is the fill.
///
/// # Panics
/// If `index` is not below 512.
pub fn page_word(frame: u64, version: u64, index: usize) -> u64 {
    assert!(index < page::PAGE_WORDS, "word {index} of a page");
    page::word(frame, version, index)
}
