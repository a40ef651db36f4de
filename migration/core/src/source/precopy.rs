//! Rounds: what is handed to the lanes, and how far it has come.

use super::{Attempt, SourceIo, Work};
use crate::{Error, Status};
use martlet_protocol::SourceEvent;
use martlet_ram::{Chunk, DirtySource, RamBitmap, Scanner, Tracker};
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Chunks handed out in one step.
const FEED_BURST: usize = 64;

/// What of guest memory is to be sent, and the round that is.
pub(super) struct PreCopy {
    pub(super) dirty: Arc<RamBitmap>,
    pub(super) scanner: Scanner,
    pub(super) tracker: Option<Tracker>,
    /// Somebody is making one.
    pub(super) is_tracking: bool,
    pub(super) round: Option<Round>,
    /// How many were begun.
    pub(super) rounds: u32,
    pub(super) last_sync: Instant,
    /// A chunk that its lane had no room for.
    held: Option<Chunk>,
    /// That lane says when it has.
    awaits_room: bool,
}

/// A round that the lanes are sending.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) number: u32,
    pub(super) kind: Kind,
    pub(super) started: Instant,
    pub(super) pages: u64,
    pub(super) bytes_before: u64,
    pages_before: u64,
    pub(super) handed_out: bool,
    barriers_left: usize,
    /// How long it took until the destination had all of it.
    pub(super) took: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The guest runs.
    PreCopy,
    /// It is stopped.
    Last,
}

impl fmt::Debug for PreCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreCopy").field("round", &self.round).finish_non_exhaustive()
    }
}

impl PreCopy {
    pub(super) fn new(now: Instant, dirty: Arc<RamBitmap>) -> PreCopy {
        PreCopy {
            scanner: Scanner::new(Arc::clone(&dirty)),
            dirty,
            tracker: None,
            is_tracking: false,
            round: None,
            rounds: 0,
            last_sync: now,
            held: None,
            awaits_room: false,
        }
    }

    pub(super) fn round_number(&self) -> Option<u32> {
        self.round.map(|round| round.number)
    }

    pub(super) fn is_handing_out(&self) -> bool {
        self.round.is_some_and(|round| !round.handed_out)
    }

    /// Whether a round was handed out and has not arrived, with the guest running.
    pub(super) fn is_under_way(&self) -> bool {
        self.round.is_some_and(|round| {
            round.handed_out && round.took.is_none() && round.kind == Kind::PreCopy
        })
    }

    /// Whether the destination does not have all of a round.
    pub(super) fn is_sending(&self) -> bool {
        self.round.is_some_and(|round| round.took.is_none())
    }

    pub(super) fn on_room(&mut self) {
        self.awaits_room = false;
    }

    /// Whether there is something to hand out, and room for it as far as is known.
    pub(super) fn can_hand_out(&self) -> bool {
        self.is_handing_out() && !self.awaits_room
    }

    /// Reads what was written since the last time.
    pub(super) fn sync(&mut self) -> Result<(), Error> {
        let Some(tracker) = &mut self.tracker else { return Ok(()) };
        tracker.sync(&self.dirty).map_err(Error::from)
    }

    pub(super) fn dirty_pages(&self) -> PageCount {
        PageCount(self.dirty.count())
    }
}

impl Attempt {
    /// Starts a round. The first one begins the tracking and sends what the guest ever touched;
    /// a later one sends what the decision's sync found.
    pub(super) fn begin_round(&mut self, number: u32, io: &mut dyn SourceIo) {
        if number > 0 {
            return self.open_round(number, Kind::PreCopy, io);
        }
        self.progress.status = Status::Active;
        self.precopy.last_sync = io.now();
        self.precopy.is_tracking = true;
        io.begin(Work::Track);
    }

    /// Finding the touched pages comes behind, so that a page that is touched meanwhile is in the
    /// next sync.
    pub(super) fn on_tracked(&mut self, tracked: Result<Tracker, Error>, io: &mut dyn SourceIo) {
        self.precopy.is_tracking = false;
        if self.ending.outcome.is_some() {
            return;
        }
        match tracked {
            Ok(tracker) => {
                self.precopy.tracker = Some(tracker);
                io.begin(Work::FindTouched { into: Arc::clone(&self.precopy.dirty) });
            }
            Err(error) => self.host_failed(error),
        }
    }

    pub(super) fn on_touched(&mut self, found: Result<u64, Error>, io: &mut dyn SourceIo) {
        match found {
            Ok(touched) => {
                self.progress.pages.untouched = self.progress.total.0.saturating_sub(touched);
                self.open_round(0, Kind::PreCopy, io);
            }
            Err(error) => self.host_failed(error),
        }
    }

    pub(super) fn open_round(&mut self, number: u32, kind: Kind, io: &mut dyn SourceIo) {
        let (now, sent) = (io.now(), io.sent());
        let precopy = &mut self.precopy;
        precopy.rounds = number + 1;
        precopy.awaits_room = false;
        precopy.round = Some(Round {
            number,
            kind,
            started: now,
            pages: precopy.dirty.count(),
            bytes_before: sent.bytes,
            pages_before: sent.pages(),
            handed_out: false,
            barriers_left: io.lanes().map_or(0, |lanes| lanes.count()),
            took: None,
        });
    }

    /// Hands out as much of the round as the lanes take, but not too much at once.
    pub(super) fn hand_out(&mut self, io: &mut dyn SourceIo) {
        if !self.precopy.can_hand_out() {
            return;
        }
        let Some(kind) = self.precopy.round.map(|round| round.kind) else { return };
        for _ in 0..FEED_BURST {
            let next = match kind {
                Kind::PreCopy => self.precopy.next(),
                Kind::Last => Ok(self.switchover.next_last(&mut self.precopy.scanner)),
            };
            let chunk = match next {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return self.end_handing_out(io),
                Err(error) => return self.host_failed(error),
            };
            let Some(lanes) = io.lanes() else { return };
            match (lanes.offer(chunk), kind) {
                (Ok(()), Kind::PreCopy) => {}
                (Ok(()), Kind::Last) => self.switchover.last_handed += 1,
                (Err(chunk), _) => {
                    self.precopy.awaits_room = true;
                    self.precopy.held = (kind == Kind::PreCopy).then_some(chunk);
                    return;
                }
            }
        }
    }

    /// The lanes have all of the round; its barrier goes behind.
    pub(super) fn end_handing_out(&mut self, io: &mut dyn SourceIo) {
        let (Some(lanes), Some(round)) = (io.lanes(), &mut self.precopy.round) else { return };
        if !std::mem::replace(&mut round.handed_out, true) {
            lanes.barrier(round.number, round.kind == Kind::Last);
        }
    }

    pub(super) fn on_barrier(&mut self, number: u32, io: &mut dyn SourceIo) {
        let Some(round) = &mut self.precopy.round else { return };
        if round.number != number {
            return;
        }
        round.barriers_left = round.barriers_left.saturating_sub(1);
        match (round.barriers_left, round.kind) {
            (0, Kind::PreCopy) => self.tell(SourceEvent::RoundSent { round: number }),
            (0, Kind::Last) => self.on_last_pages_sent(io),
            _ => {}
        }
    }

    /// Shows the owner what has been done: what a lane still has in its hands counts as remaining.
    pub(super) fn publish(&mut self, io: &mut dyn SourceIo) {
        let (sent, now) = (io.sent(), io.now());
        let progress = &mut self.progress;
        progress.elapsed = now.since(self.started);
        progress.bytes_sent = ByteCount(sent.bytes);
        (progress.pages.normal, progress.pages.zero) = (sent.normal, sent.zero);
        progress.remaining = self.measures.measured.dirty;
        match self.precopy.round {
            Some(round) => {
                if round.took.is_none() {
                    let done = sent.pages() - round.pages_before;
                    progress.remaining = PageCount(round.pages.saturating_sub(done));
                }
                progress.round = round.number;
                let elapsed = round.took.unwrap_or_else(|| now.since(round.started));
                let bytes = sent.bytes - round.bytes_before;
                // A round that has just begun says nothing of the rate yet.
                if bytes > 0 {
                    progress.rate = BytesPerSec::measured(ByteCount(bytes), elapsed);
                }
            }
            // Nothing was sent, and nothing is known of what is to be.
            None => progress.remaining = progress.total,
        }
        io.show(progress);
    }
}

impl PreCopy {
    fn next(&mut self) -> Result<Option<Chunk>, Error> {
        if let Some(chunk) = self.held.take() {
            return Ok(Some(chunk));
        }
        let Some(tracker) = &mut self.tracker else { return Ok(None) };
        self.scanner.next(tracker).map_err(Error::from)
    }
}
