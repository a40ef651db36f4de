//! What other threads tell the thread of an attempt: what its core is told (see
//! [`martlet_core::destination::Event`]), and which connections have joined.

use crate::{DestinationVmm, Error, Fault};
use martlet_ram::LostPage;
use martlet_transport::Stream;
use std::sync::Arc;

pub(super) enum Event {
    /// The machine is built, or why it can't be.
    Built(Result<Arc<dyn DestinationVmm>, Error>),
    /// A data channel greeted with the right token and a free number.
    ChannelJoined { channel: u16, stream: Stream },
    /// The connection beside the queue pairs greeted with the right token.
    RdmaJoined { stream: Stream },
    /// Everything of a round was read on every channel.
    RoundReceived { round: u32 },
    /// The digest of this side's memory, or why there is none.
    Digested(Result<[u8; 32], Error>),
    /// A channel ended or broke; the last round whose barrier came on it.
    ChannelLost { last_barrier: Option<u32>, error: Error },
    /// The receiver is being stopped.
    Stop,
    /// Something that the attempt asks for may be there.
    Nudged,
}

impl Event {
    /// A channel that the peer, or what is between the two, has ended.
    pub(super) fn channel_lost(last_barrier: Option<u32>, reason: String) -> Event {
        Event::ChannelLost { last_barrier, error: Error::new(Fault::Peer, "", reason) }
    }

    /// A page that came can't be written.
    pub(super) fn page_lost(page: LostPage) -> Event {
        let error = Error::caused(Fault::Host, "receive guest memory", page);
        Event::ChannelLost { last_barrier: None, error }
    }
}
