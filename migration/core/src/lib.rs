//! What both sides of a migration decide, without threads, sockets, files or clock; and what they
//! need of a VMM.
//!
//! `martlet-engine` drives it in a process and is what a VMM uses; it re-exports what concerns one.

pub mod destination;
mod error;
mod report;
pub mod source;
mod vmm;

pub use error::{Error, Fault};
pub use report::{
    Devices, Outcome, Outrun, PageCounts, Phases, Progress, RdmaUse, Report, Side, Span, Status,
    Switchover, Transfer,
};
pub use vmm::{
    BuildRequest, DestinationFactory, DestinationVmm, GuestObserver, LoadFor, OBSERVED_BYTES_MAX,
    Paused, Peer, Rehearsal, RunState, SourceVmm,
};
