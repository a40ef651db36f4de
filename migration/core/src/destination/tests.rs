//! The attempt, driven by a script in virtual time.

use super::*;
use crate::{DestinationVmm, Error, Fault, GuestObserver, LoadFor, RunState};
use martlet_protocol::{
    DestinationConfig, DestinationOutcome, DestinationPhase, Ledger, RunPermit,
};
use martlet_ram::GuestRam;
use martlet_units::{ByteCount, Gfn, Instant, PageCount, PageRange};
use martlet_wire::control::{
    Commit, Control, Fate, InstanceId, MigrationId, Ping, Setup, State, SwitchoverSoon, WireRange,
};
use martlet_wire::frame::Kind;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

const ID: MigrationId = MigrationId([5; 16]);
const PAGES: u64 = 4;
const T0: Instant = Instant(1_000_000_000);

/// What was asked for, in its order.
type Log = Rc<RefCell<Vec<String>>>;

/// What panics while the guest is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PanicsIn {
    Nothing,
    Close,
    /// With the vCPUs running.
    Start,
    Resume,
}

struct Vmm {
    ram: Arc<GuestRam>,
    started: Mutex<Option<(RunPermit, RunState)>>,
    resumes: AtomicU32,
    panics_in: PanicsIn,
}

impl DestinationVmm for Vmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn load_state(&self, state: &[u8], _: LoadFor) -> Result<(), Error> {
        if state.is_empty() {
            return Err(Error::vmm("load the state", "there is none"));
        }
        Ok(())
    }

    fn arm(&self, _: Duration) {}

    fn start(&self, permit: RunPermit, state: RunState) {
        let before = self.started.lock().unwrap().replace((permit, state));
        assert!(before.is_none(), "one guest, one start");
        assert_ne!(self.panics_in, PanicsIn::Start, "a test wants it");
    }

    fn begin_resume(&self, _: &Waker) {
        self.resumes.fetch_add(1, Ordering::Relaxed);
        assert_ne!(self.panics_in, PanicsIn::Resume, "a test wants it");
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        Some(self)
    }
}

impl GuestObserver for Vmm {
    fn report(&self) -> Vec<u8> {
        b"alive".to_vec()
    }

    fn has_seen_all(&self) -> bool {
        self.started.lock().unwrap().is_some()
    }
}

struct FakeIntake {
    log: Log,
    panics: bool,
}

impl Intake for FakeIntake {
    fn take_over(&mut self) {
        self.log.borrow_mut().push("take over".to_owned());
    }

    fn give_back(&mut self) {}

    fn look(&mut self) -> Look {
        Look::Idle
    }

    fn tell_round(&mut self, round: u32) {
        self.log.borrow_mut().push(format!("round {round} told"));
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn close(&mut self) {
        assert!(!self.panics, "a test wants it");
        self.log.borrow_mut().push("close".to_owned());
    }
}

struct Script {
    now: Instant,
    log: Log,
    events: VecDeque<Event>,
    messages: VecDeque<Control>,
    /// Messages that come without end.
    flood: bool,
    heard: u64,
    unsent: usize,
    vmm: Arc<Vmm>,
    memory_max: ByteCount,
}

impl DestinationIo for Script {
    fn now(&self) -> Instant {
        self.now
    }

    fn host(&self) -> HostNow {
        HostNow { cpu: Duration::ZERO, wall_clock_ns: 0 }
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn take_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn receive(&mut self, admits: &dyn Fn(Kind) -> bool) -> Result<Option<Control>, Unheard> {
        let message = match self.messages.pop_front() {
            None if self.flood => Some(Control::Ping(Ping { sent_ns: 1 })),
            message => message,
        };
        self.heard += u64::from(message.is_some());
        match message {
            Some(message) if !admits(message.kind()) => {
                let error = Error::new(Fault::Peer, "", "out of its place");
                Err(Unheard::Refused(message.kind(), error))
            }
            message => Ok(message),
        }
    }

    fn queue(&mut self, message: &Control) {
        self.log.borrow_mut().push(message.kind().to_string());
    }

    fn flush(&mut self) -> Result<usize, Error> {
        Ok(self.unsent)
    }

    fn build(&mut self, _: Setup, layout: Vec<PageRange>) {
        assert_eq!(layout, self.vmm.ram.layout());
        self.log.borrow_mut().push("build".to_owned());
    }

    fn cancel_build(&mut self) {}

    fn await_channels(&mut self, count: u16, _: [u8; 16]) {
        self.log.borrow_mut().push(format!("await {count}"));
    }

    fn open_intake(&mut self, _: &Arc<GuestRam>) -> Result<Box<dyn Intake>, Error> {
        let log = Rc::clone(&self.log);
        Ok(Box::new(FakeIntake { log, panics: self.vmm.panics_in == PanicsIn::Close }))
    }

    fn drop_channels(&mut self) {}

    fn digest(&mut self, _: &Arc<GuestRam>) {}

    fn decide(&mut self, fate: Fate, vmm: Option<&Arc<dyn DestinationVmm>>) {
        assert_eq!(vmm.is_some(), fate == Fate::Committed);
        self.log.borrow_mut().push(format!("{fate:?}"));
    }
}

impl Script {
    fn new() -> Script {
        Script::with(PanicsIn::Nothing)
    }

    fn with(panics_in: PanicsIn) -> Script {
        let range = PageRange::try_new(Gfn(0), PageCount(PAGES)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range]).unwrap());
        Script {
            now: T0,
            log: Log::default(),
            events: VecDeque::new(),
            messages: VecDeque::new(),
            flood: false,
            heard: 0,
            unsent: 0,
            vmm: Arc::new(Vmm {
                ram,
                started: Mutex::new(None),
                resumes: AtomicU32::new(0),
                panics_in,
            }),
            memory_max: ByteCount(PAGES * 4096),
        }
    }

    /// What was asked for since the last look.
    fn asked(&self) -> Vec<String> {
        self.log.borrow_mut().drain(..).collect()
    }

    fn begin(&mut self) -> Attempt {
        let regions = vec![WireRange { start_gfn: 0, pages: PAGES }];
        let setup =
            Setup { migration: ID, regions, machine: Vec::new(), channels: 2, boot_id: [0; 16] };
        let config = AttemptConfig {
            protocol: DestinationConfig { token: [9; 16], clock_key: None },
            ledger: Ledger::new(InstanceId([1; 16])),
            memory_max: self.memory_max,
        };
        Attempt::new(self, config, setup)
    }

    /// An attempt whose guest has been stopped at the source.
    fn armed(&mut self) -> Attempt {
        let mut attempt = self.begin();
        attempt.step(self);
        self.events.push_back(Event::Built(Ok(Arc::<Vmm>::clone(&self.vmm))));
        attempt.step(self);
        self.events.push_back(Event::ChannelsJoined);
        attempt.step(self);
        self.events.push_back(Event::RoundReceived { round: 0 });
        attempt.step(self);
        let soon = SwitchoverSoon { last_round: 1, called_off: None };
        self.messages.push_back(Control::SwitchoverSoon(soon));
        assert_eq!(attempt.step(self), Next::Again { idle: false });
        assert_eq!(attempt.phase(), DestinationPhase::Armed);
        attempt
    }

    /// The state and the commit come, and then the last round.
    fn commit(&mut self) {
        self.messages.push_back(Control::FinalState(State::new(vec![1])));
        let commit =
            Commit { migration: ID, last_round: 1, running: true, complete_within_ms: None };
        self.messages.push_back(Control::Commit(commit));
        self.events.push_back(Event::RoundReceived { round: 1 });
    }

    fn is_started(&self) -> bool {
        self.vmm.started.lock().unwrap().is_some()
    }
}

fn finish(attempt: &mut Attempt, io: &mut Script) {
    for _ in 0..10 {
        if attempt.step(io) == Next::Over {
            return;
        }
    }
    panic!("no end: {attempt:?}");
}

#[test]
fn a_guest_arrives() {
    let mut io = Script::new();
    let mut attempt = io.armed();
    assert_eq!(
        io.asked(),
        [
            "build",
            "await 2",
            "SetupDone",
            "ChannelsReady",
            "round 0 told",
            "RoundReceived",
            "take over"
        ]
    );
    io.commit();
    attempt.step(&mut io);
    assert!(io.is_started());
    // Nothing lands in the memory of a guest that runs.
    assert_eq!(io.asked(), ["close", "Committed"]);
    finish(&mut attempt, &mut io);
    // The source is told before others are.
    assert_eq!(io.asked(), ["Committed", "Alive"]);
    let (outcome, ledger) = attempt.end();
    assert_eq!((outcome, ledger.fate(ID)), (DestinationOutcome::Arrived, Fate::Committed));
}

#[test]
fn a_peer_that_never_stops_talking_keeps_nobody_from_the_clock() {
    let mut io = Script::new();
    let mut attempt = io.begin();
    attempt.step(&mut io);
    io.events.push_back(Event::Built(Ok(Arc::<Vmm>::clone(&io.vmm))));
    io.flood = true;
    let before = io.heard;
    assert_eq!(attempt.step(&mut io), Next::Again { idle: false });
    assert_eq!(io.heard - before, 64);
    // The channels do not come.
    io.now = io.now.after(Duration::from_secs(11));
    attempt.step(&mut io);
    assert_eq!(attempt.phase(), DestinationPhase::Abandoned);
}

#[test]
fn the_owner_is_heard_in_every_phase_before_the_start() {
    let stages: [fn(&mut Script) -> Attempt; 2] = [Script::begin, Script::armed];
    for stage in stages {
        let mut io = Script::new();
        let mut attempt = stage(&mut io);
        (io.flood, io.unsent) = (true, 10);
        io.events.push_back(Event::Stop);
        let next = attempt.step(&mut io);
        assert!(matches!(next, Next::Wait { listens: false, .. }), "{next:?}");
        // Its last words are waited for, but not without end.
        io.now = io.now.after(Duration::from_secs(2));
        assert_eq!(attempt.step(&mut io), Next::Over);
        assert_eq!(attempt.end().1.fate(ID), Fate::Abandoned);
    }
}

#[test]
fn a_source_that_takes_no_answers_is_left() {
    let mut io = Script::new();
    let mut attempt = io.armed();
    io.unsent = 1 << 20;
    attempt.step(&mut io);
    assert_eq!(attempt.phase(), DestinationPhase::Abandoned);
}

#[test]
fn a_lost_page_is_this_hosts_fault() {
    for (fault, words) in [(Fault::Host, "cannot keep: it"), (Fault::Peer, "channel lost: ")] {
        let mut io = Script::new();
        let mut attempt = io.armed();
        let error = Error::new(fault, "keep", "it");
        io.events.push_back(Event::ChannelLost { last_barrier: None, error });
        finish(&mut attempt, &mut io);
        let (DestinationOutcome::Abandoned { reason }, _) = attempt.end() else { panic!() };
        assert!(reason.to_string().contains(words), "{reason}");
    }
}

#[test]
fn a_guest_that_is_too_large_costs_nothing() {
    let mut io = Script::new();
    io.memory_max = ByteCount(4096);
    let mut attempt = io.begin();
    finish(&mut attempt, &mut io);
    assert_eq!(io.asked(), ["Abandon", "Abandoned"]);
}

/// A limit of what a person calls the guest's memory is some pages too low for what comes with it.
#[test]
fn a_guest_that_is_hardly_too_large_is_told_how_much() {
    let mut io = Script::new();
    io.memory_max = ByteCount(PAGES * 4096 - 1);
    let mut attempt = io.begin();
    finish(&mut attempt, &mut io);
    let (DestinationOutcome::Abandoned { reason }, _) = attempt.end() else { panic!() };
    let told = format!("{} bytes of memory, at most {} bytes", PAGES * 4096, PAGES * 4096 - 1);
    assert!(reason.to_string().contains(&told), "{reason}");
}

/// Whatever panics between the making of the right and the end of its use, the guest gets it, its
/// owner gets the machine, and the devices go on.
#[test]
fn a_panic_does_not_lose_the_right_to_run_the_guest() {
    for panics_in in [PanicsIn::Close, PanicsIn::Start, PanicsIn::Resume] {
        let mut io = Script::with(panics_in);
        let mut attempt = io.armed();
        io.commit();
        let panicked = catch_unwind(AssertUnwindSafe(|| attempt.step(&mut io)));
        assert!(panicked.is_err(), "{panics_in:?}");
        assert_eq!(io.is_started(), panics_in != PanicsIn::Close);
        io.asked();
        assert!(attempt.end_by_panic(&mut io, "a test wants it"));
        assert!(io.is_started());
        assert_eq!(io.asked(), ["Committed"], "{panics_in:?}: decided, with the machine");
        assert_eq!(io.vmm.resumes.load(Ordering::Relaxed), 1, "{panics_in:?}");
        assert_eq!(attempt.give_up().fate(ID), Fate::Committed);
    }
}

#[test]
fn a_panic_before_the_commit_is_a_refusal_for_ever() {
    let mut io = Script::new();
    let mut attempt = io.armed();
    io.asked();
    assert!(!attempt.end_by_panic(&mut io, "a test wants it"));
    assert!(!attempt.end_by_panic(&mut io, "a test wants it"));
    assert_eq!(io.asked(), ["Abandon"], "said once");
    assert_eq!(attempt.give_up().fate(ID), Fate::Abandoned);
}
