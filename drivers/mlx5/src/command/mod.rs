//! The firmware command queue, without I/O: time and events go in, doorbells and results come out.
//!
//! A command takes a slot: an entry of the command page, and mailboxes for what does not fit into
//! it. The device owns the slot until it clears the owner bit of the entry; nothing else gives a
//! slot back. So a command that is not answered in time ends with an error for its user, while its
//! slot stays in quarantine, mailboxes and all, until the answer comes after all.
//!
//! Slots are taken lowest first; the last one is kept for MANAGE_PAGES, because the firmware may
//! need pages to finish any other command. Opcodes that are slow in firmware are throttled: half
//! of the ordinary slots' worth of permits (Linux `cmd.c`, `throttle_sem`). Neither slots nor
//! permits are waited for here: [`SubmitError::Busy`] says so at once.

mod error;
mod pool;
mod queue;
mod request;
mod slot;
mod stats;
#[cfg(test)]
pub(crate) mod tests;
mod writer;

pub use error::{CommandError, SubmitError};
pub(crate) use pool::MailboxPool;
pub(crate) use queue::CommandQueue;
pub(crate) use request::{
    CommandId, Completion, Input, Keep, LateCompletion, Message, Output, Request,
};
pub(crate) use slot::{SlotEvent, SlotState};
pub use stats::{OpcodeStats, QueueStats};
pub(crate) use writer::InputWriter;
