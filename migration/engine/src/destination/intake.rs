//! The ways by which guest memory comes in.

use super::events::Event;
use super::intake_pages::PageIntake;
use super::intake_rdma::RdmaIntake;
use crate::mailbox::Mailbox;
use martlet_ram::{GuestRam, Placer};
use martlet_transport::{RdmaAccept, Stream};
use std::io;
use std::sync::Arc;

/// What came of looking at a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Nothing was there.
    Idle,
    /// Something was read.
    Busy,
}

/// What brings an attempt's pages. Dropping it breaks the connections and ends the threads.
pub(super) enum Intake {
    Pages(PageIntake),
    Rdma(RdmaIntake),
}

impl Intake {
    pub(super) fn start(
        streams: Vec<Stream>,
        placer: &Arc<Placer>,
        events: &Arc<Mailbox<Event>>,
    ) -> io::Result<Intake> {
        PageIntake::start(streams, placer, events).map(Intake::Pages)
    }

    /// Guest memory comes by RDMA; `stream` is the connection beside it. The error is one line.
    pub(super) fn start_rdma(
        stream: Stream,
        ram: &Arc<GuestRam>,
        accept: &RdmaAccept,
        token: [u8; 16],
        events: &Arc<Mailbox<Event>>,
    ) -> Result<Intake, String> {
        RdmaIntake::start(stream, ram, accept, token, events).map(Intake::Rdma)
    }

    /// Takes all channels from their threads. Returns when none of them reads any more.
    pub(super) fn take_over(&self) {
        match self {
            Intake::Pages(intake) => intake.take_over(),
            Intake::Rdma(intake) => intake.take_over(),
        }
    }

    /// The source is being told that a round is in.
    pub(super) fn tell_round(&self, round: u32) {
        match self {
            Intake::Pages(intake) => intake.tell_round(round),
            Intake::Rdma(intake) => intake.tell_round(round),
        }
    }

    /// Gives the channels back to their threads.
    pub(super) fn give_back(&self) {
        match self {
            Intake::Pages(intake) => intake.give_back(),
            Intake::Rdma(intake) => intake.give_back(),
        }
    }

    /// Does what there is to do on every channel. Only between `take_over` and `give_back`.
    pub(super) fn look(&self) -> Look {
        match self {
            Intake::Pages(intake) => intake.look(),
            Intake::Rdma(intake) => intake.look(),
        }
    }

    /// Ends all that could still write guest memory. When this returns nothing does any more.
    pub(super) fn close(&self) {
        match self {
            Intake::Pages(intake) => intake.close(),
            Intake::Rdma(intake) => intake.close(),
        }
    }

    /// Bytes received on all channels.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Intake::Pages(intake) => intake.bytes(),
            Intake::Rdma(intake) => intake.bytes(),
        }
    }
}
