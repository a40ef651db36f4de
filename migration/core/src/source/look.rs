//! Taking in what came: the owner's wishes first, then a bounded part of what the peer says, then
//! this side's own events, then what is due.

use super::{Attempt, Event, Lost, SourceIo};
use crate::{Error, Fault};
use martlet_protocol::SourceEvent;
use martlet_units::{ByteCount, Instant};
use std::time::Duration;

/// Messages of the peer that are taken in one look.
const MESSAGES_A_LOOK: usize = 32;

/// Looks in a row that did not come to the end of what the peer has sent. A destination has a few
/// messages to send in all.
const FULL_LOOKS_MAX: u32 = 64;

/// Whether what was sent still moves is looked at this often.
const MOVING_INTERVAL: Duration = Duration::from_secs(1);

/// How the peer is heard.
#[derive(Debug)]
pub(super) struct Peer {
    /// Cleared once the control connection broke.
    open: bool,
    /// It may have said more than was taken in.
    unread: bool,
    full_looks: u32,
    /// Bytes on their way when that was looked at the last time, and when it is next.
    moving: (ByteCount, Instant),
}

impl Peer {
    pub(super) fn new() -> Peer {
        let moving = (ByteCount(0), Instant::default());
        Peer { open: true, unread: false, full_looks: 0, moving }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    pub(super) fn has_unread(&self) -> bool {
        self.unread && self.open
    }
}

impl Attempt {
    pub(super) fn look(&mut self, io: &mut dyn SourceIo) {
        if io.is_cancelled() && !std::mem::replace(&mut self.owner.told_cancel, true) {
            self.tell(SourceEvent::Cancel { reason: "cancelled by its owner".to_owned() });
        }
        // Then the peer: one of our own events may be the last before the commit.
        self.peer.unread = false;
        self.read_control(io);
        while let Some(event) = self.inbox.pop_front() {
            self.take_in(event, io);
        }
        self.look_at_channels(io);
    }

    /// Tells the machine what time it is. What came in was told before, however late this is; and a
    /// peer that never stops talking can't keep the time away.
    pub(super) fn look_at_clock(&mut self, io: &mut dyn SourceIo) {
        let now = io.now();
        if self.machine.poll_timeout().is_some_and(|at| at <= now) {
            self.machine.on_timeout(now);
        }
    }

    fn take_in(&mut self, event: Event, io: &mut dyn SourceIo) {
        match event {
            Event::ChannelsOpened(Ok(())) => self.tell(SourceEvent::ChannelsConnected),
            Event::ChannelsOpened(Err(error)) | Event::LaneLost(error) => self.lose_lane(error),
            Event::Tracked(tracked) => self.on_tracked(tracked, io),
            Event::TouchedFound(found) => self.on_touched(found, io),
            Event::Rehearsed(Ok(rehearsal)) => {
                let state = rehearsal.map(|it| self.measures.note_rehearsal(it));
                self.tell(SourceEvent::Rehearsed { state });
            }
            Event::Digested(Ok(digest)) => self.tell(SourceEvent::OwnDigest(digest)),
            Event::Rehearsed(Err(error))
            | Event::Digested(Err(error))
            | Event::HostFailed(error) => self.host_failed(error),
            Event::LaneRoom => self.precopy.on_room(),
            Event::BarrierSent { round } => self.on_barrier(round, io),
            Event::Resolve => self.ask(io),
            Event::Override(by) => self.begin_override(by, io),
            Event::Asked(answer) => self.on_answer(answer, io),
        }
    }

    /// A lane can't go on: because of the peer, or of this host, which lost a page.
    pub(super) fn lose_lane(&mut self, error: Error) {
        match error.fault() {
            Fault::Peer => self.tell(SourceEvent::ChannelLost { reason: error.to_line() }),
            Fault::Host | Fault::Vmm | Fault::Device | Fault::Request | Fault::Cancelled => {
                self.host_failed(error);
            }
        }
    }

    /// Takes in what the peer said, but not more than a bounded part of it.
    pub(super) fn read_control(&mut self, io: &mut dyn SourceIo) {
        for _ in 0..MESSAGES_A_LOOK {
            if !self.peer.open {
                return;
            }
            match io.receive() {
                Ok(Some(message)) => {
                    self.note(&message, io);
                    self.tell(SourceEvent::Received(message));
                }
                Ok(None) => {
                    self.peer.full_looks = 0;
                    return;
                }
                Err(Lost::Gone(reason)) => return self.lose_control(reason),
                Err(Lost::Malformed(reason)) => {
                    self.peer.open = false;
                    return self.tell(SourceEvent::Malformed { reason });
                }
            }
        }
        // It may be in memory already, where no socket shows it.
        self.peer.unread = true;
        self.peer.full_looks += 1;
        if self.peer.full_looks >= FULL_LOOKS_MAX {
            self.peer.open = false;
            let reason = "messages without end".to_owned();
            self.tell(SourceEvent::Malformed { reason });
        }
    }

    /// Takes in all that the peer has said, if that has an end.
    pub(super) fn read_all_control(&mut self, io: &mut dyn SourceIo) {
        loop {
            self.peer.unread = false;
            self.read_control(io);
            if !self.peer.has_unread() {
                return;
            }
        }
    }

    /// A round that was sent may be long on its way: a slow link is not a lost one.
    fn look_at_channels(&mut self, io: &mut dyn SourceIo) {
        let (before, at) = self.peer.moving;
        let now = io.now();
        if now < at || !self.precopy.is_under_way() {
            return;
        }
        let Some(lanes) = io.lanes() else { return };
        let left = lanes.unacknowledged();
        self.peer.moving = (left, now.after(MOVING_INTERVAL));
        if left < before {
            self.tell(SourceEvent::ChannelsMove);
        }
    }

    pub(super) fn lose_control(&mut self, reason: String) {
        if std::mem::replace(&mut self.peer.open, false) {
            self.tell(SourceEvent::ControlLost { reason });
        }
    }
}
