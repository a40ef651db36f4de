//! RDMA verbs: one interface, over a network card or in software.
//!
//! [`Fabric`] is the interface, cut down to what bulk memory needs: register memory, connect with
//! private data, post lists of one-sided writes and reads, poll completions. Two providers have
//! it, and both pass one [`conformance`] suite:
//!
//! | provider | needs | is |
//! |---|---|---|
//! | [`ibv::Ibv`] | an RDMA device, libibverbs and librdmacm, opened at run time | the kernel's verbs |
//! | `martlet-verbs-soft` | a TCP or Unix socket | a thread that does what a device would |
//!
//! # How to use it
//!
//! ```text
//! destination                              source
//! register its memory                      register its memory
//! listen, accept (private data)            connect (private data): one queue pair each
//!                      <-- keys, by a connection that can be trusted
//!                                          post lists of writes, signal some (SendWindow)
//!                                          poll, or arm + poll + wait
//!                                          all completed: the round has drained
//! deregister: nothing can land any more
//! ```
//!
//! Between two posts of the same bytes the first must have completed, or the older version may
//! land last (see [`QueuePair`]). Track what changes before the post, never after: the bytes are
//! read later. The first failure is the cause ([`FirstCause`]); the flushes behind it only say what
//! was not sent.

pub mod conformance;
mod error;
mod fabric;
pub mod ibv;
mod window;
mod work;

pub use error::{Failure, FirstCause, PostError, PostFault, VerbsError};
pub use fabric::{
    ACCEPT_DATA_BYTES_MAX, CONNECT_DATA_BYTES_MAX, ConnectRequest, Endpoint, Fabric, Limits, Link,
    Listener, MESSAGE_BYTES_MAX, QueuePair, REJECT_DATA_BYTES_MAX, Region, Setup,
    check_private_data,
};
pub use window::{Flush, SendWindow};
pub use work::{
    Access, Completion, Lkey, Operation, QueueNumber, RemoteAddress, Rkey, Sge, Side, Signal,
    Status, WorkId, WorkRequest,
};
