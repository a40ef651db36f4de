//! Threads and I/O of a live migration; the library's public face.
//!
//! A VMM implements [`SourceVmm`] and [`DestinationVmm`]; [`Migration`] moves its guest away,
//! [`Receiver`] takes one in.
//!
//! A page of guest memory that the host lost (poisoned, or what backs it cut short or full) fails
//! the migration, named, and not the process. For that the first region of guest memory that is
//! made installs a handler of SIGBUS, once. It passes on what is not about guest memory to the one
//! before it; a VMM that installs its own later passes on likewise what it does not know.

// What the names above and below are made of: a VMM needs no other crate of martlet's.
pub use martlet_policy::Prediction;
pub use martlet_protocol::{OperatorOverride, OperatorsWord, RunPermit};
#[cfg(feature = "vm-memory")]
pub use martlet_ram::VmMemoryPages;
pub use martlet_ram::{
    AccessError, Backing, CpuFinders, DirtyMarker, DirtySource, GuestRam, LostPage, MarkedPages,
    PageBitmap, RamBitmap, RamError, RamRegion, RegionFile, RegionIndex, TrackError, Tracker,
    ZeroCheck, ZeroFinder, ZeroFinders, mark_touched,
};
pub use martlet_transport::{Address, ParseAddressError, monotonic_now};
pub use martlet_units::{
    ByteCount, BytesPerSec, ClockOffset, Gfn, Gpa, Instant, PAGE_SIZE, PageCount, PageRange,
};

/// Dirty tracking by KVM.
pub mod kvm {
    pub use martlet_kvm_dirty::*;
}

use martlet_transport::chain;

mod accelerator;
mod destination;
mod handover;
mod host;
mod mailbox;
mod rdma;
mod source;

/// What [`handover`] is made of. Its test stands on the same with every order tried.
mod sync {
    pub(crate) use martlet_transport::Wake;
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

pub use accelerator::{DsaFinders, DsaQueue, PolicyGate};
pub use destination::{ReceiveOptions, ReceiveStatus, Receiver};
pub use martlet_core::{
    BuildRequest, DestinationFactory, DestinationVmm, Error, Fault, FrameCheck, GuestCheck,
    LoadFor, Network, Outcome, Outrun, PageCounts, Paused, Peer, Phases, Progress, RdmaUse,
    Rehearsal, Report, RunState, Side, SourceVmm, Span, Status,
};
pub use rdma::{ParseProviderError, Provider, RdmaAccept, RdmaOptions};
pub use source::{MigrateOptions, Migration, Then, Within};
