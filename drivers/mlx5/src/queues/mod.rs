//! Virtqueues: their objects in the device, and how they are stopped and started together.
//!
//! [`ObjectState`] has the states of one, [`DeviceState`] those of the device. `Stopping` and
//! `Starting` are what suspend, resume, a new map and a change of the number of queues are made
//! of; both go on in steps and wait for nothing, so that several devices do it together.
//!
//! | what fails | then |
//! |---|---|
//! | a command is not answered | the function is tainted: nothing more is sent to it, and it is made anew, with its queues where their rings say that they are |
//! | the stop of a queue, or the query after it, is refused | the others are started again; the error names it |
//! | a queue is in ERR | it stands, and its index is known: for a suspend that is as good |
//! | the start of a queue, or its end, is refused | the function is made anew as well |
//!
//! A suspend says success only if every object stands, active or not, and the index of each active
//! queue is known.

mod fate;
mod make;
mod queue;
mod set;
mod start;
mod state;
mod stop;
mod table;
mod umem;

pub(crate) use fate::{Faults, vdpa_error};
pub(crate) use queue::{Common, LogTo, Place};
pub(crate) use set::{Gates, OldObjects, Queues, Scratch, batch};
pub(crate) use start::{Starting, Target};
pub(crate) use state::DeviceEvent;
pub use state::DeviceState;
pub(crate) use stop::Stopping;
