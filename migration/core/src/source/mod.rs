//! One attempt to move a guest away, without threads, sockets and clock.
//!
//! ```text
//!                 Attempt: the protocol's machine, and what it wants done
//!   PreCopy   rounds: what is handed to the lanes     Measures   prediction, convergence
//!   Switchover  suspend, pause, last run, call off    Ending     outcome, questions, report
//!                                  |  SourceIo, Lanes, SourceVmm
//!                   threads and sockets | a simulated world
//! ```
//!
//! Whoever drives it calls [`Attempt::on_event`] with what happened, [`Attempt::step`], and then
//! waits as [`Attempt::wait`] says: for an event, a message, room where something is blocked, or
//! the moment. None of these calls waits for anything. The longest that a step can take is a dirty
//! sync, which is some 10 ms for a terabyte.

mod decide;
mod ending;
mod io;
mod last_run;
mod look;
mod moments;
mod precopy;
mod stop;
#[cfg(test)]
mod tests;

pub use ending::Ended;
pub use io::{Event, Lanes, Lost, Sending, Sent, SourceIo, Work};

use crate::{Error, Fault, Progress};
use decide::Measures;
use ending::Ending;
use look::Peer;
use martlet_protocol::{
    Failure, Source, SourceAction, SourceConfig, SourceEvent, SourceOutcome, SourcePhase,
    UndecidedReason,
};
use martlet_ram::RamBitmap;
use martlet_units::{Instant, PageCount};
use martlet_wire::control::Control;
use precopy::PreCopy;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use stop::Switchover;

/// Panics of one attempt after which nothing more is expected of its machine.
const PANICS_MAX: u32 = 8;

/// How a guest is to be moved.
#[derive(Clone, Debug)]
pub struct Config {
    /// When the owner asked for it.
    pub started: Instant,
    /// What the protocol's machine needs.
    pub protocol: SourceConfig,
    /// Take time from the guest when it dirties memory faster than the link carries it.
    pub auto_converge: bool,
    /// A bound on the time until the guest is stopped.
    pub within: Option<Within>,
    /// One bitmap for each region of the guest's memory, all clear.
    pub dirty: Arc<RamBitmap>,
    /// All of the guest's memory.
    pub total: PageCount,
}

/// A bound on the time from the call until the guest is stopped for its switchover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Within {
    /// The bound.
    pub limit: Duration,
    /// What is done once it has passed and the guest still runs here.
    pub then: Then,
}

/// What is done about a migration that takes too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The guest stays; the migration ends as cancelled.
    Cancel,
    /// Time is taken from the guest from then on, as if auto-converge were set.
    Throttle,
    /// The guest is stopped at the end of the round that is under way, however long its blackout
    /// is predicted to be.
    Stop,
}

/// How to wait for what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// By letting others run for a moment: what is waited for is about to be there.
    Yield,
    /// Until this moment, an event, a message, or room for what is blocked.
    Until(Instant),
}

/// See the module's comment.
#[derive(Debug)]
pub struct Attempt {
    machine: Source,
    /// Events for the machine that came up while an action was performed.
    pending: VecDeque<SourceEvent>,
    /// Events that were not looked at yet.
    inbox: VecDeque<Event>,
    peer: Peer,
    owner: Owner,
    precopy: PreCopy,
    measures: Measures,
    switchover: Switchover,
    ending: Ending,
    progress: Progress,
    started: Instant,
    channels: u16,
    panics: u32,
}

/// What the owner wants.
#[derive(Debug)]
struct Owner {
    told_cancel: bool,
    /// Until when the guest is to be stopped, while that has not passed.
    due: Option<(Instant, Then)>,
    /// The guest is stopped next, whatever is predicted.
    stop_now: bool,
}

impl Attempt {
    /// Begins an attempt on a control connection that was just accepted.
    pub fn new(now: Instant, config: Config) -> Attempt {
        let Config { started, protocol, auto_converge, within, dirty, total } = config;
        let (verify, channels) = (protocol.verify, protocol.setup.channels);
        Attempt {
            machine: Source::new(now, protocol),
            pending: VecDeque::new(),
            inbox: VecDeque::new(),
            peer: Peer::new(),
            owner: Owner {
                told_cancel: false,
                due: within.map(|within| (started.after(within.limit), within.then)),
                stop_now: false,
            },
            precopy: PreCopy::new(now, dirty),
            measures: Measures::new(now, auto_converge),
            switchover: Switchover::new(),
            ending: Ending::new(now, verify),
            progress: Progress::begun(total),
            started,
            channels,
            panics: 0,
        }
    }

    /// Tells what happened. It is looked at in the next step.
    pub fn on_event(&mut self, event: Event) {
        self.inbox.push_back(event);
    }

    /// Whether the attempt is over, and [`Attempt::conclude`] is to be called. An undecided one is
    /// over until something settles it.
    pub fn is_over(&self) -> bool {
        // A tracker that somebody is making would be in the next attempt's way.
        self.ending.outcome.is_some() && !self.precopy.is_tracking
    }

    /// Takes in what came, then does what is due.
    pub fn step(&mut self, io: &mut dyn SourceIo) {
        self.settle(io);
        self.look(io);
        self.settle(io);
        // What this side waits for knows better than the clock alone whose fault it is.
        self.advance_stop(io);
        self.settle(io);
        self.look_at_clock(io);
        self.settle(io);
        if self.ending.outcome.is_some() {
            return;
        }
        self.hand_out(io);
        self.advance_last_run(io);
        self.end_rest(io);
        self.heed_bound(io);
        self.ask_if_due(io);
        self.settle(io);
        self.publish(io);
    }

    /// How to wait after a step.
    pub fn wait(&self, io: &dyn SourceIo) -> Wait {
        let now = io.now();
        if self.ending.outcome.is_some() {
            return if self.is_over() { Wait::No } else { Wait::Until(now.after(IDLE_INTERVAL)) };
        }
        if !self.pending.is_empty() || !self.inbox.is_empty() || self.peer.has_unread() {
            return Wait::No;
        }
        if self.precopy.can_hand_out() {
            return Wait::No;
        }
        let wait = self.switchover.wait(io);
        if let Some(wait @ (Wait::No | Wait::Yield)) = wait {
            return wait;
        }
        let until = |wait| if let Some(Wait::Until(at)) = wait { Some(at) } else { None };
        let moments = [
            until(wait),
            self.machine.poll_timeout(),
            self.measures.rest.map(|(at, _)| at),
            self.due(),
            self.ask_at(),
            self.precopy.is_sending().then(|| now.after(SHOW_INTERVAL)),
        ];
        let next = moments.into_iter().flatten().min();
        let at = next.map_or(now.after(IDLE_INTERVAL), |at| at.min(now.after(IDLE_INTERVAL)));
        if at <= now { Wait::No } else { Wait::Until(at) }
    }

    /// Whether the last pages wait for room in the channels.
    pub fn is_blocked(&self) -> bool {
        self.switchover.last_run.as_ref().is_some_and(last_run::LastRun::is_blocked)
    }

    /// Whether the control connection is worth looking at: it stays readable for ever once it broke.
    pub fn is_listening(&self) -> bool {
        self.peer.is_open()
    }

    /// A call panicked. The machine has the permit, and what it does about a failure gives that
    /// back.
    pub fn on_panic(&mut self, reason: &str) {
        self.panics += 1;
        let error = Error::new(Fault::Host, "", reason);
        if self.panics >= PANICS_MAX {
            // The machine itself does not get on. Whatever it holds, a stopped guest stays so.
            let reason = UndecidedReason::Unconfirmed(Failure::Host { reason: reason.to_owned() });
            self.ending.outcome.get_or_insert(SourceOutcome::Undecided { reason });
            self.precopy.is_tracking = false;
        }
        self.host_failed(error);
    }

    /// Tells the machine what happened and does what it wants, until it wants nothing more.
    fn settle(&mut self, io: &mut dyn SourceIo) {
        loop {
            while let Some(action) = self.machine.poll_action() {
                self.perform(action, io);
            }
            self.withdraw_stop(io);
            match self.pending.pop_front() {
                Some(event) => self.machine.on_event(io.now(), event),
                None => break,
            }
        }
        self.flush(io);
    }

    fn tell(&mut self, event: SourceEvent) {
        self.pending.push_back(event);
    }

    /// This side could not do its part.
    fn host_failed(&mut self, error: Error) {
        let reason = error.to_line();
        self.ending.cause.get_or_insert(error);
        self.tell(SourceEvent::HostFailed { reason });
    }

    fn perform(&mut self, action: SourceAction, io: &mut dyn SourceIo) {
        match action {
            SourceAction::Send(message) => {
                if let (Control::Commit(_), Some(moments)) =
                    (&message, &mut self.switchover.moments)
                {
                    moments.commit_sent = io.now();
                }
                io.send(&message);
            }
            SourceAction::OpenChannels { count, token } => {
                io.begin(Work::OpenChannels { count, token });
            }
            SourceAction::RunRound { round } => self.begin_round(round, io),
            SourceAction::Decide => self.decide(io),
            SourceAction::Rehearse => {
                self.measures.begin_rehearsal(io.now(), self.precopy.round_number());
                io.begin(Work::Rehearse);
            }
            SourceAction::Pause => self.begin_stop(io),
            SourceAction::RunLastRound { round } => self.run_last_round(round, io),
            SourceAction::SaveState => {
                self.switchover.await_state(io.now());
                self.advance_stop(io);
            }
            SourceAction::ComputeDigest => io.begin(Work::Digest),
            SourceAction::Resume { permit, running } => self.resume(permit, running, io),
            SourceAction::MovedAway(committed) => {
                self.ending.total = Some(io.now().since(self.started));
                self.ending.committed = Some(committed);
            }
            SourceAction::Finish(outcome) => self.ending.outcome = Some(outcome),
        }
    }

    fn flush(&mut self, io: &mut dyn SourceIo) {
        if !self.peer.is_open() {
            return;
        }
        if let Err(reason) = io.flush() {
            // What the peer said before it went comes first: it may be why, or the commit's answer.
            self.read_control(io);
            self.lose_control(reason);
        }
    }

    fn phase(&self) -> SourcePhase {
        self.machine.phase()
    }
}

/// While a round is being sent, its owner is shown this often how far it is.
const SHOW_INTERVAL: Duration = Duration::from_millis(100);

/// With nothing to wait for, one still looks this often.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
