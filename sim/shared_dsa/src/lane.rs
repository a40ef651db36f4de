//! A channel of the series' guest.

use crate::clock::Ps;
use crate::scenario::Batch;
use martlet_policy::admission::Grant;
use std::collections::VecDeque;

/// What a channel's thread is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Step {
    /// Has no packet; may have batches pending.
    #[default]
    Idle,
    Got,
    Filled(Grant),
    Checked,
    /// Waits for its oldest batch, since then.
    Waits(Ps),
    Woken,
    Collected,
    Sent,
}

#[derive(Default)]
pub(crate) struct Lane {
    pub(crate) step: Step,
    pub(crate) pending: VecDeque<Batch>,
    /// Its packet was refused; it asks again when an older batch is done.
    pub(crate) asks_again: bool,
}
