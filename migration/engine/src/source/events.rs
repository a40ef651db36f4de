//! What other threads tell the source's driver.

use crate::{Error, Fault};
use martlet_core::source;
use martlet_ram::LostPage;
use martlet_transport::{Stream, Target};
use std::io;

#[derive(Debug)]
pub(super) enum Event {
    /// The control connection, and which of the address's targets it leads to.
    Connected(Result<(Stream, Target), Error>),
    /// The data channels.
    ChannelsOpened(Result<Vec<Stream>, Error>),
    /// One lane sent everything of a round, and the barrier behind it.
    BarrierSent { round: u32 },
    /// A lane that had no room for a chunk has some now.
    LaneRoom,
    /// A lane can't go on.
    LaneLost(Error),
    /// What the attempt waits for.
    Attempt(source::Event),
    /// The owner's wishes have changed: [`super::shared::Shared`] has them.
    Owner,
}

/// Why a lane can't go on: a page of this host is lost, or the connection.
pub(super) fn lane_error(error: &io::Error) -> Error {
    match LostPage::of(error) {
        Some(page) => Error::new(Fault::Host, "", page.to_string()),
        None => Error::new(Fault::Peer, "", format!("a data channel broke: {error}")),
    }
}
