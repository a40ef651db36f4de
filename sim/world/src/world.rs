//! The world's course: steps, faults, attempts, and the end.

use crate::checker::{Checker, Violation, ensure};
use crate::destination_host::{DestinationHost, DestinationWork};
use crate::host_clock::HostClock;
use crate::link::{Cut, Link, LinkId, Side};
use crate::queue::Queue;
use crate::scenario::{Fault, START, Scenario, When};
use crate::source_host::{DOWNTIME_LIMIT, SourceHost, SourceWork};
use crate::trace::Trace;
use core::time::Duration;
use martlet_protocol::{
    OperatorOverride, OperatorsWord, Source, SourceConfig, SourceEvent, SourceOutcome, SourcePhase,
};
use martlet_simulation::Chance;
use martlet_units::Instant;
use martlet_wire::control::{Answer, BOOT_ID_UNTOLD, Control, Fate, MigrationId, Setup, WireRange};
use martlet_wire::frame;

/// Steps of the longest run that is still thought to end.
const STEPS_MAX: u64 = 50_000;
/// An attempt, however it is hurt, ends within this: a stall that lasts longer than every
/// deadline, and then each deadline of a phase once.
const ATTEMPT_MAX: Duration = Duration::from_secs(300);
/// An undecided attempt is settled within this, if the destination's process lives.
const SETTLE_SECONDS_MAX: u32 = 60;
/// What was still under way for an attempt has come to its end this long after it.
const CALM: Duration = Duration::from_secs(1);

/// What goes over a connection.
#[derive(Debug)]
pub(crate) enum Payload {
    /// A frame of the control connection, as bytes.
    Control(Vec<u8>),
    /// A data channel's first bytes.
    Hello { channel: u16, token: [u8; 16] },
    /// The answer to them.
    HelloAccepted,
    /// Page numbers and contents.
    Pages(Vec<(usize, u64)>),
    /// The end of a round.
    Barrier { round: u32 },
    /// The end of the connection.
    Lost,
}

/// What can happen next.
#[derive(Debug)]
pub(crate) enum Event {
    Arrive {
        attempt: u32,
        link: LinkId,
        to: Side,
        payload: Payload,
    },
    Source {
        attempt: u32,
        work: SourceWork,
    },
    Destination {
        attempt: u32,
        work: DestinationWork,
    },
    SourceTimer,
    DestinationTimer,
    /// What a connection held back may go on.
    Release {
        attempt: u32,
        link: LinkId,
        to: Side,
    },
    /// The source asks about its undecided attempt.
    Ask {
        attempt: u32,
    },
    /// The answer comes back.
    Answered {
        attempt: u32,
        answer: Answer,
    },
    /// A moment passes.
    Nothing,
}

/// Everything there is.
pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) chance: Chance,
    pub(crate) queue: Queue<Event>,
    pub(crate) trace: Trace,
    pub(crate) checker: Checker,
    pub(crate) source: SourceHost,
    /// The destination host's; the source's is the world's.
    pub(crate) clock: HostClock,
    pub(crate) destination: DestinationHost,
    /// Counts from 1; what belongs to an earlier one arrives nowhere.
    pub(crate) attempt: u32,
    migration: MigrationId,
    control: Link,
    data: Vec<Link>,
    /// What will yet go wrong in this attempt, and when that began.
    faults: Vec<(When, Fault)>,
    began: (Instant, u64),
    steps: u64,
}

/// How a run ended, when nothing was violated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Steps of the first attempt: what an exhaustive search counts.
    pub first_steps: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Equal for two runs only if they were equal in everything that was traced.
    pub hash: u64,
    /// How the first attempt ended at the source, before anybody asked; `None` if that died.
    pub first: Option<SourceOutcome>,
    /// Where the first attempt stood at the source when it ended or the source died.
    pub reached: SourcePhase,
    /// Whether the first attempt was undecided, and settled later.
    pub was_undecided: bool,
    /// How many attempts were made.
    pub attempts: u32,
    /// Whether the guest was lost with a process that held it.
    pub lost_with_host: bool,
}

/// Plays a scenario. The error is what went wrong; play it with [`run_traced`] to see how.
pub fn run(scenario: &Scenario) -> Result<Summary, Violation> {
    let mut world = World::new(scenario.clone(), false);
    world.play()
}

/// Plays a scenario and returns all that happened, line by line, too.
pub fn run_traced(scenario: &Scenario) -> (Result<Summary, Violation>, String) {
    let mut world = World::new(scenario.clone(), true);
    let result = world.play();
    (result, world.trace.text().to_owned())
}

/// Reads a control frame as the transport does.
pub(crate) fn decode(bytes: &[u8]) -> Result<Control, Violation> {
    let damaged = |what: String| Violation { what };
    let (head, body) =
        bytes.split_first_chunk().ok_or_else(|| damaged("a frame without header".to_owned()))?;
    let header = frame::FrameHeader::parse(head).map_err(|error| damaged(error.to_string()))?;
    Control::decode(header.kind(), body).map_err(|error| damaged(error.to_string()))
}

impl World {
    fn new(scenario: Scenario, keep_trace: bool) -> World {
        let mut chance = Chance::new(scenario.seed ^ 0x0077_6f72_6c64);
        let link = || Link::new(START, scenario.latency);
        World {
            queue: Queue::new(START),
            trace: Trace::new(keep_trace),
            checker: Checker::default(),
            source: SourceHost::new(scenario.pages, scenario.running),
            clock: HostClock::new(scenario.seed),
            destination: DestinationHost::new(&mut chance),
            attempt: 0,
            migration: MigrationId([0; 16]),
            control: link(),
            data: Vec::new(),
            faults: Vec::new(),
            began: (START, 0),
            steps: 0,
            chance,
            scenario,
        }
    }

    fn play(&mut self) -> Result<Summary, Violation> {
        // The guest has a past.
        for _ in 0..50 {
            self.source.run_guest(&mut self.chance);
        }
        let faults = core::mem::take(&mut self.scenario.faults);
        self.attempt_with(faults)?;
        let first_steps = self.steps;
        let reached = self.source.phase().unwrap_or(SourcePhase::SettingUp);
        let first = self.source.first_outcome.clone().filter(|_| self.source.alive);
        let was_undecided = matches!(first, Some(SourceOutcome::Undecided { .. }));
        self.settle()?;
        let again = core::mem::take(&mut self.scenario.faults_again);
        if self.stayed() && !again.is_empty() {
            self.prepare_another()?;
            self.attempt_with(again)?;
            self.settle()?;
        }
        if self.stayed() {
            self.last_attempt()?;
        }
        self.check_end()?;
        Ok(Summary {
            first_steps,
            steps: self.steps,
            hash: self.trace.hash(),
            first,
            reached,
            was_undecided,
            attempts: self.attempt,
            lost_with_host: self.checker.died,
        })
    }

    /// Whether the guest is at the source, which lives.
    fn stayed(&self) -> bool {
        self.source.alive && self.source.machine.permit.is_some()
    }

    /// One attempt, from its beginning until both sides are done with it or dead.
    fn attempt_with(&mut self, faults: Vec<(When, Fault)>) -> Result<(), Violation> {
        self.began = (self.queue.now(), self.steps);
        self.faults = faults;
        ensure(self.try_attempt()?, || "an idle destination refused".to_owned())?;
        self.run_attempt()?;
        self.faults.clear();
        Ok(())
    }

    /// Connects the source to the destination. `false` if that does not take it in now.
    fn try_attempt(&mut self) -> Result<bool, Violation> {
        let now = self.queue.now();
        if !self.destination.try_begin(self.clock.at(now), &mut self.chance) {
            return Ok(false);
        }
        self.attempt += 1;
        self.trace.line(now, format_args!("attempt {}", self.attempt));
        self.migration = MigrationId(self.chance.name());
        let latency = self.scenario.latency;
        self.control = Link::new(now, latency);
        self.data = (0..self.scenario.channels).map(|_| Link::new(now, latency)).collect();
        let setup = Setup {
            migration: self.migration,
            regions: vec![WireRange { start_gfn: 0, pages: self.scenario.pages as u64 }],
            machine: Vec::new(),
            channels: self.scenario.channels,
            boot_id: BOOT_ID_UNTOLD,
        };
        let downtime_limit = DOWNTIME_LIMIT;
        let config =
            SourceConfig { setup, clock_key: None, verify: self.scenario.verify, downtime_limit };
        self.source.begin(Source::new(now, config));
        self.drain_source()?;
        self.drain_destination()?;
        Ok(true)
    }

    /// Whether both machines are done, or dead.
    fn attempt_over(&self) -> bool {
        let source = !self.source.alive || self.source.phase().is_none_or(SourcePhase::is_over);
        let destination = !self.destination.alive
            || self.destination.phase().is_none_or(martlet_protocol::DestinationPhase::is_over);
        source && destination
    }

    fn run_attempt(&mut self) -> Result<(), Violation> {
        let limit = self.queue.now().after(ATTEMPT_MAX);
        while !self.attempt_over() {
            self.step()?;
            ensure(self.queue.now() <= limit && self.steps < STEPS_MAX, || {
                let (source, destination) = (self.source.phase(), self.destination.phase());
                format!("no end: source {source:?}, destination {destination:?}")
            })?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), Violation> {
        self.strike()?;
        self.source.run_guest(&mut self.chance);
        self.destination.run_guest(&mut self.chance);
        let Some(event) = self.queue.take() else {
            return ensure(self.attempt_over(), || {
                let (source, destination) = (self.source.phase(), self.destination.phase());
                format!("nothing left to happen: {source:?}, {destination:?}")
            });
        };
        self.steps += 1;
        let current = self.attempt;
        match event {
            Event::Arrive { attempt, link, to, payload } if attempt == current => {
                self.arrive(link, to, payload)?;
            }
            Event::Source { attempt, work } if attempt == current => self.on_source_work(work)?,
            Event::Destination { attempt, work } if attempt == current => {
                self.on_destination_work(work)?;
            }
            Event::Release { attempt, link, to } if attempt == current => self.release(link, to)?,
            Event::Ask { attempt } if attempt == current => self.ask()?,
            Event::Answered { attempt, answer } if attempt == current => {
                self.tell_source(SourceEvent::Fate(answer))?;
            }
            Event::SourceTimer => self.source_timer()?,
            Event::DestinationTimer => self.destination_timer()?,
            Event::Nothing
            | Event::Arrive { .. }
            | Event::Source { .. }
            | Event::Destination { .. }
            | Event::Release { .. }
            | Event::Ask { .. }
            | Event::Answered { .. } => {}
        }
        self.checker.after_step(&self.source, &self.destination)
    }

    fn hold(&mut self, id: LinkId, to: Side, time: Duration) {
        let (now, attempt) = (self.queue.now(), self.attempt);
        if let Some(at) = self.link(id).map(|link| link.hold(now, to, time)) {
            self.queue.put_at(at, Event::Release { attempt, link: id, to });
        }
    }

    /// Something comes to the end of its way.
    fn arrive(&mut self, id: LinkId, to: Side, payload: Payload) -> Result<(), Violation> {
        let now = self.queue.now();
        match self.link(id).and_then(|link| link.arrive(now, to, payload)) {
            Some(payload) => self.deliver(id, to, payload),
            None => Ok(()),
        }
    }

    fn release(&mut self, id: LinkId, to: Side) -> Result<(), Violation> {
        let now = self.queue.now();
        while let Some(payload) = self.link(id).and_then(|link| link.release(now, to)) {
            self.deliver(id, to, payload)?;
        }
        Ok(())
    }

    fn deliver(&mut self, id: LinkId, to: Side, payload: Payload) -> Result<(), Violation> {
        let told = matches!(payload, Payload::Lost);
        if !told && self.link(id).is_none_or(|link| !link.delivers(to)) {
            return Ok(());
        }
        match to {
            Side::Source if self.source.alive => self.source_receives(id, payload),
            Side::Destination if self.destination.alive => self.destination_receives(id, payload),
            Side::Source | Side::Destination => Ok(()),
        }
    }

    pub(crate) fn trace_arrival(&mut self, at: Side, message: &Control) {
        let now = self.queue.now();
        match message {
            Control::Ping(_) | Control::Pong(_) => {}
            message => self.trace.line(now, format_args!("{at:?} gets {}", message.kind())),
        }
    }

    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        match id {
            LinkId::Control => Some(&mut self.control),
            LinkId::Data(channel) => self.data.get_mut(usize::from(channel)),
        }
    }

    pub(crate) fn send(&mut self, id: LinkId, to: Side, payload: Payload) {
        let now = self.queue.now();
        let link = match id {
            LinkId::Control => Some(&mut self.control),
            LinkId::Data(channel) => self.data.get_mut(usize::from(channel)),
        };
        if let Some(at) = link.and_then(|link| link.send(now, to, &mut self.chance)) {
            self.queue.put_at(at, Event::Arrive { attempt: self.attempt, link: id, to, payload });
        }
    }

    pub(crate) fn send_control(&mut self, to: Side, message: &Control) {
        let mut bytes = Vec::new();
        frame::encode(message, &mut bytes).expect("the machines keep to the limits");
        self.send(LinkId::Control, to, Payload::Control(bytes));
    }

    fn link_ids(&self) -> impl Iterator<Item = LinkId> + use<> {
        core::iter::once(LinkId::Control).chain((0..self.scenario.channels).map(LinkId::Data))
    }

    /// The other end of all connections closes them; `to` notices after all that was sent.
    pub(crate) fn close_all(&mut self, to: Side) {
        for id in self.link_ids() {
            self.close(id, to);
        }
    }

    pub(crate) fn close(&mut self, id: LinkId, to: Side) {
        let now = self.queue.now();
        if let Some(at) = self.link(id).and_then(|link| link.close_towards(now, to)) {
            let attempt = self.attempt;
            self.queue.put_at(at, Event::Arrive { attempt, link: id, to, payload: Payload::Lost });
        }
    }

    /// Lets the faults that are due happen.
    fn strike(&mut self) -> Result<(), Violation> {
        let due = |when: &When| match *when {
            When::Time(time) => self.began.0.after(time) <= self.queue.now(),
            When::Step(step) => self.began.1 + step <= self.steps,
        };
        let (now, later): (Vec<_>, Vec<_>) =
            self.faults.iter().copied().partition(|(when, _)| due(when));
        if now.is_empty() {
            return Ok(());
        }
        self.faults = later;
        for (_, fault) in now {
            let at = self.queue.now();
            self.trace.line(at, format_args!("FAULT {fault:?}"));
            self.inflict(fault)?;
        }
        self.checker.after_step(&self.source, &self.destination)
    }

    fn inflict(&mut self, fault: Fault) -> Result<(), Violation> {
        let reason = "the owner wants it so".to_owned();
        match fault {
            Fault::Cut(id, cut) => {
                self.cut(id, cut);
                Ok(())
            }
            Fault::Stall(id, side, time) => {
                self.hold(id, side, time);
                Ok(())
            }
            Fault::Crash { side, delivered } => {
                self.crash(side, delivered);
                Ok(())
            }
            Fault::Cancel(Side::Source) => self.tell_source(SourceEvent::Cancel { reason }),
            Fault::Cancel(Side::Destination) => {
                let event = martlet_protocol::DestinationEvent::Cancel { reason };
                self.tell_destination(event)
            }
            Fault::Host(Side::Source) => {
                self.source.fails = true;
                Ok(())
            }
            Fault::Host(Side::Destination) => {
                self.destination.fails = true;
                Ok(())
            }
        }
    }

    fn cut(&mut self, id: LinkId, cut: Cut) {
        let sides = [Side::Source, Side::Destination];
        match cut {
            Cut::Reset { delivered } => {
                for side in sides {
                    self.close(id, side);
                    if let (false, Some(link)) = (delivered, self.link(id)) {
                        link.silence(side);
                    }
                }
            }
            Cut::ResetLate { slow, by } => {
                for side in sides {
                    self.close(id, side);
                }
                self.hold(id, slow, by);
            }
            Cut::SilentTowards(side) => {
                if let Some(link) = self.link(id) {
                    link.silence(side);
                }
            }
            Cut::SilentBothWays => {
                for side in sides {
                    if let Some(link) = self.link(id) {
                        link.silence(side);
                    }
                }
            }
        }
    }

    fn crash(&mut self, side: Side, delivered: bool) {
        for id in self.link_ids() {
            self.close(id, side.peer());
            if let (false, Some(link)) = (delivered, self.link(id)) {
                link.silence(side.peer());
            }
        }
        match side {
            Side::Source if self.source.alive => {
                self.source.alive = false;
                // Unless it had given the right away, the guest dies with it.
                self.source.machine.permit = None;
            }
            Side::Destination if self.destination.alive => {
                self.checker.died |= self.destination.permit_holders() > 0;
                self.destination.alive = false;
            }
            Side::Source | Side::Destination => {}
        }
    }

    /// Asks the destination, on a connection that works, what became of an undecided attempt. It
    /// may still be under way there: the commit may lie in a queue. The answer takes its time, so
    /// it may be old when it comes.
    pub(crate) fn ask(&mut self) -> Result<(), Violation> {
        let attempt = self.attempt;
        let in_doubt = [SourcePhase::Committing, SourcePhase::Undecided];
        if !self.source.phase().is_some_and(|phase| in_doubt.contains(&phase)) {
            return Ok(());
        }
        // No answer means that the process is gone.
        let Some(answer) = self.destination.answer(self.migration) else { return Ok(()) };
        let now = self.queue.now();
        self.trace.line(now, format_args!("asked: {:?}", answer.fate));
        let knows = answer.fate != Fate::Unknown;
        ensure(knows, || "the destination does not remember the attempt".to_owned())?;
        let way = Duration::from_nanos(self.chance.between(50_000, 5_000_000));
        self.queue.put_after(way, Event::Answered { attempt, answer });
        let pause = Duration::from_micros(1 << self.chance.between(10, 20));
        self.queue.put_after(pause, Event::Ask { attempt });
        Ok(())
    }

    /// Waits until an attempt, if it is undecided, is settled by asking.
    fn settle(&mut self) -> Result<(), Violation> {
        if !self.source.alive {
            return Ok(());
        }
        for _ in 0..SETTLE_SECONDS_MAX {
            if self.source.phase() != Some(SourcePhase::Undecided) {
                return Ok(());
            }
            if !self.destination.alive {
                break;
            }
            let next = self.queue.now().after(Duration::from_secs(1));
            self.pass_until(next)?;
        }
        ensure(!self.destination.alive, || "asked in vain".to_owned())?;
        // The process is gone. The one that listens in its place knows nothing, and says so; that
        // must settle nothing.
        self.destination = DestinationHost::new(&mut self.chance);
        let answer = self.destination.answer(self.migration).expect("it lives");
        self.tell_source(SourceEvent::Fate(answer))?;
        ensure(self.source.phase() == Some(SourcePhase::Undecided), || {
            "another process's word was believed".to_owned()
        })?;
        self.operator_decides(answer)
    }

    /// Nobody can prove anything any more, so in some of the runs a person decides. The process
    /// that had the commit is dead, so whatever they say is true.
    fn operator_decides(&mut self, answer: Answer) -> Result<(), Violation> {
        let word = OperatorsWord::given_by_a_person();
        let (by, phase) = match self.chance.below(3) {
            0 => (OperatorOverride::RunHere(word), SourcePhase::Failed),
            1 => (OperatorOverride::GiveUp(word), SourcePhase::GivenUp),
            _ => return Ok(()),
        };
        if phase == SourcePhase::Failed {
            // The copy that may have run there died with its process. The next attempt has a
            // process of its own, which nothing of this one reaches.
            self.destination.alive = false;
            (self.checker.moved, self.checker.died) = (false, false);
        }
        let answer = self.chance.coin().then_some(answer);
        self.tell_source(SourceEvent::Overridden { by, answer })?;
        ensure(self.source.phase() == Some(phase), || {
            format!("the operator's word led to {:?}", self.source.phase())
        })?;
        ensure(self.stayed() == (phase == SourcePhase::Failed), || {
            format!("the guest's permit after {phase:?} is where it should not be")
        })
    }

    /// Lets happen what happens until then.
    fn pass_until(&mut self, until: Instant) -> Result<(), Violation> {
        self.queue.put_at(until, Event::Nothing);
        while self.queue.now() < until {
            self.step()?;
        }
        Ok(())
    }

    /// The guest stayed and is to be moved once more, to a process that lives.
    fn prepare_another(&mut self) -> Result<(), Violation> {
        let wanted = self.source.machine.wanted;
        ensure(wanted == self.scenario.running, || format!("the guest's running became {wanted}"))?;
        // What a host still had to do for the attempt before comes to its end.
        let calm = self.queue.now().after(CALM);
        self.pass_until(calm)?;
        if !self.destination.alive {
            self.destination = DestinationHost::new(&mut self.chance);
        }
        Ok(())
    }

    /// The guest stayed, so it is moved now: nothing goes wrong any more.
    fn last_attempt(&mut self) -> Result<(), Violation> {
        self.prepare_another()?;
        self.attempt_with(Vec::new())?;
        let outcome = self.source.outcome.clone();
        ensure(matches!(outcome, Some(SourceOutcome::Completed { .. })), || {
            format!("the last attempt ended with {outcome:?}")
        })
    }

    /// What must hold when nothing more happens.
    fn check_end(&mut self) -> Result<(), Violation> {
        let here = self.source.machine.permit.is_some();
        let there = self.destination.permit_holders() == 1;
        if self.checker.moved {
            ensure(there || self.checker.died, || "the moved guest is nowhere".to_owned())?;
        } else if self.source.alive {
            // It stayed, or nobody knows because the destination's process is gone.
            let phase = self.source.phase();
            let is_open = matches!(phase, Some(SourcePhase::Undecided | SourcePhase::GivenUp));
            ensure(here || is_open, || "the guest that stayed is nowhere".to_owned())?;
        } else {
            // It died with the source; the destination has nothing and says so.
            ensure(!there, || "a guest from nowhere".to_owned())?;
            let fate = self.destination.answer(self.migration).map(|answer| answer.fate);
            let said = matches!(fate, None | Some(Fate::Abandoned | Fate::Unknown));
            ensure(said, || format!("the guest is not there, but {fate:?} is answered"))?;
        }
        let runs = self.destination.machine.as_ref().is_some_and(crate::guest::Machine::runs);
        ensure(!there || runs == self.scenario.running, || format!("runs at the end: {runs}"))
    }
}
