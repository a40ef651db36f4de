//! Threads and I/O of a live migration; the library's public face.
//!
//! A VMM implements [`SourceVmm`] and [`DestinationVmm`]; [`Migration`] moves its guest away,
//! [`Receiver`] takes one in.

mod destination;
mod report;
mod source;
mod vmm;

pub use destination::{ReceiveStatus, Receiver};
pub use report::{Outcome, PageCounts, Phases, Progress, Report, Side, Span, Status};
pub use source::{MigrateOptions, Migration};
pub use vmm::{
    DestinationFactory, DestinationVmm, GuestCheck, Paused, Rehearsal, RunState, SourceVmm,
    VmmError,
};
