//! What other threads tell the thread of an attempt. Each kind comes a bounded number of times
//! before the attempt has acted on it: once for a channel, a build, a digest or an owner's order,
//! and for a round only when the source was told of the one before.

use crate::DestinationVmm;
use martlet_transport::Stream;
use std::sync::Arc;

pub(super) enum Event {
    /// The machine is built, or why it can't be.
    Built(Result<Arc<dyn DestinationVmm>, String>),
    /// A data channel greeted with the right token and a free number.
    ChannelJoined { channel: u16, stream: Stream },
    /// The connection beside the queue pairs greeted with the right token.
    RdmaJoined { stream: Stream },
    /// Everything of a round was read on every channel.
    RoundReceived { round: u32 },
    /// The digest of this side's memory, or why there is none.
    Digested(Result<[u8; 32], String>),
    /// A channel ended or broke; the last round whose barrier came on it.
    ChannelLost { last_barrier: Option<u32>, reason: String },
    /// The receiver is being stopped.
    Stop,
}
