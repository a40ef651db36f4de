//! Threads and I/O of a live migration; the library's public face.
//!
//! A VMM implements [`SourceVmm`] and [`DestinationVmm`]; [`Migration`] moves its guest away,
//! [`Receiver`] takes one in.

pub use martlet_protocol::{OperatorOverride, OperatorsWord};
use martlet_transport::chain;

mod accelerator;
mod destination;
mod host;
mod mailbox;
mod report;
mod source;
mod vmm;

pub use accelerator::{DsaFinders, DsaQueue, PolicyGate};
pub use destination::{ReceiveOptions, ReceiveStatus, Receiver};
pub use report::{
    Network, Outcome, Outrun, PageCounts, Phases, Progress, RdmaUse, Report, Side, Span, Status,
};
pub use source::{MigrateOptions, Migration, Then, Within};
pub use vmm::{
    BuildRequest, DestinationFactory, DestinationVmm, FrameCheck, GuestCheck, LoadFor, Paused,
    Peer, Rehearsal, RunState, SourceVmm, VmmError,
};
