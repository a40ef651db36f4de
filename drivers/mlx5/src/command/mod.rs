//! The firmware command queue, without I/O: time and events go in, doorbells and results come out.
//!
//! A command takes a slot: an entry of the command page, and mailboxes for what does not fit into
//! it. The device owns the slot until it clears the owner bit of the entry. There is one rule for a
//! command that is not answered in time, or in a way that does not tell what was done: the queue
//! ends. No later command is taken, all that are out end with an error, and the page and its
//! mailboxes stay until the function has been stopped.
//!
//! Slots are taken lowest first; the last one is kept for MANAGE_PAGES, because the firmware may
//! need pages to finish any other command. Opcodes that are slow in firmware are throttled: half
//! of the ordinary slots' worth of permits (Linux `cmd.c`, `throttle_sem`). Neither slots nor
//! permits are waited for here: [`SubmitError::Busy`] says so at once.

mod error;
mod pool;
mod queue;
mod request;
mod stats;
#[cfg(test)]
pub(crate) mod tests;
mod writer;

pub use error::{CommandError, SubmitError};
pub(crate) use pool::MailboxPool;
pub(crate) use queue::{CommandQueue, End};
pub(crate) use request::{CommandId, Completion, Input, Keep, Message, Output, Request};
pub use stats::{OpcodeStats, QueueStats};
pub(crate) use writer::InputWriter;
