//! Virtqueues: their objects in the device, and how they are stopped and started together.
//!
//! [`ObjectState`] has the states of one, [`DeviceState`] those of the device. `Stopping` and
//! `Starting` are what suspend, resume, a new map and a change of the number of queues are made
//! of; both go on in steps and wait for nothing, so that several devices do it together.
//!
//! | what fails | then |
//! |---|---|
//! | the stop of a queue, and it says that it runs | the others are started again; the error names it |
//! | the stop of a queue, without an answer | a query says what it is in; if it stands, the stop has succeeded |
//! | the query of a queue that stands | it is asked once more; then all are started again |
//! | a queue is in ERR | it stands, and its index is known: for a suspend that is as good |
//! | a queue may be started yet by a command that was not answered | it is not stopped, for it would repeat frames: a suspend says so at once, and frames go on until the answer comes, or a reset |
//! | a queue outside of the pairs in use may run, or be started yet | a suspend stops it, or ends it if that does not make it stand for good |
//! | the start of a queue | it is made anew with the index it had; if that fails as well, it stands and the error names it: `begin_resume` tries again |
//! | a queue can't be destroyed | its keys and memory are kept, and it is tried again later |
//! | the firmware made something, and its answer does not tell the number | a reset restarts the function |
//!
//! A suspend says success only if every object stands, active or not, nothing that is out can start
//! one, and the index of each active queue is known.

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
pub(crate) use set::{Gates, Queues, Scratch, batch};
pub(crate) use start::{Starting, Target};
pub(crate) use state::DeviceEvent;
pub use state::DeviceState;
pub(crate) use stop::Stopping;
