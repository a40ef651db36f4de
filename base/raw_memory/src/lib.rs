//! Access to memory that others write at the same time, and that the host may fail to give.
//!
//! Guest memory is both: vCPUs and devices write it, and a page of it can be lost while it is
//! mapped: poisoned hardware memory, a backing file cut short, no huge page or no room left behind
//! it. The kernel answers the touch of such a page with SIGBUS, which ends the process. Not so
//! here: [`read`], [`write`], [`clear`] and [`ZeroTest::run`] are assembly, and a fault within them
//! becomes a [`MemoryFault`]. That costs nothing as long as there is none.
//!
//! For that [`guard`], called by whoever maps memory, installs a handler of SIGBUS for the whole
//! process, once, at its first call. What does not concern the functions here or guarded memory
//! goes on to the handler that was there before. A program that installs its own handler later
//! must call the one it replaces (as with every handler, and as this one does).

#[cfg(not(target_arch = "x86_64"))]
compile_error!("accesses to raw memory are written for x86-64 only");

mod access;
mod fault;
mod signal;
mod zero;

pub use access::{clear, is_reachable, read, write};
pub use fault::{Guarded, guard, take_poisoned};
pub use signal::{Handler, Previous};
pub use zero::ZeroTest;

use core::fmt;

/// Memory that the host could not give: what the kernel calls a bus error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFault;

impl fmt::Display for MemoryFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the host can't give this memory (SIGBUS)")
    }
}

impl core::error::Error for MemoryFault {}
