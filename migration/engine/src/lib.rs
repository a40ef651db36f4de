//! Threads and I/O of a live migration; the library's public face.
//!
//! A VMM implements [`SourceVmm`] and [`DestinationVmm`]; [`Migration`] moves its guest away,
//! [`Receiver`] takes one in.
//!
//! A page of guest memory that the host lost (poisoned, or what backs it cut short or full) fails
//! the migration, named, and not the process. For that the first region of guest memory that is
//! made installs a handler of SIGBUS, once. It passes on what is not about guest memory to the one
//! before it; a VMM that installs its own later passes on likewise what it does not know.

pub use martlet_protocol::{OperatorOverride, OperatorsWord};
use martlet_transport::chain;

mod accelerator;
mod destination;
mod host;
mod mailbox;
mod source;

pub use accelerator::{DsaFinders, DsaQueue, PolicyGate};
pub use destination::{ReceiveOptions, ReceiveStatus, Receiver};
pub use martlet_core::{
    BuildRequest, DestinationFactory, DestinationVmm, Error, Fault, FrameCheck, GuestCheck,
    LoadFor, Network, Outcome, Outrun, PageCounts, Paused, Peer, Phases, Progress, RdmaUse,
    Rehearsal, Report, RunState, Side, SourceVmm, Span, Status,
};
pub use source::{MigrateOptions, Migration, Then, Within};
