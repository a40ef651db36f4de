//! Threads and I/O of a live migration; the library's public face.
//!
//! A VMM implements [`SourceVmm`] and [`DestinationVmm`]; [`Migration`] moves its guest away,
//! [`Receiver`] takes one in.

mod accelerator;
mod destination;
mod host;
mod mailbox;
mod report;
mod source;
mod vmm;

pub use accelerator::{DsaFinders, DsaQueue, PolicyGate};
pub use destination::{ReceiveStatus, Receiver};
pub use report::{
    Network, Outcome, PageCounts, Phases, Progress, RdmaUse, Report, Side, Span, Status,
};
pub use source::{MigrateOptions, Migration};
pub use vmm::{
    DestinationFactory, DestinationVmm, FrameCheck, GuestCheck, Paused, Rehearsal, RunState,
    SourceVmm, VmmError,
};

/// An error and its causes as one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
