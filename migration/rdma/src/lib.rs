//! Guest memory by RDMA: who writes what when. No socket, no thread, no clock, no NIC.
//!
//! ```text
//!   ram::Scanner --Run--> Source --Post--> queue pairs ~~~~~~> guest memory
//!                           |  ^ completions                       ^ registered by
//!                           |  |                                   |
//!                        RdmaMessage <== a stream (TLS) ==> Destination --Zero--> CPU
//! ```
//!
//! [`Source`] takes classified runs of dirty pages and says what to post, what to register and
//! what to send; [`Destination`] answers key requests, has zero lists executed, counts markers and
//! revokes everything before the guest runs. Whoever drives them carries that out over real verbs,
//! or over a modelled NIC: `sim/rdma` does, with a checker.
//!
//! # The invariant
//!
//! Between two posts of the same page lies a completed drain of everything posted for the first,
//! and between a zero range and a later write there lies the acknowledgement of its list.
//! A reliable connection orders requests, but not what a CPU sees of them, and several queue pairs
//! are not ordered at all. It holds by construction:
//!
//! 1. Within an epoch the cursor only moves forward ([`Source::offer`] asserts it), so no page is
//!    posted twice in it.
//! 2. An epoch ends with [`Source::end_round`] or [`Source::jump`], and nothing is taken until the
//!    drain is complete: no message waits, every request is retired, every zero list acknowledged.
//! 3. A key is dropped only with nothing queued and nothing in flight by it.
//! 4. After a failure nothing may take another way before [`SourceAction::Closed`] says that the
//!    destination closed its queue pairs: a write may be under way although its sender lost it.
//!
//! `docs/rdma.md` has the reasons and the measurements.

mod destination;
mod failure;
mod heartbeat;
mod layout;
mod phase;
mod queue;
mod source;
mod units;
mod work;
mod zero;

pub use destination::{Destination, DestinationAction, DestinationConfig, MARKER_RECEIVES};
pub use failure::{Failure, PeerFault};
pub use heartbeat::{HEARTBEAT_DEADLINE, HEARTBEAT_INTERVAL};
pub use layout::{Layout, LayoutError, PageSpan, STRIPE_BYTES_MIN, UNITS_MAX, UnitIndex};
pub use source::{Counters, Drain, MESSAGE_BYTES_MAX, Offered, Source, SourceAction, SourceConfig};
pub use work::{
    LocalKey, Post, QueueIndex, Registered, RemoteKey, Work, WorkCompletion, WorkSequence,
    WorkStatus,
};
