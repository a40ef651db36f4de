//! The machines of `martlet-rdma` over real connections: a stream for the messages, queue pairs
//! of a provider, threads that register memory.
//!
//! ```text
//!             stream: QueueAddress, Offer, keys, zero lists, rounds, Close ... then perhaps page frames
//! RdmaSender ==================================================================> RdmaReceiver
//!             queue pairs: writes, a marker at the end of each round
//! ```
//!
//! Both ends are driven by whoever owns them: `step` and `advance` do what can be done now and never
//! wait; `wait` waits, briefly. So the same code runs on a thread of its own and, in the blackout, on a
//! thread that is awake anyway.
//!
//! When RDMA fails before its end, the destination closes its queue pairs, says so, and both sides
//! go on with page frames on the same stream: what was not known to have arrived is sent again.
//! The source's last message is its `Close`, and it sends frames only after `Revoked`, so each side
//! knows to the byte where they begin.

mod errands;
mod messages;
mod nic;
mod provider;
mod receiver;
mod sender;

pub use provider::{Provider, RdmaAccept, RdmaOptions};
pub(crate) use receiver::{RdmaReceiver, Unreceived};
pub(crate) use sender::{RdmaSender, Sent};
