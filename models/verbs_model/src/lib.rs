//! A deterministic RDMA network under virtual time: two NICs, a link, reliable connections.
//!
//! ```text
//! register, post ──> Network ──next_event──> advance(now, memory) ──> poll
//!                      NIC A ~~~~ link ~~~~ NIC B
//! ```
//!
//! It does what the documents allow, not what one NIC happens to do:
//!
//! * Requests of a queue pair are executed and completed in the order of posting (IBA
//!   specification, 9.5 and 10.8). Nothing orders two queue pairs.
//! * The source's bytes are read when a request's turn on the wire comes, a segment at a time;
//!   never at the post. Measured on the kernel's soft-RoCE (6.12): a store after the post travelled
//!   in 20 of 20 trials.
//! * With relaxed ordering, bytes are placed in any order, those of a later request before those of
//!   an earlier one too, until the completion (`ibv_reg_mr(3)`, `IBV_ACCESS_RELAXED_ORDERING`;
//!   `ibv_query_qp_data_in_order(3)`: an answer about one request only).
//! * A completion with success says that this request and all before it are placed (IBA 9.7).
//! * A write with immediate data takes a receive of the peer; without one it is tried again
//!   (receiver not ready, IBA 9.7.5.2) as often as was set, 7 being for ever.
//! * After a failure the request completes with its cause and every other with a flush, signalled
//!   or not (IBA 10.3.1, error state). What was on the wire already is placed all the same.
//! * An idle queue pair notices nothing, whatever happens to its peer or the link (IBA 9.7: only
//!   a request that is not acknowledged is missed). Measured on two guests: 60 s, no event.
//! * A request holds its slot of the send queue until a completion of it or of a later one is
//!   polled (`ibv_post_send(3)`).
//!
//! Time, chance and faults are arguments: equal arguments give equal runs.
#![forbid(unsafe_code)]

mod network;
mod pair;
mod params;
mod region;
mod work;

pub use network::Network;
pub use params::Params;
pub use region::{Access, Key};
pub use work::{
    Completion, Fault, Link, Memory, NoMemory, Operation, PairId, Point, PostError, Request, Side,
    Status,
};

#[cfg(test)]
mod tests;
