//! How an attempt ends: its report, the tidying up, and the questions about an undecided one.

use super::Driver;
use crate::source::events::Event;
use crate::source::lanes::Lanes;
use crate::source::query;
use crate::source::switchover::{self, Remote};
use crate::{Error, Fault, Outcome, Phases, Report, Status};
use crate::{chain, host};
use martlet_protocol::{Failure, SourceEvent, SourceOutcome, SourcePhase};
use martlet_transport::monotonic_now;
use martlet_units::{ByteCount, Instant, PageCount};
use martlet_wire::control::Answer;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::{info, warn};

/// Wall clocks that NTP leads are closer than this.
const WALL_CLOCK_TOLERANCE: Duration = Duration::from_millis(100);

/// Between two questions about a guest that nobody here knows the whereabouts of.
const QUESTION_PAUSE_MIN: Duration = Duration::from_millis(250);
const QUESTION_PAUSE_MAX: Duration = Duration::from_secs(10);

impl Driver<'_> {
    /// Frees what the attempt held and writes the report.
    pub(super) fn finish(&mut self) {
        let outcome = self.outcome.take().expect("only called with an outcome");
        let (status, outcome, error) = self.conclude(outcome);
        info!(?outcome, error = error.as_ref().map(Error::to_line), "the migration ended");
        let is_reported =
            self.guarded(|driver| driver.write_report(status, outcome, error.clone()));
        if !is_reported {
            let total = monotonic_now().since(self.shared.started);
            let report = Report::not_begun(outcome, error, total);
            self.shared.finish(status, report);
        }
        self.guarded(|driver| {
            if outcome == Outcome::Completed {
                driver.tidy();
            }
            if let Some(lanes) = driver.lanes.take() {
                lanes.join();
            }
        });
    }

    fn conclude(&mut self, outcome: SourceOutcome) -> (Status, Outcome, Option<Error>) {
        match outcome {
            SourceOutcome::Completed { committed, alive } => {
                self.committed = committed.or(self.committed);
                self.alive = alive;
                self.memory_equal = self.options.verify.then_some(true);
                (Status::Completed, Outcome::Completed, None)
            }
            SourceOutcome::Failed { reason } => {
                if reason == Failure::MemoryDiffers {
                    self.memory_equal = Some(false);
                }
                (Status::Failed, Outcome::Failed, Some(reason.into()))
            }
            SourceOutcome::Cancelled => {
                let reason = self.cancelled_because.take();
                let error = reason.map(|reason| Error::new(Fault::Cancelled, "", reason));
                (Status::Cancelled, Outcome::Cancelled, error)
            }
            SourceOutcome::GivenUp => {
                let reason = "given up by its operator: where the guest is, is not known here";
                (Status::GivenUp, Outcome::GivenUp, Some(Error::new(Fault::Peer, "", reason)))
            }
            SourceOutcome::Undecided { reason } => {
                let error = Error::new(Fault::Peer, "", chain(&reason));
                (Status::Undecided, Outcome::Undecided, Some(error))
            }
        }
    }

    fn write_report(&mut self, status: Status, outcome: Outcome, error: Option<Error>) {
        self.publish();
        let total = self.total.unwrap_or_else(|| monotonic_now().since(self.shared.started));
        self.last_run = None;
        // Whatever a lane waits for: nobody does for it.
        self.lanes.iter().for_each(Lanes::break_all);
        match outcome {
            Outcome::Completed => {
                self.guest = self.vmm.guest_check();
                self.shared.update(|progress| progress.remaining = PageCount(0));
            }
            Outcome::Undecided | Outcome::GivenUp => {}
            // The next attempt may begin as soon as this one has reported.
            Outcome::Failed | Outcome::Cancelled => {
                self.vmm.set_throttle(0);
                self.tracker = None;
            }
        }
        let report = self.report(outcome, error, total);
        self.shared.finish(status, report);
    }

    fn report(&self, outcome: Outcome, error: Option<Error>, total: Duration) -> Report {
        let remote = self.remote();
        let moments = self.moments.as_ref();
        let phases = moments
            .map_or_else(Phases::default, |moments| switchover::phases(moments, remote.as_ref()));
        let measurable = outcome == Outcome::Completed && !self.options.verify;
        let blackout = remote
            .as_ref()
            .filter(|_| measurable)
            .map(|remote| switchover::blackout(self.last_heartbeat, remote, &phases));
        let alive = remote.as_ref().and_then(|remote| remote.alive.as_ref());
        let network = moments
            .filter(|_| !self.last_frames.is_empty())
            .map(|moments| switchover::network(moments, &self.last_frames, remote.as_ref()));
        let progress = self.shared.progress(monotonic_now());
        let sent = self.sent.bytes.load(Ordering::Relaxed) + self.control.sent_bytes();
        Report {
            outcome,
            error,
            total,
            blackout,
            clock_error: remote.as_ref().map_or(Duration::ZERO, |remote| remote.clock.error),
            wall_clock_difference_ns: remote.as_ref().and_then(wall_clock_difference),
            predicted: self.prediction.filter(|_| moments.is_some()),
            phases,
            timeline: moments.map_or_else(Vec::new, |moments| {
                let has_cards = !self.last_frames.is_empty();
                switchover::timeline(moments, self.last_heartbeat, has_cards, remote.as_ref())
            }),
            rounds: self.rounds,
            pages: progress.pages,
            bytes_sent: ByteCount(sent),
            channels: self.channels,
            source_cpu: host::process_cpu().saturating_sub(self.cpu_before),
            destination_cpu: alive.map(|alive| Duration::from_nanos(alive.cpu_ns)),
            rdma: self.shared.rdma(),
            network,
            guest: self.guest,
            memory_equal: self.memory_equal,
        }
    }

    /// What the destination said of the switchover.
    fn remote(&self) -> Option<Remote> {
        let committed = self.committed?;
        // The clocks are compared as they were then: they drift apart until the report.
        let switchover = self.moments.map_or_else(monotonic_now, |moments| moments.commit_sent);
        let clock = self.machine.clock(switchover)?;
        Some(Remote { committed, alive: self.alive.clone(), clock })
    }

    /// An undecided migration waits here until the destination settles it.
    pub(super) fn stay_for_questions(&mut self) {
        while self.shared.status() == Status::Undecided {
            if !self.guarded(Driver::step) {
                // It may do so at every step.
                std::thread::sleep(QUESTION_PAUSE_MIN);
            }
            if self.outcome.is_some() {
                self.finish();
            }
        }
    }

    /// Whether the commit was sent and its answer may only be had by a question.
    fn is_in_doubt(&self) -> bool {
        match self.machine.phase() {
            SourcePhase::Undecided => true,
            SourcePhase::Committing => !self.control_open,
            _ => false,
        }
    }

    /// When the destination is to be asked, if it is.
    pub(super) fn ask_at(&self) -> Option<Instant> {
        (self.is_in_doubt() && !self.is_asking).then_some(self.next_question)
    }

    /// Asks by itself what became of the guest, seldomer and seldomer.
    pub(super) fn mind_doubt(&mut self) {
        let now = monotonic_now();
        if self.ask_at().is_some_and(|at| at <= now) {
            self.question_pause =
                (self.question_pause * 2).clamp(QUESTION_PAUSE_MIN, QUESTION_PAUSE_MAX);
            self.next_question = now.after(self.question_pause);
            self.ask_fate();
        }
    }

    /// Asks the destination, on a thread of its own: its late word on the control connection
    /// counts as much, and is heard meanwhile.
    pub(super) fn ask_fate(&mut self) {
        if self.is_asking {
            return;
        }
        let (to, target) = (self.to.clone(), self.target.clone());
        let (migration, shared) = (self.migration, Arc::clone(&self.shared));
        let ask = move || {
            let answer = host::guarded(|| query::ask(&to, &target, migration));
            shared.events.post(Event::Asked(answer.and_then(|answer| answer)));
        };
        match host::spawn("martlet-query", ask) {
            Ok(_) => self.is_asking = true,
            Err(error) => self.shared.note_unanswered(format!("cannot start a thread: {error}")),
        }
    }

    pub(super) fn on_answer(&mut self, answer: Result<Answer, String>) {
        self.is_asking = false;
        self.next_question = self.next_question.max(monotonic_now().after(self.question_pause));
        if let Some(by) = self.overriding.take() {
            warn!(?by, ?answer, "an operator ends the doubt about a migration");
            return self.tell(SourceEvent::Overridden { by, answer: answer.ok() });
        }
        match answer {
            Ok(fate) => self.tell(SourceEvent::Fate(fate)),
            Err(reason) => self.shared.note_unanswered(reason),
        }
    }

    /// Frees what the guest that has left for good needed here. Nobody waits for this.
    fn tidy(&mut self) {
        self.tracker = None;
        self.vmm.moved_away();
    }
}

/// How much later the destination's wall clock is than this host's. Logged if a guest would notice
/// that asks its host for the time, as guests do at their boot and their resume from sleep.
fn wall_clock_difference(remote: &Remote) -> Option<i64> {
    let difference_ns = remote.wall_clock_difference(host::wall_clock_ns())?;
    let difference = Duration::from_nanos(difference_ns.unsigned_abs());
    if difference >= WALL_CLOCK_TOLERANCE {
        warn!(difference_ns, "the hosts' wall clocks differ; the guest's goes on as it was");
    }
    Some(difference_ns)
}
