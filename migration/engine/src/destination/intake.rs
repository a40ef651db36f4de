//! The ways by which guest memory comes in.

use super::events::Event;
use super::intake_pages::PageIntake;
use super::intake_rdma::RdmaIntake;
use crate::mailbox::Mailbox;
use martlet_core::destination;
pub(super) use martlet_core::destination::Look;
use martlet_ram::{GuestRam, Placer};
use martlet_transport::{RdmaAccept, Stream};
use std::io;
use std::sync::Arc;

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
}

impl destination::Intake for Intake {
    fn take_over(&mut self) {
        match self {
            Intake::Pages(intake) => intake.take_over(),
            Intake::Rdma(intake) => intake.take_over(),
        }
    }

    fn give_back(&mut self) {
        match self {
            Intake::Pages(intake) => intake.give_back(),
            Intake::Rdma(intake) => intake.give_back(),
        }
    }

    fn look(&mut self) -> Look {
        match self {
            Intake::Pages(intake) => intake.look(),
            Intake::Rdma(intake) => intake.look(),
        }
    }

    fn tell_round(&mut self, round: u32) {
        match self {
            Intake::Pages(intake) => intake.tell_round(round),
            Intake::Rdma(intake) => intake.tell_round(round),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Intake::Pages(intake) => intake.bytes(),
            Intake::Rdma(intake) => intake.bytes(),
        }
    }

    fn close(&mut self) {
        match self {
            Intake::Pages(intake) => intake.close(),
            Intake::Rdma(intake) => intake.close(),
        }
    }
}
