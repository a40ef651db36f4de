//! What other threads tell the source's driver.

use crate::Error;
use martlet_core::source;
use martlet_ram::LostPage;
use martlet_transport::{Stream, Target};
use std::io;

#[derive(Debug)]
pub(super) enum Event {
    /// The control connection, and which of the address's targets it leads to, or why there is
    /// none in one line.
    Connected(Result<(Stream, Target), String>),
    /// The data channels.
    ChannelsOpened(Result<Vec<Stream>, Error>),
    /// One lane sent everything of a round, and the barrier behind it.
    BarrierSent { round: u32 },
    /// A lane that had no room for a chunk has some now.
    LaneRoom,
    /// A lane can't go on.
    LaneLost { reason: String },
    /// A page that was to be sent can't be read.
    PageLost(LostPage),
    /// What the attempt waits for.
    Attempt(source::Event),
    /// The owner's wishes have changed: [`super::shared::Shared`] has them.
    Owner,
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
