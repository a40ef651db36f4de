//! The destination's process: the desk and the core that ship, who is let in, and who reads the
//! channels.

use crate::host_clock::HostClock;
use crate::machine::{Machine, Wrong};
use crate::net::{End, Net, Side, WireId};
use crate::world::{Event, Name};
use martlet_core::destination::{
    Attempt, AttemptConfig, Desk, DestinationIo, Event as CoreEvent, HostNow, Intake, Look, Next,
    RoundCount, Unheard,
};
use martlet_core::{DestinationVmm, Error, Fault};
use martlet_protocol::limits::SETUP_WAIT_MAX;
use martlet_protocol::{DestinationConfig, DestinationOutcome};
use martlet_ram::{GuestRam, Placer};
use martlet_transport::{
    Arrival, Connection, ControlLink, Greeting, PageReceiver, PagesReceiveError, ReceiveError,
};
use martlet_units::{ByteCount, Instant, PageRange};
use martlet_wire::control::{Control, Fate, InstanceId, Setup};
use martlet_wire::frame::{Kind, Reader};
use martlet_wire::hello::{Hello, HelloReply, Role, Status};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// Reads of a channel before whoever reads looks up.
const READS_AT_ONCE: usize = 64;

/// How long a second source waits for the first one's attempt to end.
const BUSY_GRACE: Duration = Duration::from_secs(1);

type Events = Rc<RefCell<VecDeque<CoreEvent>>>;
type End_ = End<Event>;

/// A process that takes a guest in.
pub(crate) struct Process {
    net: Rc<Net<Event>>,
    clock: HostClock,
    pub(crate) desk: Rc<RefCell<Desk>>,
    connections: Vec<Waiting>,
    run: Option<Run>,
    /// The machine of the newest attempt.
    pub(crate) machine: Option<Arc<Machine>>,
    wrong: Wrong,
    /// The first barrier of a round counts for all, by sabotage.
    first_barrier_counts: bool,
}

struct Waiting {
    speaking: Speaking,
    deadline: Instant,
}

enum Speaking {
    Greeting(Greeting, End_),
    Queueing(u16, End_),
    Introducing(ControlLink<End_>),
}

struct Run {
    attempt: Attempt,
    outside: Outside,
}

/// What an attempt acts through.
struct Outside {
    net: Rc<Net<Event>>,
    clock: HostClock,
    name: Name,
    desk: Rc<RefCell<Desk>>,
    control: ControlLink<End_>,
    events: Events,
    joined: Vec<Option<End_>>,
    channels: Option<Rc<RefCell<Channels>>>,
    first_barrier_counts: bool,
}

/// The channels of an attempt, read by their threads or by the attempt itself.
struct Channels {
    net: Rc<Net<Event>>,
    readings: Vec<Reading>,
    rounds: RoundCount,
    events: Events,
    taken_over: bool,
    bytes: u64,
    first_barrier_counts: bool,
    told: Option<u32>,
}

struct Reading {
    wire: WireId,
    receiver: PageReceiver<End_>,
    next_round: u32,
}

impl Channels {
    /// Reads a bounded part of what is there. Whether there may be more.
    fn drain(&mut self, index: usize) -> bool {
        for _ in 0..READS_AT_ONCE {
            let reading = &mut self.readings[index];
            if reading.receiver.is_finished() {
                return false;
            }
            let error = match reading.receiver.advance() {
                Ok(Arrival::Nothing) => return false,
                Ok(Arrival::Bytes(bytes)) => {
                    self.bytes += bytes.0;
                    continue;
                }
                Ok(Arrival::Barrier { round }) => {
                    let is_in = self.rounds.pass(reading.next_round, round);
                    reading.next_round = round.saturating_add(1);
                    match is_in {
                        Ok(is_in) => {
                            self.on_barrier(round, is_in);
                            continue;
                        }
                        Err(reason) => Error::new(Fault::Peer, "", reason),
                    }
                }
                Err(PagesReceiveError::Lost(page)) => {
                    Error::caused(Fault::Host, "receive guest memory", page)
                }
                Err(error) => Error::new(Fault::Peer, "", error.to_string()),
            };
            reading.receiver.finish();
            let last_barrier = reading.next_round.checked_sub(1);
            self.events.borrow_mut().push_back(CoreEvent::ChannelLost { last_barrier, error });
            return false;
        }
        true
    }

    fn on_barrier(&mut self, round: u32, is_in: bool) {
        let counts = if self.first_barrier_counts {
            self.told.is_none_or(|told| round > told)
        } else {
            is_in
        };
        if counts {
            self.told = Some(round);
            if self.first_barrier_counts {
                self.rounds.tell(round);
            }
            self.events.borrow_mut().push_back(CoreEvent::RoundReceived { round });
        }
    }
}

/// The channels as the attempt has them.
struct Open(Rc<RefCell<Channels>>);

impl Intake for Open {
    fn take_over(&mut self) {
        self.0.borrow_mut().taken_over = true;
    }

    fn give_back(&mut self) {
        let mut channels = self.0.borrow_mut();
        channels.taken_over = false;
        // Their threads look for themselves.
        for Reading { wire, .. } in &channels.readings {
            channels.net.put_after_about(5, Event::Arrival { wire: *wire, to: Side::Destination });
        }
    }

    fn look(&mut self) -> Look {
        let mut channels = self.0.borrow_mut();
        let before = channels.bytes;
        let events = channels.events.borrow().len();
        for index in 0..channels.readings.len() {
            channels.drain(index);
        }
        let is_idle = channels.bytes == before && channels.events.borrow().len() == events;
        if is_idle { Look::Idle } else { Look::Busy }
    }

    fn tell_round(&mut self, round: u32) {
        self.0.borrow_mut().rounds.tell(round);
    }

    fn bytes(&self) -> u64 {
        self.0.borrow().bytes
    }

    fn close(&mut self) {
        self.0.borrow_mut().readings.iter_mut().for_each(|reading| reading.receiver.finish());
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.borrow_mut().readings.clear();
    }
}

impl Process {
    /// A process that just started.
    pub(crate) fn new(
        net: &Rc<Net<Event>>,
        clock: HostClock,
        wrong: Wrong,
        first_barrier_counts: bool,
    ) -> Process {
        let instance = InstanceId(net.chance(martlet_simulation::Chance::name));
        Process {
            net: Rc::clone(net),
            clock,
            desk: Rc::new(RefCell::new(Desk::new(instance))),
            connections: Vec::new(),
            run: None,
            machine: None,
            wrong,
            first_barrier_counts,
        }
    }

    /// A connection came.
    pub(crate) fn accept(&mut self, end: End_) {
        let deadline = self.net.now().after(Duration::from_secs(10));
        let speaking = Speaking::Greeting(Greeting::default(), end);
        self.connections.push(Waiting { speaking, deadline });
    }

    pub(crate) fn stop(&mut self) {
        let told = self.desk.borrow_mut().stop();
        if told == martlet_core::destination::Stopping::TellAttempt
            && let Some(run) = &self.run
        {
            run.outside.events.borrow_mut().push_back(CoreEvent::Stop);
        }
    }

    /// Whether no attempt is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.run.is_none()
    }

    pub(crate) fn has_permit(&self) -> bool {
        self.machine.as_ref().is_some_and(|machine| machine.has_permit())
    }

    pub(crate) fn unsent(&self) -> usize {
        self.run.as_ref().map_or(0, |run| run.outside.control.unsent())
    }

    pub(crate) fn waiting_events(&self) -> usize {
        self.run.as_ref().map_or(0, |run| run.outside.events.borrow().len())
    }

    pub(crate) fn phase(&self) -> Option<martlet_protocol::DestinationPhase> {
        self.run.as_ref().map(|run| run.attempt.phase())
    }

    /// Something arrived on a channel: its thread reads it, unless the attempt does.
    pub(crate) fn read_channel(&mut self, wire: WireId) {
        let channels = self.run.as_ref().and_then(|run| run.outside.channels.as_ref());
        let Some(channels) = channels else { return };
        let mut channels = channels.borrow_mut();
        if channels.taken_over {
            return;
        }
        let index = channels.readings.iter().position(|reading| reading.wire == wire);
        if let Some(index) = index
            && channels.drain(index)
        {
            self.net.put_after_about(2, Event::Arrival { wire, to: Side::Destination });
        }
    }

    /// Takes in what came; when to step again at the latest.
    pub(crate) fn step(&mut self, name: Name) -> Option<Instant> {
        let mut at = self.receive_connections(name);
        if let Some(Run { attempt, outside }) = &mut self.run {
            let next = match attempt.step(outside) {
                Next::Again { idle: false } => Some(self.net.now().after(Duration::from_micros(1))),
                // Whatever comes wakes it.
                Next::Again { idle: true } => Some(self.net.now().after(Duration::from_millis(5))),
                Next::Wait { until, .. } => until.map(|at| self.clock.when(at)),
                Next::Over => {
                    self.end_attempt();
                    Some(self.net.now())
                }
            };
            at = [at, next].into_iter().flatten().min();
        }
        at
    }

    fn end_attempt(&mut self) {
        let Some(run) = self.run.take() else { return };
        let (outcome, ledger) = run.attempt.end();
        let error = match outcome {
            DestinationOutcome::Arrived => None,
            DestinationOutcome::Abandoned { reason } => Some(reason.to_string()),
        };
        self.desk.borrow_mut().end(ledger, error);
    }

    /// The connections that belong nowhere yet; when to look at them again at the latest.
    fn receive_connections(&mut self, name: Name) -> Option<Instant> {
        let now = self.net.now();
        for Waiting { speaking, deadline } in std::mem::take(&mut self.connections) {
            if now >= deadline && !matches!(speaking, Speaking::Queueing(..)) {
                continue;
            }
            match speaking {
                Speaking::Greeting(mut greeting, end) => match greeting.advance(&end) {
                    Ok(Some(hello)) => self.dispatch(&hello, end),
                    Ok(None) => {
                        let speaking = Speaking::Greeting(greeting, end);
                        self.connections.push(Waiting { speaking, deadline });
                    }
                    Err(_) => {}
                },
                Speaking::Queueing(version, end) => self.queue(version, end, deadline),
                Speaking::Introducing(mut link) => {
                    match link.try_receive_if(|kind| kind == Kind::SETUP) {
                        Ok(Some(Control::Setup(setup))) => self.begin(link, setup, name),
                        Ok(_) => {
                            let speaking = Speaking::Introducing(link);
                            self.connections.push(Waiting { speaking, deadline });
                        }
                        Err(_) => {}
                    }
                }
            }
        }
        self.connections.iter().map(|waiting| waiting.deadline).min()
    }

    fn dispatch(&mut self, hello: &Hello, end: End_) {
        let Ok(version) = hello.negotiate() else { return };
        if hello.role == Role::CONTROL {
            return self.queue(version, end, self.net.now().after(BUSY_GRACE));
        }
        let admitted = match hello.role {
            Role::DATA => self.desk.borrow_mut().admit_channel(hello),
            _ => Err(Status::ROLE),
        };
        let answer = match admitted {
            Ok(()) => HelloReply::accept(version),
            Err(status) => HelloReply::refuse(status),
        };
        let answered = end.write_now(&answer.to_bytes());
        if admitted.is_ok()
            && answered.is_ok()
            && let Some(run) = &mut self.run
        {
            run.outside.join(hello.channel, end);
        }
    }

    /// Lets a source in as soon as no other is served.
    fn queue(&mut self, version: u16, end: End_, deadline: Instant) {
        let now = self.net.now();
        let refusal = self.desk.borrow().refusal();
        let answer = match refusal {
            None => HelloReply::accept(version),
            Some(Status::BUSY) if now < deadline => {
                let speaking = Speaking::Queueing(version, end);
                return self.connections.push(Waiting { speaking, deadline });
            }
            Some(status) => HelloReply::refuse(status),
        };
        let answered = end.write_now(&answer.to_bytes());
        if refusal.is_none() && answered.is_ok() {
            let speaking = Speaking::Introducing(ControlLink::new(end, Reader::Destination));
            self.connections.push(Waiting { speaking, deadline: now.after(SETUP_WAIT_MAX) });
        }
    }

    fn begin(&mut self, control: ControlLink<End_>, setup: Setup, name: Name) {
        let Ok(ledger) = self.desk.borrow_mut().try_begin(setup.migration) else { return };
        let token = self.net.chance(martlet_simulation::Chance::name);
        let mut outside = Outside {
            net: Rc::clone(&self.net),
            clock: self.clock,
            name,
            desk: Rc::clone(&self.desk),
            control,
            events: Events::default(),
            joined: Vec::new(),
            channels: None,
            first_barrier_counts: self.first_barrier_counts,
        };
        let protocol = DestinationConfig { token, clock_key: None };
        let config = AttemptConfig { protocol, ledger, memory_max: ByteCount(1 << 30) };
        let attempt = Attempt::new(&mut outside, config, setup);
        self.run = Some(Run { attempt, outside });
    }

    /// The machine is built.
    pub(crate) fn build(&mut self, name: Name, layout: &[PageRange], fails: bool) {
        let Some(run) = self.run.as_ref().filter(|run| run.outside.name == name) else { return };
        let built: Result<Arc<dyn DestinationVmm>, Error> = if fails {
            Err(Error::vmm("build the machine", "not enough memory"))
        } else {
            let machine = Arc::new(Machine::waiting(self.net.clock(), layout, self.wrong));
            self.machine = Some(Arc::clone(&machine));
            Ok(machine)
        };
        run.outside.events.borrow_mut().push_back(CoreEvent::Built(built));
    }

    /// Its memory is digested.
    pub(crate) fn digest(&mut self, name: Name) {
        let Some(run) = self.run.as_ref().filter(|run| run.outside.name == name) else { return };
        let Some(machine) = &self.machine else { return };
        let digest = DestinationVmm::ram(&**machine).digest();
        let digest = digest.map_err(|e| Error::caused(Fault::Host, "digest guest memory", e));
        run.outside.events.borrow_mut().push_back(CoreEvent::Digested(digest));
    }
}

impl Outside {
    fn join(&mut self, channel: u16, end: End_) {
        if let Some(place) = self.joined.get_mut(usize::from(channel)) {
            *place = Some(end);
        }
        if self.joined.iter().all(Option::is_some) {
            self.events.borrow_mut().push_back(CoreEvent::ChannelsJoined);
        }
    }
}

impl DestinationIo for Outside {
    fn now(&self) -> Instant {
        self.clock.at(self.net.now())
    }

    fn host(&self) -> HostNow {
        HostNow { cpu: Duration::ZERO, wall_clock_ns: 0 }
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn take_event(&mut self) -> Option<CoreEvent> {
        self.events.borrow_mut().pop_front()
    }

    fn receive(&mut self, admits: &dyn Fn(Kind) -> bool) -> Result<Option<Control>, Unheard> {
        self.control.try_receive_if(admits).map_err(|error| {
            let said = Error::new(Fault::Peer, "", error.to_string());
            match error {
                ReceiveError::Protocol(_) => Unheard::Malformed(said),
                ReceiveError::Refused(kind) => Unheard::Refused(kind, said),
                _ => Unheard::Lost(said),
            }
        })
    }

    fn queue(&mut self, message: &Control) {
        self.control.queue(message);
    }

    fn flush(&mut self) -> Result<usize, Error> {
        match self.control.flush() {
            Ok(()) => Ok(self.control.unsent()),
            Err(error) => Err(Error::new(Fault::Peer, "", error.to_string())),
        }
    }

    fn build(&mut self, _: Setup, layout: Vec<PageRange>) {
        self.net.put_after_about(200, Event::Build { name: self.name, layout });
    }

    fn cancel_build(&mut self) {}

    fn await_channels(&mut self, count: u16, token: [u8; 16]) {
        self.joined = (0..count).map(|_| None).collect();
        self.desk.borrow_mut().await_channels(count, token);
    }

    fn open_intake(&mut self, ram: &Arc<GuestRam>) -> Result<Box<dyn Intake>, Error> {
        let placer = Arc::new(Placer::new(Arc::clone(ram)));
        let mut readings = Vec::new();
        for end in self.joined.drain(..).flatten() {
            let wire = end.wire();
            let receiver = PageReceiver::new(end, Arc::clone(&placer));
            let receiver = receiver.map_err(|e| Error::caused(Fault::Host, "open a channel", e))?;
            readings.push(Reading { wire, receiver, next_round: 0 });
            // What came before.
            self.net.put_at(self.net.now(), Event::Arrival { wire, to: Side::Destination });
        }
        let channels = Rc::new(RefCell::new(Channels {
            net: Rc::clone(&self.net),
            rounds: RoundCount::new(readings.len()),
            readings,
            events: Rc::clone(&self.events),
            taken_over: false,
            bytes: 0,
            first_barrier_counts: self.first_barrier_counts,
            told: None,
        }));
        self.channels = Some(Rc::clone(&channels));
        Ok(Box::new(Open(channels)))
    }

    fn drop_channels(&mut self) {
        self.desk.borrow_mut().drop_channels();
        self.joined.clear();
        self.channels = None;
    }

    fn digest(&mut self, _: &Arc<GuestRam>) {
        self.net.put_after_about(300, Event::Digest { name: self.name });
    }

    fn decide(&mut self, fate: Fate, _: Option<&Arc<dyn DestinationVmm>>) {
        self.desk.borrow_mut().decide(fate);
    }
}
