//! Waiting for what comes, and taking it in: the owner's wishes first, then a bounded part of what
//! the peer says, then this side's own threads, then what is due.

use super::{Driver, Kind};
use crate::chain;
use crate::source::events::Event;
use martlet_protocol::SourceEvent;
use martlet_transport::{monotonic_now, wait_any};
use rustix::event::{PollFd, PollFlags};
use std::time::Duration;

/// While a round is being sent, its owner is shown this often how far it is.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(100);

/// With nothing to wait for, the driver still looks this often.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Messages of the peer that are taken in one look.
const MESSAGES_A_LOOK: usize = 32;

/// Looks in a row that did not come to the end of what the peer has sent. A destination has a few
/// messages to send in all.
const FULL_LOOKS_MAX: u32 = 64;

/// Whether what was sent still moves is looked at this often.
const MOVING_INTERVAL: Duration = Duration::from_secs(1);

impl Driver<'_> {
    /// Waits for a message, an event or something that is due, and takes in what is there.
    pub(super) fn look(&mut self) {
        if self.pending.is_empty()
            && let Err(error) = self.wait()
        {
            return self.host_failed("cannot wait for events", &error);
        }
        if self.shared.is_cancelled() && !std::mem::replace(&mut self.told_cancel, true) {
            self.tell(SourceEvent::Cancel { reason: "cancelled by its owner".to_owned() });
        }
        // Then the peer: one of our own events may be the last before the commit.
        self.read_control();
        while let Some(event) = self.shared.events.take() {
            self.on_own_event(event);
        }
        self.look_at_channels();
    }

    /// Tells the machine what time it is. What came in was told before, however late this thread
    /// is; and a peer that never stops talking can't keep the time away.
    pub(super) fn look_at_clock(&mut self) {
        let now = monotonic_now();
        if self.machine.poll_timeout().is_some_and(|at| at <= now) {
            self.machine.on_timeout(now);
        }
    }

    fn wait(&mut self) -> std::io::Result<()> {
        let now = monotonic_now();
        let mut limit = IDLE_INTERVAL;
        if let Some(at) = self.machine.poll_timeout() {
            limit = limit.min(at.since(now));
        }
        if let Some((at, _)) = self.rest {
            limit = limit.min(at.since(now));
        }
        if let Some((at, _)) = self.due {
            limit = limit.min(at.since(now));
        }
        if self.round.is_some_and(|round| round.took.is_none()) {
            limit = limit.min(PUBLISH_INTERVAL);
        }
        // Full lanes tell when they have room.
        if self.is_handing_out() && !self.lanes_full {
            limit = Duration::ZERO;
        }
        if let Some(at) = self.ask_at() {
            limit = limit.min(at.since(now));
        }
        if let Some(wait) = self.last_run_wait() {
            limit = limit.min(wait);
        }
        if std::mem::take(&mut self.unread) || limit.is_zero() {
            return Ok(());
        }
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, self.control.unsent() > 0);
        let mut fds = [
            PollFd::new(self.shared.events.wake(), PollFlags::IN),
            PollFd::new(&self.control, wanted),
        ];
        let watched = &mut fds[..if self.control_open { 2 } else { 1 }];
        if !self.is_blocked() {
            return wait_any(watched, limit).map(drop);
        }
        let mut all = watched.to_vec();
        if let (Some(lanes), Some(run)) = (&self.lanes, &self.inline_run) {
            lanes.blocked(run, &mut all);
        }
        wait_any(&mut all, limit).map(drop)
    }

    pub(super) fn on_own_event(&mut self, event: Event) {
        match event {
            Event::GuestEnded { reason } => self.tell(SourceEvent::HostFailed { reason }),
            // Connected once, before there was a driver. The owner's wishes are looked at apart, and
            // chunks are handed out at every step.
            Event::Connected(_) | Event::Owner | Event::LaneRoom => {}
            Event::ChannelsOpened(opened) => self.on_channels(opened),
            Event::BarrierSent { round } => {
                let Some(current) = &mut self.round else { return };
                if current.number == round {
                    current.barriers_left -= 1;
                    if current.barriers_left == 0 {
                        match current.kind {
                            Kind::PreCopy => self.tell(SourceEvent::RoundSent { round }),
                            Kind::Last => self.on_last_pages_sent(),
                        }
                    }
                }
            }
            Event::Digested(Ok(digest)) => self.tell(SourceEvent::OwnDigest(digest)),
            Event::Digested(Err(error)) => self.host_failed("cannot digest guest memory", &error),
            Event::LaneLost { reason } => self.tell(SourceEvent::ChannelLost { reason }),
            Event::PageLost(page) => {
                self.tell(SourceEvent::HostFailed { reason: page.to_string() });
            }
            Event::Resolve => self.ask_fate(),
            Event::Override(by) => {
                self.overriding.get_or_insert(by);
                self.ask_fate();
            }
            Event::Asked(answer) => self.on_answer(answer),
        }
    }

    /// Takes in what the peer said, but not more than a bounded part of it.
    pub(super) fn read_control(&mut self) {
        for _ in 0..MESSAGES_A_LOOK {
            if !self.control_open {
                return;
            }
            match self.control.try_receive() {
                Ok(Some(message)) => {
                    self.note(&message);
                    self.tell(SourceEvent::Received(message));
                }
                Ok(None) => {
                    self.full_looks = 0;
                    return;
                }
                Err(error) => return self.lose_control(chain(&error)),
            }
        }
        // It may be in memory already, where `poll` does not see it.
        self.unread = true;
        self.full_looks += 1;
        if self.full_looks >= FULL_LOOKS_MAX {
            self.lose_control("the peer sends messages without end".to_owned());
        }
    }

    /// A round that was sent may be long on its way: a slow link is not a lost one.
    fn look_at_channels(&mut self) {
        let (Some(round), Some(lanes)) = (&self.round, &self.lanes) else { return };
        let (before, at) = self.moving;
        let now = monotonic_now();
        if now < at || !round.handed_out || round.took.is_some() || round.kind == Kind::Last {
            return;
        }
        let left = lanes.unacknowledged();
        self.moving = (left, now.after(MOVING_INTERVAL));
        if left < before {
            self.tell(SourceEvent::ChannelsMove);
        }
    }

    pub(super) fn lose_control(&mut self, reason: String) {
        if self.control_open {
            self.control_open = false;
            self.tell(SourceEvent::ControlLost { reason });
        }
    }
}
