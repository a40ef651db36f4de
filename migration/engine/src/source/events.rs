//! What other threads tell the source's driver.

use martlet_transport::{Stream, Target};
use martlet_wire::control::Answer;

#[derive(Debug)]
pub(super) enum Event {
    /// The control connection, and which of the address's targets it leads to, or why there is
    /// none in one line.
    Connected(Result<(Stream, Target), String>),
    /// The data channels, or why there are none in one line.
    ChannelsOpened(Result<Vec<Stream>, String>),
    /// One lane sent everything of a round, and the barrier behind it.
    BarrierSent { round: u32 },
    /// The digest of this side's memory.
    Digested(std::io::Result<[u8; 32]>),
    /// A lane can't go on.
    LaneLost { reason: String },
    /// The owner's wishes have changed: [`super::shared::Shared`] has them.
    Owner,
    /// The owner wants an undecided migration settled.
    Resolve,
    /// What the destination said of an undecided migration, or why it said nothing.
    Asked(Result<Answer, String>),
}
