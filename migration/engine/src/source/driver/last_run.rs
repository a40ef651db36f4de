//! The stopped guest's last pages and its state, until the commit: sent without ever waiting, since
//! this thread has to hear the clock and the owner meanwhile.

use super::{Driver, Kind, LAST_PAGES_INLINE_MAX};
use crate::Status;
use crate::source::events::Event;
use crate::source::lanes::{Lanes, Sending};
use martlet_protocol::SourceEvent;
use martlet_transport::{Address, monotonic_now};
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};
use std::sync::atomic::Ordering;
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

/// A state that is held back until enough of the pages are there is looked after this often.
const HELD_INTERVAL: Duration = Duration::from_micros(250);

/// Stops of one attempt that are called off: each costs the guest a part of its blackout.
const CALL_OFFS_MAX: u32 = 8;

/// What is under way between the stop and the commit.
pub(super) struct LastRun {
    number: u32,
    pages: u64,
    by: By,
    state: State,
    /// The stop was called off: the guest runs, and this is a round like any other.
    called_off: bool,
    /// How far it was when its rate was taken the last time, and the time before.
    samples: [Sample; 2],
    bytes_before: u64,
    pages_before: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// This thread. It has something to do at once if it is busy, else a channel has no room.
    Driver { busy: bool },
    /// The lanes' threads.
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

impl Driver<'_> {
    /// The final sync and the last pages, while the vCPUs save their state.
    pub(super) fn run_last_round(&mut self, number: u32) {
        let (Some(tracker), Some(lanes)) = (&mut self.tracker, &self.lanes) else { return };
        if let Err(error) = tracker.sync(&self.dirty) {
            return self.host_failed("cannot track dirty pages", &error);
        }
        let synced = monotonic_now();
        if let Some(moments) = &mut self.moments {
            moments.synced = synced;
        }
        let pages = self.dirty.count();
        self.rounds = number + 1;
        self.last_chunks.clear();
        self.last_handed = 0;
        let by = if pages > LAST_PAGES_INLINE_MAX { By::Lanes } else { By::Driver { busy: true } };
        self.last_run = Some(LastRun {
            number,
            pages,
            by,
            state: State::Saving,
            called_off: false,
            samples: [Sample { at: synced, bytes: 0 }; 2],
            bytes_before: self.sent.bytes.load(Ordering::Relaxed),
            pages_before: self.sent.pages().total(),
        });
        lanes.set_unpaced(true);
        if by == By::Lanes {
            lanes.disarm();
            self.open_round(number, Kind::Last);
            return self.hand_out();
        }
        while let Some(chunk) = self.scanner.next_last() {
            self.last_chunks.push(chunk);
        }
        if let Some(run) = &mut self.inline_run {
            run.begin();
        }
        self.send_last_pages();
    }

    /// Sends what there is room for, if this thread does that.
    fn send_last_pages(&mut self) {
        let (Some(last), Some(lanes), Some(run)) =
            (&mut self.last_run, &self.lanes, &mut self.inline_run)
        else {
            return;
        };
        let By::Driver { busy } = &mut last.by else { return };
        match lanes.advance(run, &self.last_chunks, last.number) {
            Ok(Sending::Done) => self.on_last_pages_sent(),
            Ok(sending @ (Sending::Blocked | Sending::Busy)) => *busy = sending == Sending::Busy,
            Ok(Sending::Left) => {
                last.by = By::Lanes;
                let number = last.number;
                self.open_round(number, Kind::Last);
                self.round.iter_mut().for_each(|round| round.handed_out = true);
            }
            Err(error) => self.on_own_event(Event::of_lane("a data channel broke", &error)),
        }
    }

    /// All of the last pages are in the channels, with the barriers behind them. The destination
    /// starts nothing before it has read those.
    pub(super) fn on_last_pages_sent(&mut self) {
        let Some(last) = &mut self.last_run else { return };
        last.by = By::Sent;
        if last.called_off {
            let round = last.number;
            self.last_run = None;
            return self.tell(SourceEvent::RoundSent { round });
        }
        if let Some(moments) = &mut self.moments {
            moments.pages_sent = monotonic_now();
        }
    }

    pub(super) fn save_state(&mut self) {
        let saved = self.vmm.take_state();
        let Some(last) = &mut self.last_run else { return };
        match saved {
            Ok(bytes) => {
                if let Some(moments) = &mut self.moments {
                    moments.state_saved = monotonic_now();
                }
                last.state = State::Held(bytes);
                self.end_last_run();
            }
            Err(error) => self.host_failed("cannot save the state", &error),
        }
    }

    /// Brings the last run further, as far as that goes without waiting.
    pub(super) fn mind_last_run(&mut self) {
        if self.last_run.is_none() {
            return;
        }
        self.send_last_pages();
        self.judge_last_run();
        self.end_last_run();
    }

    /// Hands the state to the machine once the stop stands, then the end of the pages, upon which
    /// the machine commits.
    fn end_last_run(&mut self) {
        let Some(last) = &self.last_run else { return };
        if last.called_off || !self.stands(last) {
            return;
        }
        let (Some(last), unsent) = (&mut self.last_run, self.control.unsent()) else { return };
        let is_sent = last.by == By::Sent;
        match std::mem::replace(&mut last.state, State::Saving) {
            State::Held(bytes) => {
                let is_long = bytes.len() > STATE_WITH_COMMIT_MAX;
                last.state = State::Told { is_long };
                // The commit may come next. A destination that is known to be gone must not get it:
                // nobody could say later that it had not.
                self.read_control();
                self.tell(SourceEvent::StateSaved { bytes });
                if is_sent && !is_long {
                    self.tell_last_round_sent();
                }
            }
            State::Told { is_long } if is_sent && !(is_long && unsent > 0) => {
                self.read_control();
                self.tell_last_round_sent();
            }
            state @ (State::Told { .. } | State::Saving) => last.state = state,
        }
    }

    fn tell_last_round_sent(&mut self) {
        if let Some(last) = self.last_run.take() {
            self.tell(SourceEvent::LastRoundSent { round: last.number });
        }
    }

    /// Whether the stop is not called off any more: of many last pages half are there.
    fn stands(&self, last: &LastRun) -> bool {
        match last.state {
            State::Saving => false,
            State::Told { .. } => true,
            State::Held(_) if last.pages <= LAST_PAGES_INLINE_MAX => last.by == By::Sent,
            State::Held(_) => {
                let (arrived, left) = self.last_bytes(last);
                left <= arrived
            }
        }
    }

    /// What of the last pages has left this host, and what has not: the rest of them, as if none
    /// were zero.
    fn last_bytes(&self, last: &LastRun) -> (u64, u64) {
        let taken = self.sent.pages().total() - last.pages_before;
        let rest = PageCount(last.pages.saturating_sub(taken)).to_bytes();
        let waiting = self.lanes.as_ref().map_or(ByteCount(0), Lanes::unacknowledged);
        let sent = self.sent.bytes.load(Ordering::Relaxed) - last.bytes_before;
        (sent.saturating_sub(waiting.0), rest.0.saturating_add(waiting.0))
    }

    /// When to look at the last run at the latest: at once if there is something to do.
    pub(super) fn last_run_wait(&self) -> Option<Duration> {
        let last = self.last_run.as_ref()?;
        match last.by {
            By::Driver { busy: true } => Some(Duration::ZERO),
            By::Driver { busy: false } | By::Lanes => Some(self.window() / 2),
            By::Sent if matches!(last.state, State::Held(_)) => Some(HELD_INTERVAL),
            By::Sent => None,
        }
    }

    /// Whether this thread waits for room in the channels.
    pub(super) fn is_blocked(&self) -> bool {
        self.last_run.as_ref().is_some_and(|last| last.by == By::Driver { busy: false })
    }

    fn window(&self) -> Duration {
        (self.shared.downtime_limit() / WINDOW_PART).clamp(WINDOW_MIN, WINDOW_MAX)
    }

    /// Takes the rate of the last moments, and calls the stop off if the blackout would become too
    /// long with it. Until the state has left: what comes behind it is about to be the end.
    fn judge_last_run(&mut self) {
        let (Some(last), Some(moments)) = (&self.last_run, &self.moments) else { return };
        let now = monotonic_now();
        let [newer, older] = last.samples;
        let is_due = now.since(newer.at) >= self.window();
        if !is_due || matches!(last.state, State::Told { .. }) || last.called_off {
            return;
        }
        let (bytes, left) = self.last_bytes(last);
        let stopped = now.since(moments.stop);
        if let Some(last) = &mut self.last_run {
            last.samples = [Sample { at: now, bytes }, newer];
        }
        let passed = ByteCount(bytes.saturating_sub(older.bytes));
        let rate = BytesPerSec::measured(passed, now.since(older.at));
        let rest = self.prediction.map_or(Duration::ZERO, |it| it.cpu_state + it.commit + it.start);
        let more = if left == 0 { Duration::ZERO } else { rate.time_for(ByteCount(left)) };
        let expected = stopped.saturating_add(more).saturating_add(rest);
        let limit = self.shared.downtime_limit();
        if expected > limit.saturating_add(limit / CALL_OFF_OVER) && self.may_call_off() {
            info!(?expected, ?limit, %rate, "the link has become slower: the stop is called off");
            self.call_off(rate);
        }
    }

    fn may_call_off(&self) -> bool {
        // The marker of a last round by RDMA ends RDMA.
        let can_go_on = match self.to {
            Address::Rdma { .. } => self.is_handing_out(),
            _ => true,
        };
        can_go_on && !self.stop_now && self.call_offs < CALL_OFFS_MAX
    }

    /// The guest goes on here, and what was sent of its last pages was a round like any other. They
    /// were not rearmed before they were read, so all of them count as dirty.
    fn call_off(&mut self, rate: BytesPerSec) {
        let Some(last) = &mut self.last_run else { return };
        let number = last.number;
        last.called_off = true;
        let by = last.by;
        for chunk in &self.last_chunks {
            let bitmap = self.dirty.region(chunk.region());
            chunk.runs().for_each(|run| bitmap.set_range(run));
        }
        match by {
            By::Driver { .. } => self.open_round(number, Kind::PreCopy),
            By::Lanes | By::Sent => {
                self.scanner.abandon_round();
                self.end_handing_out();
                self.last_run = None;
            }
        }
        if let Some(round) = &mut self.round {
            (round.kind, round.handed_out) = (Kind::PreCopy, true);
        }
        self.call_offs += 1;
        self.measured.bandwidth = rate;
        self.measured.dirty = PageCount(self.dirty.count());
        self.moments = None;
        self.lanes.iter().for_each(|lanes| lanes.set_unpaced(false));
        self.shared.set_status(Status::Active);
        self.tell(SourceEvent::CalledOff);
        if by == By::Sent {
            self.tell(SourceEvent::RoundSent { round: number });
        }
    }
}
