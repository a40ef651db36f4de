//! Two hosts in a deterministic world under one seed, made of what ships: both sides' cores, the
//! protocol's machines, scanner, placer, dirty tracker, zero check, and the framing of messages and
//! pages. Real guest memory of few pages; connections of bytes that delay, fill up, trickle, break
//! and fall silent; peers that never stop talking; processes that freeze, are told to end, or die;
//! owners that change their minds.
//!
//! [`run`] plays a [`Scenario`]: one attempt or two in which things go wrong, then a time in which
//! nothing does and everything has to come to its end. An undecided attempt is settled by its own
//! questions; a guest that stayed at the source is moved by a last attempt, which must do it.
//!
//! # What is checked
//!
//! After every step: at most one machine holds the guest's permit, and so at most one runs it; a
//! cancel is heard within 200 ms; the guest stands no longer than the protocol's bound; nothing
//! waits in a queue without bound. At the start at the destination: memory and state are the
//! source's, page by page. From then on the source never holds the permit again. At the end: every
//! attempt has ended within a bound, and unless a host died with it the guest is there, running if
//! its owner wants that.
//!
//! # Where what is
//!
//! `net` is time, what happens next, and the connections; `machine` a guest and its memory; `source`
//! and `destination` the two processes around the cores, with what their threads do (`lanes`, and
//! who reads the channels) step by step; `faults` hurt them and `checks` look on; `scenario` says
//! what is to happen and `world` makes it happen.

mod checks;
mod destination;
mod faults;
mod host_clock;
mod lanes;
mod machine;
mod net;
mod scenario;
mod source;
mod trace;
mod violation;
mod world;

pub use net::Side;
pub use scenario::{Cut, Fault, LinkId, Sabotage, Scenario, Unknown, When, all_faults};
pub use violation::Violation;
pub use world::{Summary, run, run_traced};
