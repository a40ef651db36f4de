//! The migration protocol without sockets, threads or clock: two state machines and the permit.
//!
//! # How to drive a machine
//!
//! [`Source`] and [`Destination`] have the same four kinds of methods:
//!
//! * `new` starts an attempt; it may already leave actions.
//! * `on_event` and `on_timeout` tell it what happened. The present moment is an argument; it never
//!   goes backwards.
//! * `poll_action` gives what is to be done, in order, until it gives `None`. Drain it after `new`
//!   and after every event; `poll_timeout` then says when to call `on_timeout` at the latest.
//! * Getters.
//!
//! Carry out an action elsewhere if it takes long (building a machine, sending a round, loading a
//! state, digesting memory), and report its end by an event: the thread that feeds events also
//! answers the peer's pings, and a peer that is silent for [`limits::SILENCE_MAX`] is given up. Messages of the control connection are handed over in the order of their arrival, and
//! its loss only after all that arrived before it.
//!
//! # What holds
//!
//! The guest may run where its [`RunPermit`] is. Every failure before the commit ends with the
//! source resuming with the permit; after the commit the source never runs the guest, unless the
//! destination has proved that it never did and never will. If nothing is proved the attempt is
//! undecided, and stays so until [`SourceEvent::Fate`] settles it.

mod clock;
mod clock_key;
mod destination;
mod failure;
mod ledger;
pub mod limits;
mod permit;
mod reaction;
mod source;

pub use clock_key::ClockKey;
pub use destination::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, DestinationOutcome,
    DestinationPhase,
};
pub use failure::{Failure, Fault, UndecidedReason};
pub use ledger::Ledger;
pub use permit::{OperatorOverride, OperatorsWord, RunPermit};
pub use source::{
    Decision, Source, SourceAction, SourceConfig, SourceEvent, SourceOutcome, SourcePhase,
};
