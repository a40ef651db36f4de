//! The source's host: carries out what the source's machine wants, as the engine does.

use crate::checker::{Violation, ensure};
use crate::guest::{CHUNK_PAGES, Machine, Tracker};
use crate::link::{LinkId, Side};
use crate::scenario::Sabotage;
use crate::world::{Event, Payload, World};
use core::time::Duration;
use martlet_policy::{AutoConverge, Convergence, Measurements, RoundResult, predict};
use martlet_protocol::{
    Decision, OperatorOverride, OperatorsWord, RunPermit, Source, SourceAction, SourceEvent,
    SourceOutcome, SourcePhase,
};
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};

/// What the simulated channels carry: about a page in 3 us, which is how fast chunks are sent.
const BANDWIDTH: BytesPerSec = BytesPerSec(1_300_000_000);
/// The blackout that the owner accepts.
pub(crate) const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);

/// A process with a guest to give away.
#[derive(Debug)]
pub(crate) struct SourceHost {
    pub(crate) alive: bool,
    pub(crate) machine: Machine,
    /// Whether the owner wanted the guest to run before the migration.
    pub(crate) wanted: bool,
    pub(crate) protocol: Option<Source>,
    pub(crate) tracker: Option<Tracker>,
    /// Rises when the work for a round has to end.
    work: u64,
    /// When the last state was saved.
    pub(crate) saved_at: Option<Instant>,
    convergence: Convergence,
    round_began: Instant,
    round_sent: PageCount,
    channels_open: u16,
    /// The state of the stop under way was told, or will not be.
    state_done: bool,
    /// The next thing asked for fails.
    pub(crate) fails: bool,
    pub(crate) outcome: Option<SourceOutcome>,
    /// The first thing that was said of the first attempt's end.
    pub(crate) first_outcome: Option<SourceOutcome>,
}

/// A step of the source host's own work, done some time after it was asked for.
#[derive(Debug)]
pub(crate) enum SourceWork {
    /// Send a chunk, then the next.
    Chunk { work: u64, round: u32, chunk: u64, last: bool },
    /// Ask the policy.
    Decide,
    /// The policy's answer, after the rest that it wants.
    Decided(Decision),
    /// Stopping and saving was rehearsed.
    Rehearse,
    /// The last vCPU is out.
    Pause,
    /// All state is saved.
    Save,
    /// Memory is digested.
    Digest,
}

impl SourceHost {
    pub(crate) fn new(pages: usize, running: bool) -> SourceHost {
        SourceHost {
            alive: true,
            machine: Machine::booted(pages, running),
            wanted: running,
            protocol: None,
            tracker: None,
            work: 0,
            saved_at: None,
            convergence: Convergence::new(AutoConverge::Off),
            round_began: Instant::default(),
            round_sent: PageCount(0),
            channels_open: 0,
            state_done: true,
            fails: false,
            outcome: None,
            first_outcome: None,
        }
    }

    /// A new attempt: nothing of an earlier one may matter.
    pub(crate) fn begin(&mut self, protocol: Source) {
        self.tracker = Some(Tracker::new(self.machine.memory.len() as u64));
        self.protocol = Some(protocol);
        self.convergence = Convergence::new(AutoConverge::Off);
        self.channels_open = 0;
        self.outcome = None;
        self.fails = false;
    }

    pub(crate) fn phase(&self) -> Option<SourcePhase> {
        self.protocol.as_ref().map(Source::phase)
    }

    pub(crate) fn run_guest(&mut self, chance: &mut martlet_simulation::Chance) {
        if self.alive && self.machine.runs() {
            self.machine.run(chance, self.tracker.as_mut());
        }
    }
}

impl World {
    /// Tells the source's machine, and does what it then wants.
    pub(crate) fn tell_source(&mut self, event: SourceEvent) -> Result<(), Violation> {
        if !self.source.alive {
            return Ok(());
        }
        let now = self.queue.now();
        let Some(protocol) = &mut self.source.protocol else { return Ok(()) };
        let before = protocol.phase();
        protocol.on_event(now, event);
        let after = protocol.phase();
        if before != after {
            self.trace.line(now, format_args!("source {before:?} -> {after:?}"));
        }
        self.drain_source()
    }

    pub(crate) fn source_timer(&mut self) -> Result<(), Violation> {
        let now = self.queue.now();
        let Some(protocol) = &mut self.source.protocol else { return Ok(()) };
        if !self.source.alive || protocol.poll_timeout().is_none_or(|at| at > now) {
            return Ok(());
        }
        let before = protocol.phase();
        protocol.on_timeout(now);
        let after = protocol.phase();
        if before != after {
            self.trace.line(now, format_args!("source's time is up: {before:?} -> {after:?}"));
        }
        self.drain_source()
    }

    pub(crate) fn drain_source(&mut self) -> Result<(), Violation> {
        while let Some(action) = self.source.protocol.as_mut().and_then(Source::poll_action) {
            self.on_source_action(action)?;
        }
        let timeout = self.source.protocol.as_ref().and_then(Source::poll_timeout);
        if let Some(at) = timeout {
            self.queue.put_at(at.max(self.queue.now()), Event::SourceTimer);
        }
        Ok(())
    }

    fn on_source_action(&mut self, action: SourceAction) -> Result<(), Violation> {
        match action {
            SourceAction::Send(message) => self.send_control(Side::Destination, &message),
            SourceAction::OpenChannels { count, token } => {
                for channel in 0..count {
                    let hello = Payload::Hello { channel, token };
                    self.send(LinkId::Data(channel), Side::Destination, hello);
                }
            }
            SourceAction::RunRound { round } => self.begin_round(round, false),
            SourceAction::Decide => self.source_works(20, SourceWork::Decide),
            SourceAction::Rehearse => self.source_works(100, SourceWork::Rehearse),
            SourceAction::Pause => self.source_works(50, SourceWork::Pause),
            SourceAction::RunLastRound { round } => self.begin_round(round, true),
            SourceAction::SaveState => self.source_works(100, SourceWork::Save),
            SourceAction::ComputeDigest => self.source_works(300, SourceWork::Digest),
            SourceAction::Resume { permit, running } => return self.resume(permit, running),
            SourceAction::MovedAway(_) => {
                ensure(self.checker.moved, || "confirmed, but never started".to_owned())?;
            }
            SourceAction::Finish(outcome) => return self.source_finished(outcome),
        }
        Ok(())
    }

    /// Work that takes around this many microseconds.
    fn source_works(&mut self, micros: u64, work: SourceWork) {
        let time = Duration::from_nanos(self.chance.between(micros * 200, micros * 2_000));
        self.queue.put_after(time, Event::Source { attempt: self.attempt, work });
    }

    fn begin_round(&mut self, round: u32, last: bool) {
        self.source.work += 1;
        self.source.round_began = self.queue.now();
        self.source.round_sent = PageCount(0);
        self.source.state_done = !last;
        if let Some(tracker) = &mut self.source.tracker {
            tracker.sync();
        }
        let work = self.source.work;
        self.source_works(5, SourceWork::Chunk { work, round, chunk: 0, last });
    }

    pub(crate) fn on_source_work(&mut self, work: SourceWork) -> Result<(), Violation> {
        if !self.source.alive {
            return Ok(());
        }
        match work {
            SourceWork::Chunk { work, round, chunk, last } => {
                self.send_chunk(work, round, chunk, last)
            }
            SourceWork::Pause => self.pause(),
            work if core::mem::take(&mut self.source.fails) => {
                let reason = format!("{work:?} failed");
                self.tell_source(SourceEvent::HostFailed { reason })
            }
            SourceWork::Decide => {
                let (decision, rest) = self.decide()?;
                let work = SourceWork::Decided(decision);
                self.queue.put_after(rest, Event::Source { attempt: self.attempt, work });
                Ok(())
            }
            SourceWork::Decided(decision) => self.tell_source(SourceEvent::Decided(decision)),
            SourceWork::Rehearse => {
                let state = self.source.machine.state.to_le_bytes().to_vec();
                self.tell_source(SourceEvent::Rehearsed { state })
            }
            // The stop was called off, and nobody wants it any more.
            SourceWork::Save if self.source.state_done => Ok(()),
            SourceWork::Save => {
                self.source.saved_at = Some(self.queue.now());
                self.source.state_done = true;
                let bytes = self.source.machine.state.to_le_bytes().to_vec();
                self.tell_source(SourceEvent::StateSaved { bytes })
            }
            SourceWork::Digest => {
                let digest = self.source.machine.digest();
                self.tell_source(SourceEvent::OwnDigest(digest))
            }
        }
    }

    /// Mostly the real policy, on what was measured. Chance stops the guest early at times, so that
    /// there are pages left for the last round.
    fn decide(&mut self) -> Result<(Decision, Duration), Violation> {
        if self.chance.once_in(8) {
            return Ok((Decision::RehearseAgain, Duration::ZERO));
        }
        if self.chance.once_in(4) {
            return Ok((Decision::Switchover, Duration::ZERO));
        }
        let now = self.queue.now();
        let source = &mut self.source;
        let (Some(protocol), Some(tracker)) = (&source.protocol, &mut source.tracker) else {
            return Ok((Decision::Switchover, Duration::ZERO));
        };
        tracker.sync();
        let dirty = PageCount(tracker.dirty.count());
        let (rehearsed, round_trip) = (protocol.rehearsed(), protocol.round_trip());
        let (Some(rehearsed), Some(round_trip)) = (rehearsed, round_trip) else {
            let what = format!("asked to decide with {rehearsed:?} and {round_trip:?}");
            return Err(Violation { what });
        };
        let measured = Measurements {
            pause: Duration::from_micros(50),
            save: Duration::from_micros(100),
            sync: Duration::ZERO,
            dirty,
            bandwidth: BANDWIDTH,
            state: ByteCount(8),
            round_trip,
            load: Duration::from_nanos(rehearsed.load_ns),
            start: Duration::from_nanos(rehearsed.start_ns),
        };
        let result = RoundResult {
            sent: source.round_sent,
            dirty,
            duration: now.since(source.round_began),
            prediction: predict(&measured),
        };
        Ok(match source.convergence.after_round(&result, DOWNTIME_LIMIT) {
            martlet_policy::Decision::NextRound { rest, .. } => (Decision::NextRound, rest),
            martlet_policy::Decision::Switchover => (Decision::Switchover, Duration::ZERO),
        })
    }

    fn send_chunk(
        &mut self,
        work: u64,
        round: u32,
        chunk: u64,
        last: bool,
    ) -> Result<(), Violation> {
        if work != self.source.work {
            return Ok(());
        }
        // Once in a while the link is said to have become too slow for the stop.
        let (work, last) = if last && !self.source.state_done && self.chance.once_in(12) {
            self.source.state_done = true;
            self.tell_source(SourceEvent::CalledOff)?;
            (self.source.work, false)
        } else {
            (work, last)
        };
        let Some(tracker) = &mut self.source.tracker else { return Ok(()) };
        if core::mem::take(&mut self.source.fails) {
            let reason = "dirty tracking failed".to_owned();
            return self.tell_source(SourceEvent::HostFailed { reason });
        }
        let rearm_late = self.scenario.sabotage == Some(Sabotage::ReadBeforeRearm);
        let taken = tracker.take_chunk(chunk, !rearm_late);
        let read = |page: &u64| {
            let index = usize::try_from(*page).expect("small");
            (index, self.source.machine.memory[index])
        };
        let pages: Vec<(usize, u64)> = taken.iter().map(read).collect();
        self.source.round_sent.0 += pages.len() as u64;
        if rearm_late {
            self.source.run_guest(&mut self.chance);
            for page in taken {
                if let Some(tracker) = &mut self.source.tracker {
                    tracker.rearm(page);
                }
            }
        }
        let channels = u64::from(self.scenario.channels);
        if !pages.is_empty() {
            let channel = u16::try_from(chunk % channels).expect("a channel's number");
            self.send(LinkId::Data(channel), Side::Destination, Payload::Pages(pages));
        }
        let chunks = (self.scenario.pages as u64).div_ceil(CHUNK_PAGES);
        if chunk + 1 < chunks {
            self.source_works(3, SourceWork::Chunk { work, round, chunk: chunk + 1, last });
            return Ok(());
        }
        for channel in 0..self.scenario.channels {
            self.send(LinkId::Data(channel), Side::Destination, Payload::Barrier { round });
        }
        self.tell_source(if last {
            SourceEvent::LastRoundSent { round }
        } else {
            SourceEvent::RoundSent { round }
        })
    }

    fn pause(&mut self) -> Result<(), Violation> {
        if core::mem::take(&mut self.source.fails) {
            let reason = "a vCPU does not stop".to_owned();
            self.tell_source(SourceEvent::HostFailed { reason })?;
            if self.chance.coin() {
                // It was the pause itself, and the VMM has undone it.
                return Ok(());
            }
        }
        let running = self.source.machine.wanted;
        match self.source.machine.permit.take() {
            Some(permit) => self.tell_source(SourceEvent::Paused { permit, running }),
            None => ensure(false, || "asked to pause a guest that is not here".to_owned()),
        }
    }

    fn resume(&mut self, permit: RunPermit, running: bool) -> Result<(), Violation> {
        self.source.work += 1;
        let now = self.queue.now();
        self.trace.line(now, format_args!("source resumes, running {running}"));
        ensure(running == self.source.wanted, || {
            format!("resumed with running {running}, was {}", self.source.wanted)
        })?;
        self.source.machine.wanted =
            running || self.scenario.sabotage == Some(Sabotage::ForgetPaused);
        let before = self.source.machine.permit.replace(permit);
        ensure(before.is_none(), || "resumed with a second permit".to_owned())
    }

    fn source_finished(&mut self, outcome: SourceOutcome) -> Result<(), Violation> {
        let now = self.queue.now();
        self.trace.line(now, format_args!("source finished {outcome:?}"));
        self.source.work += 1;
        self.source.tracker = None;
        let moved = self.checker.moved;
        match &outcome {
            SourceOutcome::Completed { .. } => {
                ensure(moved, || "completed, but never started".to_owned())?;
            }
            SourceOutcome::Failed { reason } => {
                ensure(!moved, || format!("failed ({reason}), but started"))?;
            }
            SourceOutcome::GivenUp => {}
            SourceOutcome::Cancelled => {
                ensure(!moved, || "cancelled, but started".to_owned())?;
            }
            SourceOutcome::Undecided { .. } => {
                if self.source.outcome.is_none() {
                    self.ask_later();
                }
                match self.scenario.sabotage {
                    Some(Sabotage::ResumeWhenUndecided) => {
                        self.source.machine.permit = Some(RunPermit::for_new_guest());
                    }
                    Some(Sabotage::OperatorLies) => {
                        let by = OperatorOverride::RunHere(OperatorsWord::given_by_a_person());
                        self.tell_source(SourceEvent::Overridden { by, answer: None })?;
                        return Ok(());
                    }
                    _ => {}
                }
            }
        }
        self.source.first_outcome.get_or_insert_with(|| outcome.clone());
        self.source.outcome = Some(outcome);
        self.close_all(Side::Destination);
        Ok(())
    }

    fn ask_later(&mut self) {
        let wait = Duration::from_micros(1 << self.chance.between(6, 21));
        self.queue.put_after(wait, Event::Ask { attempt: self.attempt });
    }

    /// Something arrived at the source.
    pub(crate) fn source_receives(
        &mut self,
        link: LinkId,
        payload: Payload,
    ) -> Result<(), Violation> {
        match payload {
            Payload::Control(bytes) => {
                let message = crate::world::decode(&bytes)?;
                self.trace_arrival(Side::Source, &message);
                self.tell_source(SourceEvent::Received(message))
            }
            Payload::HelloAccepted => {
                self.source.channels_open += 1;
                if self.source.channels_open == self.scenario.channels {
                    return self.tell_source(SourceEvent::ChannelsConnected);
                }
                Ok(())
            }
            Payload::Lost => {
                let reason = format!("{link:?} was closed");
                self.tell_source(match link {
                    LinkId::Control => SourceEvent::ControlLost { reason },
                    LinkId::Data(_) => SourceEvent::ChannelLost { reason },
                })?;
                if link == LinkId::Control && self.source.phase() == Some(SourcePhase::Committing) {
                    self.ask_later();
                }
                Ok(())
            }
            Payload::Hello { .. } | Payload::Pages(_) | Payload::Barrier { .. } => {
                ensure(false, || format!("{payload:?} arrived at the source"))
            }
        }
    }
}
