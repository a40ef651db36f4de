//! The stopped guest's last pages and its state, until the commit: sent without ever waiting, since
//! the clock and the owner have to be heard meanwhile.

use super::decide::WANTED_STOP;
use super::precopy::Kind;
use super::stop::LAST_PAGES_INLINE_MAX;
use super::{Attempt, Sending, SourceIo, Wait};
use crate::Status;
use martlet_protocol::SourceEvent;
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};
use std::time::Duration;
use tracing::info;

/// A state up to this long leaves together with the commit; of a longer one all has to be in the
/// kernel before.
const STATE_WITH_COMMIT_MAX: usize = 32 << 10;

/// The rate of the last run is taken over a part of the blackout that is accepted, within bounds.
const WINDOW_PART: u32 = 6;
const WINDOW_MIN: Duration = Duration::from_millis(1);
const WINDOW_MAX: Duration = Duration::from_millis(50);

/// A stop is called off once the blackout is expected to be longer than what is accepted by a
/// quarter. Less is within what a prediction is good for.
const CALL_OFF_OVER: u32 = 4;

/// Nobody says when pages that were sent have arrived. While a state waits for that it is looked
/// after when it is to be expected, and not more often than this.
const HELD_INTERVAL: Duration = Duration::from_micros(100);

/// Stops of one attempt that are called off: each costs the guest a part of its blackout.
const CALL_OFFS_MAX: u32 = 8;

/// What is under way between the stop and the commit.
#[derive(Debug)]
pub(super) struct LastRun {
    number: u32,
    pages: u64,
    by: By,
    state: State,
    /// The stop was called off: the guest runs, and this is a round like any other.
    called_off: bool,
    /// How far it was when its rate was taken the last time, and the time before.
    samples: [Sample; 2],
    /// The last time that something had arrived since.
    moved: Sample,
    /// What is still to arrive before the state leaves takes about so long.
    held_for: Duration,
    bytes_before: u64,
    pages_before: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// Right here. There is something to do at once if it is busy, else a channel has no room.
    Here { busy: bool },
    /// The lanes.
    Lanes,
    /// All of it, and the barriers, are in the channels.
    Sent,
}

/// Where the state of vCPUs and devices is.
#[derive(Debug)]
enum State {
    Saving,
    /// Saved, and kept while the stop may be called off.
    Held(Vec<u8>),
    /// The machine has it, and with it the control connection.
    Told {
        is_long: bool,
    },
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    /// What had arrived.
    bytes: u64,
}

impl LastRun {
    /// Whether it waits for room in the channels.
    pub(super) fn is_blocked(&self) -> bool {
        self.by == By::Here { busy: false }
    }

    /// How to wait: not at all if there is something to do.
    pub(super) fn wait(&self, io: &dyn SourceIo) -> Option<Wait> {
        let pause = match self.by {
            By::Here { busy: true } => return Some(Wait::No),
            By::Here { busy: false } | By::Lanes => window(io) / 2,
            By::Sent if matches!(self.state, State::Held(_)) => {
                self.held_for.clamp(HELD_INTERVAL, window(io) / 2)
            }
            By::Sent => return None,
        };
        Some(Wait::Until(io.now().after(pause)))
    }
}

fn window(io: &dyn SourceIo) -> Duration {
    (io.downtime_limit() / WINDOW_PART).clamp(WINDOW_MIN, WINDOW_MAX)
}

impl Attempt {
    /// The final sync and the last pages, while the vCPUs save their state.
    pub(super) fn run_last_round(&mut self, number: u32, io: &mut dyn SourceIo) {
        if let Err(error) = self.precopy.sync() {
            return self.host_failed(error);
        }
        let synced = io.now();
        if let Some(moments) = &mut self.switchover.moments {
            moments.synced = synced;
        }
        let pages = self.precopy.dirty.count();
        self.precopy.rounds = number + 1;
        self.switchover.last_chunks.clear();
        self.switchover.last_handed = 0;
        let by = if pages > LAST_PAGES_INLINE_MAX { By::Lanes } else { By::Here { busy: true } };
        let sent = io.sent();
        let sample = Sample { at: synced, bytes: 0 };
        self.switchover.last_run = Some(LastRun {
            number,
            pages,
            by,
            state: State::Saving,
            called_off: false,
            samples: [sample; 2],
            moved: sample,
            held_for: Duration::ZERO,
            bytes_before: sent.bytes,
            pages_before: sent.pages(),
        });
        let Some(lanes) = io.lanes() else { return };
        lanes.set_unpaced(true);
        if by == By::Lanes {
            lanes.disarm();
            self.open_round(number, Kind::Last, io);
            return self.hand_out(io);
        }
        lanes.begin_last();
        while let Some(chunk) = self.precopy.scanner.next_last() {
            self.switchover.last_chunks.push(chunk);
        }
        self.send_last_pages(io);
    }

    /// Sends what there is room for, if that is done right here.
    fn send_last_pages(&mut self, io: &mut dyn SourceIo) {
        let switchover = &mut self.switchover;
        let (Some(last), Some(lanes)) = (&mut switchover.last_run, io.lanes()) else { return };
        let By::Here { busy } = &mut last.by else { return };
        match lanes.send_last(&switchover.last_chunks, last.number) {
            Ok(Sending::Done) => self.on_last_pages_sent(io),
            Ok(sending @ (Sending::Blocked | Sending::Busy)) => *busy = sending == Sending::Busy,
            Ok(Sending::Left) => {
                last.by = By::Lanes;
                let number = last.number;
                self.open_round(number, Kind::Last, io);
                self.precopy.round.iter_mut().for_each(|round| round.handed_out = true);
            }
            Err(error) => self.lose_lane(error),
        }
    }

    /// All of the last pages are in the channels, with the barriers behind them. The destination
    /// starts nothing before it has read those.
    pub(super) fn on_last_pages_sent(&mut self, io: &mut dyn SourceIo) {
        let Some(last) = &mut self.switchover.last_run else { return };
        last.by = By::Sent;
        if last.called_off {
            let round = last.number;
            self.switchover.last_run = None;
            return self.tell(SourceEvent::RoundSent { round });
        }
        if let Some(moments) = &mut self.switchover.moments {
            moments.pages_sent = io.now();
        }
    }

    /// vCPUs and devices have saved their state.
    pub(super) fn on_state(&mut self, bytes: Vec<u8>, io: &mut dyn SourceIo) {
        let Some(last) = &mut self.switchover.last_run else { return };
        if let Some(moments) = &mut self.switchover.moments {
            moments.state_saved = io.now();
        }
        last.state = State::Held(bytes);
        self.end_last_run(io);
    }

    /// Brings the last run further, as far as that goes without waiting.
    pub(super) fn advance_last_run(&mut self, io: &mut dyn SourceIo) {
        if self.switchover.last_run.is_none() {
            return;
        }
        self.send_last_pages(io);
        self.judge_last_run(io);
        self.end_last_run(io);
    }

    /// Hands the state to the machine once the stop stands, then the end of the pages, upon which
    /// the machine commits.
    fn end_last_run(&mut self, io: &mut dyn SourceIo) {
        if !self.stands(io) {
            return;
        }
        let Some(last) = &mut self.switchover.last_run else { return };
        let is_sent = last.by == By::Sent;
        match std::mem::replace(&mut last.state, State::Saving) {
            State::Held(bytes) => {
                let is_long = bytes.len() > STATE_WITH_COMMIT_MAX;
                last.state = State::Told { is_long };
                // The commit may come next. A destination that is known to be gone must not get it:
                // nobody could say later that it had not.
                self.read_control(io);
                self.tell(SourceEvent::StateSaved { bytes });
                if is_sent && !is_long {
                    self.tell_last_round_sent();
                }
            }
            State::Told { is_long } if is_sent && !(is_long && io.unsent() > 0) => {
                self.read_control(io);
                self.tell_last_round_sent();
            }
            state @ (State::Told { .. } | State::Saving) => last.state = state,
        }
    }

    fn tell_last_round_sent(&mut self) {
        if let Some(last) = self.switchover.last_run.take() {
            self.tell(SourceEvent::LastRoundSent { round: last.number });
        }
    }

    /// Whether the stop is not called off any more: of many last pages half are there.
    fn stands(&mut self, io: &mut dyn SourceIo) -> bool {
        let Some(last) = &self.switchover.last_run else { return false };
        match last.state {
            _ if last.called_off => false,
            State::Saving => false,
            State::Told { .. } => true,
            State::Held(_) if last.pages <= LAST_PAGES_INLINE_MAX => last.by == By::Sent,
            State::Held(_) => {
                let (arrived, left) = self.last_bytes(io);
                let rate = self.measures.measured.bandwidth;
                let missing = ByteCount(left.saturating_sub(arrived) / 2);
                if let Some(last) = &mut self.switchover.last_run {
                    last.held_for = rate.time_for(missing);
                }
                missing.0 == 0
            }
        }
    }

    /// What of the last pages has left this host, and what has not: the rest of them, as if none
    /// were zero.
    fn last_bytes(&self, io: &mut dyn SourceIo) -> (u64, u64) {
        let Some(last) = &self.switchover.last_run else { return (0, 0) };
        let sent = io.sent();
        let taken = sent.pages() - last.pages_before;
        let rest = PageCount(last.pages.saturating_sub(taken)).to_bytes();
        let waiting = io.lanes().map_or(ByteCount(0), |lanes| lanes.unacknowledged());
        let sent = sent.bytes - last.bytes_before;
        (sent.saturating_sub(waiting.0), rest.0.saturating_add(waiting.0))
    }

    /// Takes the rate of the last moments, and calls the stop off if the blackout would become too
    /// long with it: until the state has left, for what comes behind it is about to be the end.
    fn judge_last_run(&mut self, io: &mut dyn SourceIo) {
        let now = io.now();
        let Some(last) = &self.switchover.last_run else { return };
        if now.since(last.samples[0].at) < window(io) || last.called_off {
            return;
        }
        let older = last.samples[1];
        let (bytes, left) = self.last_bytes(io);
        let Some(last) = &mut self.switchover.last_run else { return };
        last.samples = [Sample { at: now, bytes }, last.samples[0]];
        if bytes > last.moved.bytes || left == 0 {
            last.moved = Sample { at: now, bytes };
        } else if now.since(last.moved.at) >= WANTED_STOP {
            let reason = format!("nothing of the last pages got through for {WANTED_STOP:?}");
            return self.tell(SourceEvent::ChannelLost { reason });
        }
        // Of a round that has arrived nothing more will be heard, and no link is to blame.
        if left == 0 || matches!(last.state, State::Told { .. }) {
            return;
        }
        let passed = ByteCount(bytes.saturating_sub(older.bytes));
        let rate = BytesPerSec::measured(passed, now.since(older.at));
        let prediction = self.measures.prediction;
        let rest = prediction.map_or(Duration::ZERO, |it| it.cpu_state + it.commit + it.start);
        let stopped = self.switchover.moments.map_or(Duration::ZERO, |it| now.since(it.stop));
        let expected = stopped.saturating_add(rate.time_for(ByteCount(left))).saturating_add(rest);
        let limit = io.downtime_limit();
        if expected > limit.saturating_add(limit / CALL_OFF_OVER) && self.may_call_off(io) {
            info!(?expected, ?limit, %rate, "the link has become slower: the stop is called off");
            self.call_off(rate, io);
        }
    }

    fn may_call_off(&self, io: &mut dyn SourceIo) -> bool {
        let outlives = io.lanes().is_some_and(|lanes| lanes.outlive_last());
        (outlives || self.precopy.is_handing_out())
            && self.machine.may_call_off()
            && !self.owner.stop_now
            && self.switchover.call_offs < CALL_OFFS_MAX
    }

    /// The guest goes on here, and what was sent of its last pages was a round like any other. They
    /// were not rearmed before they were read, so all of them count as dirty.
    fn call_off(&mut self, rate: BytesPerSec, io: &mut dyn SourceIo) {
        let Some(last) = &mut self.switchover.last_run else { return };
        let (number, by) = (last.number, last.by);
        last.called_off = true;
        for chunk in &self.switchover.last_chunks {
            let bitmap = self.precopy.dirty.region(chunk.region());
            chunk.runs().for_each(|run| bitmap.set_range(run));
        }
        if let By::Here { .. } = by {
            self.open_round(number, Kind::PreCopy, io);
        }
        if let Some(round) = &mut self.precopy.round {
            round.kind = Kind::PreCopy;
        }
        match by {
            // The barriers follow with the pages.
            By::Here { .. } => self.precopy.round.iter_mut().for_each(|it| it.handed_out = true),
            By::Lanes | By::Sent => {
                self.precopy.scanner.abandon_round();
                self.end_handing_out(io);
                self.switchover.last_run = None;
            }
        }
        self.switchover.call_offs += 1;
        self.measures.measured.bandwidth = rate;
        self.measures.measured.dirty = self.precopy.dirty_pages();
        self.switchover.moments = None;
        if let Some(lanes) = io.lanes() {
            lanes.set_unpaced(false);
        }
        self.progress.status = Status::Active;
        self.tell(SourceEvent::CalledOff);
        if by == By::Sent {
            self.tell(SourceEvent::RoundSent { round: number });
        }
    }
}
