//! What other threads tell the source's driver.

use martlet_wire::control::Answer;

#[derive(Debug)]
pub(super) enum Event {
    /// One lane sent everything of a round, and the barrier behind it.
    BarrierSent { round: u32 },
    /// The digest of this side's memory.
    Digested(std::io::Result<[u8; 32]>),
    /// A lane can't go on.
    LaneLost { reason: String },
    /// The owner wants the guest to stay.
    Cancel,
    /// The owner wants an undecided migration settled.
    Resolve,
    /// What the destination said of an undecided migration, or why it said nothing.
    Asked(Result<Answer, String>),
}
