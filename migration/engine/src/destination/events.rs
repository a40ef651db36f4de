//! What other threads tell the thread of an attempt.

use crossbeam_channel::Sender;
use martlet_transport::Stream;
use martlet_wire::control::{Answer, MigrationId};

#[derive(Debug)]
pub(super) enum Event {
    /// A data channel greeted with the right token and a free number.
    ChannelJoined { channel: u16, stream: Stream },
    /// The connection beside the queue pairs greeted with the right token.
    RdmaJoined { stream: Stream },
    /// Everything of a round was read on one channel.
    BarrierPassed { channel: u16, round: u32 },
    /// The digest of this side's memory.
    Digested(std::io::Result<[u8; 32]>),
    /// A channel ended or broke.
    ChannelLost { channel: u16, reason: String },
    /// Somebody asks what became of a migration.
    Query { migration: MigrationId, answer: Sender<Answer> },
    /// The receiver is being stopped.
    Stop,
}
