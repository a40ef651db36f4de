//! Live migration of virtual machines, for whoever writes a VMM: threads and I/O, and the library's
//! public face.
//!
//! A VMM implements [`SourceVmm`] for a machine whose guest may leave, and [`DestinationVmm`] for one
//! that waits for a guest; usually one type is both. [`Migration`] moves a guest away, [`Receiver`]
//! takes one in. `examples/stranger` in the repository is a VMM for KVM of some five hundred lines.
//!
//! # What a VMM provides
//!
//! * **Memory**, a [`GuestRam`]: made by the engine ([`GuestRam::create`]), adopted
//!   ([`RamRegion::adopt`]), or a whole `vm_memory::GuestMemoryMmap` (feature `vm-memory`,
//!   [`GuestRam`]`::from_vm_memory`). [`Backing`] says what follows from what holds it. Memory that is to
//!   receive a guest must be zero.
//! * **Dirty pages**, a [`Tracker`]: KVM's log or ring ([`kvm`]) for the vCPUs, and a source for each
//!   device or thread that writes guest memory by itself. Such threads write by a [`DirtyMarker`], or mark
//!   what they wrote. What nobody tracks is lost.
//! * **A description**, from which the destination's [`DestinationFactory`] builds the same machine.
//! * **Stop and start**: devices are suspended, vCPUs paused, their state is given and loaded.
//!
//! The rest has defaults: a rehearsal, a throttle, devices, threads that stay awake, and a
//! [`GuestObserver`], whose word on the guest is carried into the [`Switchover`] of the report.
//!
//! # In which order calls come
//!
//! ```text
//!     source                          destination
//!  1  machine_description             build
//!  2  track                                                        the guest runs
//!  3  rehearse                        load_state (rehearsal)       the guest runs
//!  4  begin_suspend, poll_suspended   arm                          the vCPUs run
//!  5  begin_pause, poll_paused                                     the guest stands
//!  6  poll_state                      load_state, start
//!  7  moved_away                      begin_resume, poll_resumed   the guest runs
//! ```
//!
//! After 4 no device touches guest memory, after 5 nobody does, and all that was written is in the
//! tracker. Steps 2 and 3 may come again. If an attempt fails before the commit, between 6 and 7, or
//! its destination has proved later on that the guest never ran there, [`SourceVmm::resume`] undoes
//! what was begun of 4 and 5, and the tracker is dropped: the guest runs on as if nothing had been,
//! and the next attempt may begin.
//!
//! # Who owns what
//!
//! * The right to run the guest is a value, [`RunPermit`]: made at a guest's boot, given up when it is
//!   paused, given back by `resume` or, at the other side, by `start`. Whoever starts a vCPU holds it.
//! * Memory is shared: the engine keeps the [`GuestRam`], and through it what was adopted, as long as
//!   its threads may read or write there.
//! * The tracker is the engine's for one attempt; there is never a second one for the same memory.
//! * The VMM is shared (`Arc<dyn SourceVmm>`), and [`Receiver::machine`] hands out the one whose guest
//!   has arrived. Calls come from the engine's threads, one at a time for an attempt, but for a
//!   rehearsal that an attempt has stopped waiting for: its end and the next attempt may call beside it.
//!
//! # An example
//!
#![doc = "```"]
#![doc = include_str!("../examples/in_memory.rs")]
#![doc = "```"]
//!
//! # Memory that is lost
//!
//! A page of guest memory that the host lost (poisoned, or what backs it cut short or full) fails
//! the migration, named, and not the process. For that the first region of guest memory that is
//! made installs a handler of SIGBUS, once. It passes on what is not about guest memory to the one
//! before it; a VMM that installs its own later passes on likewise what it does not know.

// What the names above and below are made of: a VMM needs no other crate of martlet's, but for DSA work
// queues.
pub use martlet_policy::Prediction;
pub use martlet_protocol::{OperatorOverride, OperatorsWord, RunPermit};
#[cfg(feature = "vm-memory")]
pub use martlet_ram::VmMemoryPages;
pub use martlet_ram::{
    AccessError, Backing, CpuFinders, DirtyMarker, DirtySource, GuestRam, LostPage, MarkedPages,
    PageBitmap, RamBitmap, RamError, RamRegion, RegionFile, RegionIndex, TrackError, Tracker,
    ZeroCheck, ZeroFinder, ZeroFinders,
};
pub use martlet_transport::{Address, ParseAddressError};
pub use martlet_units::{
    ByteCount, BytesPerSec, ClockOffset, Gfn, Gpa, Instant, PAGE_SIZE, PageCount, PageRange,
};

/// Dirty tracking by KVM.
pub mod kvm {
    pub use martlet_kvm_dirty::*;
}

use martlet_transport::chain;

mod accelerator;
mod cgroup;
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

pub use accelerator::{DsaFinders, DsaQueue};
pub use destination::{ReceiveOptions, ReceiveStatus, Receiver};
pub use martlet_core::{
    BuildRequest, DestinationFactory, DestinationVmm, Devices, Error, Fault, GuestObserver,
    LoadFor, OBSERVED_BYTES_MAX, Outcome, Outrun, PageCounts, Paused, Peer, Phases, Progress,
    RdmaUse, Rehearsal, Report, RunState, Side, SourceVmm, Span, Status, Switchover, Transfer,
};
pub use rdma::{Provider, RdmaAccept, RdmaOptions};
pub use source::{MigrateOptions, Migration, Subscription, Then, Within};
