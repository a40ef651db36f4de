//! What other threads tell the source's driver.

use martlet_protocol::OperatorOverride;
use martlet_ram::LostPage;
use martlet_transport::{Stream, Target};
use martlet_wire::control::Answer;
use std::io;

#[derive(Debug)]
pub(super) enum Event {
    /// The control connection, and which of the address's targets it leads to, or why there is
    /// none in one line.
    Connected(Result<(Stream, Target), String>),
    /// The data channels, or why there are none in one line.
    ChannelsOpened(Result<Vec<Stream>, String>),
    /// One lane sent everything of a round, and the barrier behind it.
    BarrierSent { round: u32 },
    /// A lane that had no room for a chunk has some now.
    LaneRoom,
    /// The digest of this side's memory.
    Digested(io::Result<[u8; 32]>),
    /// A lane can't go on.
    LaneLost { reason: String },
    /// A page that was to be sent can't be read.
    PageLost(LostPage),
    /// The guest has ended by itself.
    GuestEnded { reason: String },
    /// The owner's wishes have changed: [`super::shared::Shared`] has them.
    Owner,
    /// The owner wants an undecided migration settled.
    Resolve,
    /// An operator wants to end the doubt about one.
    Override(OperatorOverride),
    /// What the destination said of an undecided migration, or why it said nothing.
    Asked(Result<Answer, String>),
}

impl Event {
    /// What a lane's error is: this host's or the connection's.
    pub(super) fn of_lane(what: &str, error: &io::Error) -> Event {
        match LostPage::of(error) {
            Some(page) => Event::PageLost(page),
            None => Event::LaneLost { reason: format!("{what}: {error}") },
        }
    }
}
