//! A deterministic world under one seed: the two real protocol machines and the real policy, a simulated guest with
//! its dirty tracking, connections that delay, overtake each other and break, processes that die,
//! owners that change their minds, and checkers.
//!
//! [`run`] plays a [`Scenario`]: one attempt or two in which things go wrong, then a time in which
//! nothing does and everything has to come to its end. An undecided attempt is settled by asking
//! the destination; a guest that stayed at the source is moved by a last attempt, which must do it.
//!
//! # What is checked
//!
//! After every step: at most one machine holds the guest's permit, and so at most one runs it. At
//! the start at the destination: memory and state are the source's, page by page. From then on the
//! source never holds the permit again. At the end: every attempt has ended within a bound, both
//! sides' words about it agree with what happened, and unless a host died with it the guest is
//! there, running if its owner wants that.
//!
//! # Where what is
//!
//! `queue` and `trace` are the ground; `link` and `guest` the parts; `source_host` and
//! `destination_host` carry out the machines' actions as the engine does; `checker` looks on;
//! `scenario` says what is to happen and `world` makes it happen. Models of devices and of RDMA
//! join as further hosts' parts with events of their own.

mod checker;
mod destination_host;
mod guest;
mod host_clock;
mod link;
mod queue;
mod scenario;
mod source_host;
mod trace;
mod world;

pub use checker::Violation;
pub use link::{Cut, LinkId, Side};
pub use scenario::{Fault, Sabotage, Scenario, When, all_faults};
pub use world::{Summary, run, run_traced};
