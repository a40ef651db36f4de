//! How an attempt ends: its report, and the questions about an undecided one.

use super::moments::{self, Moments, Remote};
use super::{Attempt, SourceIo, Work};
use crate::vmm::observed;
use crate::{Error, Fault, Outcome, Report, Status, Switchover, Transfer};
use martlet_protocol::{Failure, OperatorOverride, SourceEvent, SourceOutcome, SourcePhase};
use martlet_units::{ByteCount, Instant, PageCount};
use martlet_wire::control::{Alive, Answer, Committed};
use std::time::Duration;
use tracing::{info, warn};

/// Wall clocks that NTP leads are closer than this.
const WALL_CLOCK_TOLERANCE: Duration = Duration::from_millis(100);

/// Between two questions about a guest that nobody here knows the whereabouts of.
const QUESTION_PAUSE_MIN: Duration = Duration::from_millis(250);
const QUESTION_PAUSE_MAX: Duration = Duration::from_secs(10);

/// An attempt that is over, or that was undecided and is settled.
#[derive(Clone, Debug)]
pub struct Ended {
    /// How it stands from now on.
    pub status: Status,
    /// What was measured. Of the process itself nothing is in it: its CPU time, what served it.
    pub report: Report,
}

/// What is known of the end.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) outcome: Option<SourceOutcome>,
    /// The first thing that this side could not do.
    pub(super) cause: Option<Error>,
    /// Why it was cancelled, if not by its owner's word.
    pub(super) cancelled_because: Option<String>,
    pub(super) committed: Option<Committed>,
    alive: Option<Alive>,
    verify: bool,
    memory_equal: Option<bool>,
    /// From the call to the destination's confirmation.
    pub(super) total: Option<Duration>,
    /// What this side's observer saw.
    observed: Option<Vec<u8>>,
    /// What is said of the end even if no report can be made.
    bare: Option<(Status, Outcome, Option<Error>)>,
    question: Question,
    /// What its operator wants done if the destination does not answer.
    pub(super) overriding: Option<OperatorOverride>,
}

/// What became of the guest, as the destination is asked.
#[derive(Debug)]
struct Question {
    is_asking: bool,
    next: Instant,
    pause: Duration,
}

impl Ending {
    pub(super) fn new(now: Instant, verify: bool) -> Ending {
        Ending {
            outcome: None,
            cause: None,
            cancelled_because: None,
            committed: None,
            alive: None,
            verify,
            memory_equal: None,
            total: None,
            observed: None,
            bare: None,
            question: Question { is_asking: false, next: now, pause: Duration::ZERO },
            overriding: None,
        }
    }

    fn conclude(&mut self, outcome: SourceOutcome) -> (Status, Outcome, Option<Error>) {
        match outcome {
            SourceOutcome::Completed { committed, alive } => {
                self.committed = committed.or(self.committed);
                self.alive = alive;
                self.memory_equal = self.verify.then_some(true);
                (Status::Completed, Outcome::Completed, None)
            }
            SourceOutcome::Failed { reason } => {
                if reason == Failure::MemoryDiffers {
                    self.memory_equal = Some(false);
                }
                (Status::Failed, Outcome::Failed, Some(self.error_of(reason)))
            }
            SourceOutcome::Cancelled => {
                let reason = self.cancelled_because.take();
                let error = reason.map(|reason| Error::new(Fault::Cancelled, "", reason));
                (Status::Cancelled, Outcome::Cancelled, error)
            }
            SourceOutcome::GivenUp => {
                let reason = "given up by its operator: where the guest is, is not known here";
                let error = Error::new(Fault::Peer, "", reason);
                (Status::GivenUp, Outcome::GivenUp, Some(error))
            }
            SourceOutcome::Undecided { reason } => {
                let error = Error::new(Fault::Peer, "", reason.to_string());
                (Status::Undecided, Outcome::Undecided, Some(error))
            }
        }
    }

    /// The machine knows failures of this side by their text only.
    fn error_of(&mut self, failure: Failure) -> Error {
        match (self.cause.take(), &failure) {
            (Some(cause), Failure::Host { reason }) if cause.to_line() == *reason => cause,
            _ => failure.into(),
        }
    }
}

impl Attempt {
    /// What is to be told of an attempt whose [`Attempt::conclude`] panicked; `None` if it told.
    pub fn bare_end(&mut self, now: Instant) -> Option<Ended> {
        let (status, outcome, error) = self.ending.bare.take()?;
        let report = Report::not_begun(outcome, error, now.since(self.started));
        Some(Ended { status, report })
    }

    /// Frees what an attempt that is over held, and tells the owner.
    pub fn conclude(&mut self, io: &mut dyn SourceIo) {
        let Some(outcome) = self.ending.outcome.take() else { return };
        let (status, outcome, error) = self.ending.conclude(outcome);
        self.ending.bare = Some((status, outcome, error.clone()));
        info!(?outcome, error = error.as_ref().map(Error::to_line), "the migration ended");
        self.publish(io);
        let total = self.ending.total.unwrap_or_else(|| io.now().since(self.started));
        self.switchover.last_run = None;
        // Whatever a lane waits for: nobody does for it.
        if let Some(lanes) = io.lanes() {
            lanes.break_all();
        }
        match outcome {
            Outcome::Completed => {
                self.ending.observed = observed(io.vmm().observer());
                self.progress.remaining = PageCount(0);
            }
            Outcome::Undecided | Outcome::GivenUp => {}
            // The next attempt may begin as soon as this one has reported.
            Outcome::Failed | Outcome::Cancelled => {
                io.vmm().set_throttle(0);
                self.precopy.tracker = None;
            }
        }
        io.show(&self.progress);
        let report = self.report(outcome, error.clone(), total, io);
        self.ending.bare = None;
        io.finish(Ended { status, report });
        (self.progress.status, self.progress.error) = (status, error);
        if outcome == Outcome::Completed {
            // Nobody waits for what the guest that has left for good needed here.
            self.precopy.tracker = None;
            io.vmm().moved_away();
        }
    }

    fn report(
        &mut self,
        outcome: Outcome,
        error: Option<Error>,
        total: Duration,
        io: &dyn SourceIo,
    ) -> Report {
        let remote = self.remote(io.now());
        let alive = remote.as_ref().and_then(|remote| remote.alive.as_ref());
        let transfer = Transfer {
            total,
            rounds: self.precopy.rounds,
            pages: self.progress.pages,
            bytes_sent: ByteCount(io.sent().bytes + io.control_bytes().0),
            channels: self.channels,
            destination_cpu: alive.map(|alive| Duration::from_nanos(alive.cpu_ns)),
            memory_equal: self.ending.memory_equal,
            ..Transfer::default()
        };
        let is_measurable = outcome == Outcome::Completed && !self.ending.verify;
        let switchover = self.switchover.moments.map(|moments| {
            let here_ns = io.wall_clock_ns();
            let there = remote.as_ref();
            Switchover {
                blackout: there
                    .filter(|_| is_measurable)
                    .map(|there| moments::blackout(&moments, there)),
                clock: there.map(|there| there.clock),
                wall_clock_difference_ns: there
                    .and_then(|there| wall_clock_difference(there, here_ns)),
                predicted: self.measures.prediction,
                phases: moments::phases(&moments, there),
                devices: moments::devices(&moments, there),
                stop: moments.stop,
                timeline: moments::timeline(&moments, there),
                source_observed: self.ending.observed.take(),
                destination_observed: alive.and_then(|alive| alive.observed.clone()),
            }
        });
        Report { outcome, error, transfer, switchover }
    }

    /// What the destination said of the switchover.
    fn remote(&self, now: Instant) -> Option<Remote> {
        let committed = self.ending.committed?;
        // The clocks are compared as they were then: they drift apart until the report.
        let switchover =
            self.switchover.moments.map_or(now, |moments: Moments| moments.commit_sent);
        let clock = self.machine.clock(switchover)?;
        Some(Remote { committed, alive: self.ending.alive.clone(), clock })
    }

    /// Whether the commit was sent and its answer may only be had by a question.
    fn needs_an_answer(&self) -> bool {
        match self.phase() {
            SourcePhase::Undecided => true,
            SourcePhase::Committing => !self.peer.is_open(),
            _ => false,
        }
    }

    /// When the destination is to be asked, if it is.
    pub(super) fn ask_at(&self) -> Option<Instant> {
        let question = &self.ending.question;
        (self.needs_an_answer() && !question.is_asking).then_some(question.next)
    }

    /// Asks by itself what became of the guest, seldomer and seldomer.
    pub(super) fn ask_if_due(&mut self, io: &mut dyn SourceIo) {
        let now = io.now();
        if self.ask_at().is_some_and(|at| at <= now) {
            let question = &mut self.ending.question;
            question.pause = (question.pause * 2).clamp(QUESTION_PAUSE_MIN, QUESTION_PAUSE_MAX);
            question.next = now.after(question.pause);
            self.ask(io);
        }
    }

    /// Asks the destination, at the side: its late word on the control connection counts as much,
    /// and is heard meanwhile.
    pub(super) fn ask(&mut self, io: &mut dyn SourceIo) {
        if !std::mem::replace(&mut self.ending.question.is_asking, true) {
            io.begin(Work::Ask);
        }
    }

    /// An operator wants to end an undecided attempt. What has come from the destination counts
    /// first: to break the connection throws it away, and it may be that the guest runs there.
    pub(super) fn begin_override(&mut self, by: OperatorOverride, io: &mut dyn SourceIo) {
        self.read_all_control(io);
        self.settle(io);
        if !matches!(self.phase(), SourcePhase::Committing | SourcePhase::Undecided) {
            info!(?by, "an operator's override came too late: the migration is settled");
            return;
        }
        // A commit that did not get away yet must not arrive later on.
        io.break_control();
        self.lose_control("broken for its operator's override".to_owned());
        self.ending.overriding.get_or_insert(by);
        self.ask(io);
    }

    pub(super) fn on_answer(&mut self, answer: Result<Answer, Error>, io: &mut dyn SourceIo) {
        let question = &mut self.ending.question;
        question.is_asking = false;
        question.next = question.next.max(io.now().after(question.pause));
        if let Some(by) = self.ending.overriding.take() {
            warn!(?by, ?answer, "an operator ends an undecided migration");
            return self.tell(SourceEvent::Overridden { by, answer: answer.ok() });
        }
        match answer {
            Ok(fate) => self.tell(SourceEvent::Fate(fate)),
            Err(error) => io.unanswered(&error),
        }
    }
}

/// How much later the destination's wall clock is than this host's. Logged if a guest would notice
/// that asks its host for the time, as guests do at their boot and their resume from sleep.
fn wall_clock_difference(remote: &Remote, here_ns: i64) -> Option<i64> {
    let difference_ns = remote.wall_clock_difference(here_ns)?;
    let difference = Duration::from_nanos(difference_ns.unsigned_abs());
    if difference >= WALL_CLOCK_TOLERANCE {
        warn!(difference_ns, "the hosts' wall clocks differ; the guest's goes on as it was");
    }
    Some(difference_ns)
}
