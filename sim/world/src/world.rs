//! The world's course: steps, faults, attempts, the end, and what must hold.

use crate::destination::Process;
use crate::host_clock::HostClock;
use crate::machine::{self, Machine, Wrong};
use crate::net::{End, FromWire, Net, Side, WireId};
use crate::scenario::{Fault, START, Sabotage, Scenario, When};
use crate::source::Run;
use crate::trace::Trace;
use crate::violation::{Violation, ensure};
use martlet_core::source::{Event as SourceEvent, Work};
use martlet_core::{Error, Status};
use martlet_protocol::{OperatorOverride, OperatorsWord};
use martlet_simulation::Chance;
use martlet_units::{Instant, PageRange};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Steps of the longest run that is still thought to end.
const STEPS_MAX: u64 = 400_000;

/// A link of one byte a second is slow and not dead: the owner waits so long ...
const PATIENT_MAX: Duration = Duration::from_secs(150);

/// ... and an attempt, however it is hurt, ends within this: a stall that lasts longer than every
/// deadline, and then each deadline of a phase once.
const ATTEMPT_MAX: Duration = Duration::from_secs(300);

/// An undecided attempt is settled within this, if the destination's process lives.
const SETTLE_MAX: Duration = Duration::from_secs(90);

/// What a process said before it died has arrived this long after it, even on a link of one byte a
/// second.
const LATE_WORDS_MAX: Duration = Duration::from_secs(1_200);

/// What was still under way for an attempt has come to its end this long after it.
const CALM: Duration = Duration::from_secs(12);

/// An attempt's number, from 1.
pub(crate) type Name = u32;

/// What can happen next.
pub(crate) enum Event {
    /// Something can be read.
    Arrival { wire: WireId, to: Side },
    /// There is room to write, or a lane goes on.
    Room { wire: WireId, from: Side },
    /// A process gets to run.
    Step { side: Side, number: u64 },
    /// The destination's listener gets a connection.
    Connected { end: End<Event> },
    /// What the source does aside is done.
    SourceWork { name: Name, work: Work },
    /// The destination's machine is built.
    Build { name: Name, layout: Vec<PageRange> },
    /// The destination's memory is digested.
    Digest { name: Name },
    /// A moment passes.
    Nothing,
}

impl FromWire for Event {
    fn arrival(wire: WireId, to: Side) -> Event {
        Event::Arrival { wire, to }
    }

    fn room(wire: WireId, from: Side) -> Event {
        Event::Room { wire, from }
    }
}

/// When a process runs next.
#[derive(Default)]
pub(crate) struct Turn {
    pub(crate) at: Option<Instant>,
    pub(crate) number: u64,
    pub(crate) frozen_until: Instant,
}

/// Everything there is.
pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) net: Rc<Net<Event>>,
    pub(crate) trace: Trace,
    pub(crate) source_lives: bool,
    pub(crate) machine: Arc<Machine>,
    pub(crate) run: Option<Run>,
    pub(crate) destination: Process,
    pub(crate) destination_lives: bool,
    pub(crate) clock: HostClock,
    pub(crate) turns: [Turn; 2],
    pub(crate) attempt: Name,
    /// What will yet go wrong in this attempt, and when that began.
    pub(crate) faults: Vec<(When, Fault)>,
    pub(crate) began: (Instant, u64),
    pub(crate) steps: u64,
    /// Connections of somebody else.
    pub(crate) others: Vec<End<Event>>,
    /// The guest was started at a destination, whose process then died.
    pub(crate) moved: bool,
    pub(crate) died: bool,
    pub(crate) has_lied: bool,
    pub(crate) last_status: Option<Status>,
}

/// How a run ended, when nothing was violated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Steps of the first attempt: what an exhaustive search counts.
    pub first_steps: u64,
    /// The step at which its commit was sent, if it was.
    pub commit_step: Option<u64>,
    /// Steps of the whole run.
    pub steps: u64,
    /// Equal for two runs only if they were equal in everything that was traced.
    pub hash: u64,
    /// How the first attempt ended at the source, before anybody asked; `None` if that died.
    pub first: Option<Status>,
    /// Whether the first attempt was undecided, and settled later.
    pub was_undecided: bool,
    /// How many attempts were made.
    pub attempts: u32,
    /// Whether the guest was lost with a process that held it.
    pub lost_with_host: bool,
}

/// Plays a scenario. The error is what went wrong; play it with [`run_traced`] to see how.
pub fn run(scenario: &Scenario) -> Result<Summary, Violation> {
    World::new(scenario.clone(), false).play()
}

/// Plays a scenario and returns all that happened, line by line, too.
pub fn run_traced(scenario: &Scenario) -> (Result<Summary, Violation>, String) {
    let mut world = World::new(scenario.clone(), true);
    let result = world.play();
    (result, world.trace.text().to_owned())
}

impl Drop for World {
    fn drop(&mut self) {
        // Ends of connections that wait in the queue hold the net that holds them.
        self.run = None;
        self.others.clear();
        while self.net.take().is_some() {}
    }
}

impl World {
    fn new(scenario: Scenario, keep_trace: bool) -> World {
        let chance = Chance::new(scenario.seed ^ 0x0077_6f72_6c64);
        let net = Rc::new(Net::new(START, chance, scenario.latency, scenario.buffer));
        let wrong = Wrong {
            late_rearm: scenario.sabotage == Some(Sabotage::ReadBeforeRearm),
            keep_rehearsed: scenario.sabotage == Some(Sabotage::KeepRehearsedState),
            forget_paused: scenario.sabotage == Some(Sabotage::ForgetPaused),
        };
        let layout = machine::layout(&scenario.regions);
        let machine = Machine::booted(net.clock(), &layout, wrong, scenario.running);
        let clock = HostClock::new(scenario.seed);
        let first_barrier = scenario.sabotage == Some(Sabotage::FirstBarrierCounts);
        World {
            destination: Process::new(&net, clock, wrong, first_barrier),
            scenario,
            net,
            trace: Trace::new(keep_trace),
            source_lives: true,
            machine: Arc::new(machine),
            run: None,
            destination_lives: true,
            clock,
            turns: [Turn::default(), Turn::default()],
            attempt: 0,
            faults: Vec::new(),
            began: (START, 0),
            steps: 0,
            others: Vec::new(),
            moved: false,
            died: false,
            has_lied: false,
            last_status: None,
        }
    }

    fn play(&mut self) -> Result<Summary, Violation> {
        // The guest has a past.
        for _ in 0..30 {
            self.net.chance(|chance| self.machine.run(chance));
        }
        let faults = std::mem::take(&mut self.scenario.faults);
        let commit_step = self.attempt_with(faults)?;
        let first_steps = self.steps;
        let first = self.run.as_ref().map(Run::status).filter(|_| self.source_lives);
        let was_undecided = first == Some(Status::Undecided);
        self.settle()?;
        let again = std::mem::take(&mut self.scenario.faults_again);
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
            commit_step,
            steps: self.steps,
            hash: self.trace.hash(),
            first,
            was_undecided,
            attempts: self.attempt,
            lost_with_host: self.died,
        })
    }

    pub(crate) fn now(&self) -> Instant {
        self.net.now()
    }

    /// Whether the guest is at the source, which lives.
    pub(crate) fn stayed(&self) -> bool {
        self.source_lives && self.machine.has_permit()
    }

    /// One attempt, from its beginning until both sides are done with it or dead. When its commit
    /// was sent.
    fn attempt_with(&mut self, faults: Vec<(When, Fault)>) -> Result<Option<u64>, Violation> {
        self.began = (self.now(), self.steps);
        self.faults = faults;
        self.attempt += 1;
        let now = self.now();
        self.trace.line(now, format_args!("attempt {}", self.attempt));
        let Scenario { channels, verify, .. } = self.scenario;
        let (run, far) = Run::begin(&self.net, &self.machine, channels, verify);
        self.run = Some(run);
        self.net.put_at(now, Event::Connected { end: far });
        self.wake(Side::Source);
        let limit = now.after(ATTEMPT_MAX);
        let mut commit_step = None;
        while !self.attempt_over() {
            self.step()?;
            let committed =
                |run: &Run| run.outside.as_ref().is_some_and(|outside| outside.has_committed);
            if commit_step.is_none() && self.run.as_ref().is_some_and(committed) {
                commit_step = Some(self.steps - self.began.1);
            }
            if self.now() > now.after(PATIENT_MAX)
                && let Some(run) = &mut self.run
            {
                run.cancel(self.net.now());
            }
            ensure(self.now() <= limit && self.steps < STEPS_MAX, || {
                let status = self.run.as_ref().map(Run::status);
                let phase = self.destination.phase();
                let now = self.now();
                format!("no end after {} steps at {now:?}: {status:?}, {phase:?}", self.steps)
            })?;
        }
        self.faults.clear();
        Ok(commit_step)
    }

    /// Whether both sides are done, or dead.
    fn attempt_over(&self) -> bool {
        let source = !self.source_lives || self.run.as_ref().is_none_or(Run::has_ended);
        source && (!self.destination_lives || self.destination.is_idle())
    }

    pub(crate) fn turn(&mut self, side: Side) -> &mut Turn {
        &mut self.turns[usize::from(side == Side::Destination)]
    }

    /// A process gets to run soon.
    pub(crate) fn wake(&mut self, side: Side) {
        let soon = self.net.chance(|chance| chance.between(300, 15_000));
        self.wake_at(side, self.now().after(Duration::from_nanos(soon)));
    }

    pub(crate) fn wake_at(&mut self, side: Side, at: Instant) {
        let at = at.max(self.now());
        let turn = self.turn(side);
        let at = at.max(turn.frozen_until);
        if turn.at.is_some_and(|planned| planned <= at) {
            return;
        }
        turn.number += 1;
        turn.at = Some(at);
        let number = turn.number;
        self.net.put_at(at, Event::Step { side, number });
    }

    fn step(&mut self) -> Result<(), Violation> {
        self.strike()?;
        let Some(event) = self.net.take() else {
            return ensure(self.attempt_over(), || "nothing left to happen".to_owned());
        };
        self.steps += 1;
        self.run_guests();
        match event {
            Event::Arrival { wire, to } => self.on_arrival(wire, to),
            Event::Room { wire, from } => self.on_room(wire, from),
            Event::Step { side, number } => self.on_step(side, number),
            Event::Connected { end } => {
                if self.destination_lives {
                    self.destination.accept(end);
                    self.wake(Side::Destination);
                }
            }
            Event::SourceWork { name, work } => self.on_source_work(name, work),
            Event::Build { name, layout } => {
                let machine = self.destination.machine.as_ref();
                let fails = machine.is_some_and(|machine| machine.take_failure());
                if self.destination_lives {
                    self.destination.build(name, &layout, fails);
                    self.wake(Side::Destination);
                }
            }
            Event::Digest { name } => {
                if self.destination_lives {
                    self.destination.digest(name);
                    self.wake(Side::Destination);
                }
            }
            Event::Nothing => {}
        }
        self.check_step()
    }

    fn is_frozen(&self, side: Side) -> bool {
        self.now() < self.turns[usize::from(side == Side::Destination)].frozen_until
    }

    fn on_arrival(&mut self, wire: WireId, to: Side) {
        if self.is_frozen(to) {
            // It is looked at when the process gets to run again.
            let at = self.turn(to).frozen_until;
            return self.net.put_at(at, Event::Arrival { wire, to });
        }
        if to == Side::Destination && self.destination_lives {
            self.destination.read_channel(wire);
        }
        self.wake(to);
    }

    fn on_room(&mut self, wire: WireId, from: Side) {
        if self.is_frozen(from) {
            let at = self.turn(from).frozen_until;
            return self.net.put_at(at, Event::Room { wire, from });
        }
        if from == Side::Source
            && self.source_lives
            && let Some(run) = &mut self.run
        {
            run.pump(&self.net, wire);
        }
        self.wake(from);
    }

    fn on_step(&mut self, side: Side, number: u64) {
        let turn = self.turn(side);
        if turn.number != number {
            return;
        }
        turn.at = None;
        let name = self.attempt;
        let next = match side {
            Side::Source if self.source_lives => {
                let run = self.run.as_mut();
                run.and_then(|run| run.step(&self.net, &self.machine, name))
            }
            Side::Destination if self.destination_lives => self.destination.step(name),
            Side::Source | Side::Destination => None,
        };
        if let Some(at) = next {
            self.wake_at(side, at);
        }
    }

    fn on_source_work(&mut self, name: Name, work: Work) {
        if !self.source_lives || name != self.attempt {
            return;
        }
        let Some(run) = &mut self.run else { return };
        if let Work::Ask = work {
            // No answer means that the process is gone, or that an operator says so.
            let is_told =
                self.destination_lives && self.scenario.sabotage != Some(Sabotage::OperatorLies);
            let answer = if is_told {
                Ok(self.destination.desk.borrow().answer(run.migration))
            } else {
                Err(Error::new(martlet_core::Fault::Peer, "ask the destination", "nobody is there"))
            };
            run.tell(SourceEvent::Asked(answer));
        } else {
            run.finish_work(&self.machine, work);
        }
        self.wake(Side::Source);
    }

    /// Both guests run for a moment, if they do.
    fn run_guests(&mut self) {
        self.net.chance(|chance| {
            if self.source_lives && chance.once_in(2) {
                self.machine.run(chance);
            }
            if let Some(machine) =
                self.destination.machine.as_ref().filter(|_| self.destination_lives)
            {
                machine.run(chance);
            }
        });
    }

    /// What is built wrongly does its harm once it can.
    pub(crate) fn lie(&mut self) -> Result<(), Violation> {
        let status = self.run.as_ref().map(Run::status);
        if status != Some(Status::Undecided) || self.has_lied || !self.source_lives {
            return Ok(());
        }
        match self.scenario.sabotage {
            Some(Sabotage::ResumeWhenUndecided) => self.machine.forge_permit(),
            Some(Sabotage::OperatorLies) => {
                self.override_by(OperatorOverride::RunHere(OperatorsWord::given_by_a_person()));
            }
            _ => return Ok(()),
        }
        self.has_lied = true;
        Ok(())
    }

    fn override_by(&mut self, by: OperatorOverride) {
        if let Some(run) = &mut self.run {
            run.tell(SourceEvent::Override(by));
        }
        self.wake(Side::Source);
    }

    pub(crate) fn is_undecided(&self) -> bool {
        self.source_lives && self.run.as_ref().map(Run::status) == Some(Status::Undecided)
    }

    /// Waits until an attempt, if it is undecided, is settled by its own questions.
    fn settle(&mut self) -> Result<(), Violation> {
        let until = self.now().after(SETTLE_MAX);
        while self.is_undecided() && self.destination_lives && self.now() < until {
            self.pass_until(self.now().after(Duration::from_secs(1)))?;
        }
        if !self.is_undecided() {
            return Ok(());
        }
        ensure(!self.destination_lives, || "asked in vain".to_owned())?;
        // What it had said may still be on its way.
        self.pass_until(self.now().after(LATE_WORDS_MAX))?;
        if !self.is_undecided() {
            return Ok(());
        }
        // The process is gone. The one that listens in its place knows nothing, and says so; that
        // must settle nothing.
        self.restart_destination();
        self.pass_until(self.now().after(Duration::from_secs(25)))?;
        ensure(self.is_undecided(), || "another process's word was believed".to_owned())?;
        self.operator_decides()
    }

    /// Nobody can prove anything any more, so in some of the runs a person decides. The process
    /// that had the commit is dead, so whatever they say is true.
    fn operator_decides(&mut self) -> Result<(), Violation> {
        let word = OperatorsWord::given_by_a_person();
        let (by, status) = match self.net.chance(|chance| chance.below(3)) {
            0 => (OperatorOverride::RunHere(word), Status::Failed),
            1 => (OperatorOverride::GiveUp(word), Status::GivenUp),
            _ => return Ok(()),
        };
        if status == Status::Failed {
            // The copy that may have run there died with its process.
            (self.moved, self.died) = (false, false);
        }
        self.override_by(by);
        self.pass_until(self.now().after(Duration::from_secs(30)))?;
        let now = self.run.as_ref().map(Run::status);
        ensure(now == Some(status), || format!("the operator's word led to {now:?}"))?;
        ensure(self.stayed() == (status == Status::Failed), || {
            format!("the guest's permit after {status:?} is where it should not be")
        })
    }

    /// Lets happen what happens until then.
    fn pass_until(&mut self, until: Instant) -> Result<(), Violation> {
        self.net.put_at(until, Event::Nothing);
        while self.now() < until {
            self.step()?;
        }
        Ok(())
    }

    /// The guest stayed and is to be moved once more, to a process that lives.
    fn prepare_another(&mut self) -> Result<(), Violation> {
        let wanted = self.machine.wanted();
        ensure(wanted == self.scenario.running, || format!("the guest's running became {wanted}"))?;
        ensure(self.machine.goes_on(), || {
            "the guest that stayed is still tracked or half stopped".to_owned()
        })?;
        self.machine.heal();
        self.others.clear();
        let thawed = self.turns[0].frozen_until.max(self.turns[1].frozen_until);
        // What a host still had to do for the attempt before comes to its end.
        self.pass_until(self.now().max(thawed).after(CALM))?;
        if !self.destination_lives || self.destination.desk.borrow().is_closed() {
            self.restart_destination();
        }
        if let Some(machine) = &self.destination.machine {
            machine.heal();
        }
        Ok(())
    }

    /// The guest stayed, so it is moved now: nothing goes wrong any more.
    fn last_attempt(&mut self) -> Result<(), Violation> {
        self.prepare_another()?;
        self.attempt_with(Vec::new())?;
        let run = self.run.as_ref();
        let status = run.map(Run::status);
        ensure(status == Some(Status::Completed), || {
            let ended = run.and_then(|run| run.outside.as_ref()?.ended.as_ref());
            let error = ended.and_then(|ended| ended.report.error.as_ref());
            format!("the last attempt ended with {status:?}: {error:?}")
        })
    }

    /// Another process in the dead one's place.
    fn restart_destination(&mut self) {
        let first_barrier = self.scenario.sabotage == Some(Sabotage::FirstBarrierCounts);
        let wrong = Wrong {
            keep_rehearsed: self.scenario.sabotage == Some(Sabotage::KeepRehearsedState),
            ..Wrong::default()
        };
        self.destination = Process::new(&self.net, self.clock, wrong, first_barrier);
        self.destination_lives = true;
        self.turn(Side::Destination).frozen_until = self.now();
    }
}
