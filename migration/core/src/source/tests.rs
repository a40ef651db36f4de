//! The core with a scripted outside, in virtual time.

use super::*;
use crate::{GuestObserver, Outcome, Paused, Rehearsal, Report, RunState, SourceVmm};
use martlet_protocol::{OperatorOverride, OperatorsWord, RunPermit, limits};
use martlet_ram::{Chunk, DirtySource, GuestRam, RegionIndex, TrackError, Tracker};
use martlet_units::{ByteCount, Gfn, PageRange};
use martlet_wire::control::{
    Alive, BOOT_ID_UNTOLD, Committed, InstanceId, MigrationId, Pong, Rehearsed, RoundReceived,
    Setup, SetupDone, WireRange,
};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::task::{Poll, Waker};

const PAGES: u64 = 2048;
const ACCEPTED: Duration = Duration::from_millis(300);

/// A machine that answers when it is let.
struct Vmm {
    ram: Arc<GuestRam>,
    permit: Mutex<Option<RunPermit>>,
    is_silent: AtomicBool,
    is_late: AtomicBool,
    is_saving: AtomicBool,
    /// The guest writes all of its memory, over and over.
    writes_all: Arc<AtomicBool>,
    /// It does so right before each stop, and not afterwards.
    writes_all_last: bool,
    throttled: AtomicU8,
    cancelled_stops: AtomicU32,
    resumes: AtomicU32,
    observer_panics: AtomicBool,
    has_moved_away: AtomicBool,
}

impl SourceVmm for Vmm {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.ram)
    }

    fn track(&self) -> Result<Tracker, TrackError> {
        Ok(Tracker::lease(&self.ram)?.with(Box::new(Log(Arc::clone(&self.writes_all)))))
    }

    fn rehearse(&self) -> Result<Option<Rehearsal>, Error> {
        let pause = Duration::from_micros(50);
        Ok(Some(Rehearsal { pause, save: pause, state: vec![1] }))
    }

    fn set_throttle(&self, percent: u8) {
        self.throttled.fetch_max(percent, Ordering::Relaxed);
    }

    fn poll_suspended(&self) -> Poll<Result<(), Error>> {
        if self.is_silent.load(Ordering::Relaxed) { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn begin_pause(&self, _: &Waker) {}

    fn poll_paused(&self) -> Poll<Result<Paused, Error>> {
        if self.is_late.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        let permit = self.permit.lock().unwrap().take().expect("paused once");
        self.writes_all.fetch_or(self.writes_all_last, Ordering::Relaxed);
        Poll::Ready(Ok(Paused { permit, was: RunState::Running }))
    }

    fn poll_state(&self) -> Poll<Result<Vec<u8>, Error>> {
        let is_saving = self.is_saving.load(Ordering::Relaxed);
        if is_saving { Poll::Pending } else { Poll::Ready(Ok(vec![2])) }
    }

    fn resume(&self, paused: Option<Paused>) {
        let Some(Paused { permit, .. }) = paused else {
            self.cancelled_stops.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.resumes.fetch_add(1, Ordering::Relaxed);
        self.writes_all.fetch_and(!self.writes_all_last, Ordering::Relaxed);
        *self.permit.lock().unwrap() = Some(permit);
    }

    fn moved_away(&self) {
        self.has_moved_away.store(true, Ordering::Relaxed);
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        Some(self)
    }
}

impl GuestObserver for Vmm {
    fn report(&self) -> Vec<u8> {
        assert!(!self.observer_panics.load(Ordering::Relaxed), "a test wants it");
        b"it has left".to_vec()
    }
}

/// A few pages are dirty again at the end of each round, or all.
struct Log(Arc<AtomicBool>);

impl DirtySource for Log {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        into.region(RegionIndex(0))
            .set_range(0..if self.0.load(Ordering::Relaxed) { PAGES } else { 8 });
        Ok(())
    }

    fn rearm(&mut self, _: RegionIndex, _: u64, _: &[u64]) -> Result<(), TrackError> {
        Ok(())
    }
}

/// Where the outside stops answering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stall {
    Never,
    Setup,
    Channels,
    Track,
    Touched,
    /// Lanes take nothing.
    Lanes,
    /// What lanes took does not arrive.
    Arrival,
    Rehearse,
    Rehearsed,
    Device,
    Vcpus,
    /// The last pages find no room.
    LastPages,
    /// Nor do many, in lanes that do not outlive the end of them.
    ManyLastPages,
    State,
    Digest,
    /// A commit is not answered.
    Commit,
}

struct Outside {
    now: Instant,
    stall: Stall,
    vmm: Vmm,
    cancelled: bool,
    /// The peer's messages.
    inbox: VecDeque<Control>,
    lost: Option<Lost>,
    floods: Option<Control>,
    received: usize,
    has_broken: bool,
    told: Vec<Control>,
    events: Vec<Event>,
    lanes: Option<OneLane>,
    takes_call_off: Option<bool>,
    /// How long a round takes to arrive.
    takes: Duration,
    ended: Option<Ended>,
}

/// A lane that is done with what it takes at once.
#[derive(Default)]
struct OneLane {
    is_full: bool,
    holds_last: bool,
    /// Has no room while the guest is stopped, and ends with a last round.
    is_full_last: bool,
    sent: Sent,
    barriers: Vec<(u32, bool)>,
    has_ended: bool,
}

impl Lanes for OneLane {
    fn count(&self) -> usize {
        1
    }

    fn offer(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        if self.is_full {
            return Err(chunk);
        }
        self.sent.normal += u64::from(chunk.count());
        self.sent.bytes += u64::from(chunk.count()) * 4096;
        Ok(())
    }

    fn barrier(&mut self, round: u32, last: bool) {
        assert!(!self.has_ended, "nothing comes behind the end");
        self.has_ended = last && self.is_full_last;
        self.barriers.push((round, last));
    }

    fn set_unpaced(&mut self, unpaced: bool) {
        self.is_full |= unpaced && self.is_full_last;
        self.is_full &= unpaced || !self.is_full_last;
    }

    fn unacknowledged(&self) -> ByteCount {
        ByteCount(0)
    }

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn begin_last(&mut self) {}

    fn send_last(&mut self, chunks: &[Chunk], round: u32) -> Result<Sending, Error> {
        if self.holds_last {
            return Ok(Sending::Blocked);
        }
        self.sent.normal += chunks.iter().map(|chunk| u64::from(chunk.count())).sum::<u64>();
        self.barriers.push((round, true));
        Ok(Sending::Done)
    }

    fn outlive_last(&self) -> bool {
        !self.is_full_last
    }

    fn break_all(&mut self) {}
}

impl SourceIo for Outside {
    fn now(&self) -> Instant {
        self.now
    }

    fn vmm(&self) -> &dyn SourceVmm {
        &self.vmm
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled
    }

    fn downtime_limit(&self) -> Duration {
        ACCEPTED
    }

    fn begin(&mut self, work: Work) {
        let (done, stalls) = match work {
            Work::OpenChannels { .. } => {
                self.lanes = Some(OneLane {
                    is_full: self.stall == Stall::Lanes,
                    holds_last: self.stall == Stall::LastPages,
                    is_full_last: self.stall == Stall::ManyLastPages,
                    ..OneLane::default()
                });
                self.inbox.push_back(Control::ChannelsReady);
                (Event::ChannelsOpened(Ok(())), Stall::Channels)
            }
            Work::Track => (Event::Tracked(Ok(self.vmm.track().expect("a tracker"))), Stall::Track),
            Work::FindTouched { into } => {
                into.region(RegionIndex(0)).set_range(0..PAGES);
                (Event::TouchedFound(Ok(PAGES)), Stall::Touched)
            }
            Work::Rehearse => (Event::Rehearsed(self.vmm.rehearse()), Stall::Rehearse),
            Work::Digest => (Event::Digested(Ok([0; 32])), Stall::Digest),
            Work::Ask => return,
        };
        if self.stall != stalls {
            self.events.push(done);
        }
    }

    fn send(&mut self, message: &Control) {
        self.told.push(message.clone());
        let answer = match message {
            Control::Setup(_) if self.stall != Stall::Setup => Control::SetupDone(SetupDone {
                instance: InstanceId([1; 16]),
                token: [0; 16],
                boot_id: BOOT_ID_UNTOLD,
                clock_proof: None,
                takes_call_off: self.takes_call_off,
            }),
            Control::Ping(ping) => {
                Control::Pong(Pong { sent_ns: ping.sent_ns, answered_ns: self.now.0 })
            }
            Control::Rehearse(_) if self.stall != Stall::Rehearsed => {
                Control::Rehearsed(Rehearsed { load_ns: 1, start_ns: 1 })
            }
            Control::Commit(_) if self.stall != Stall::Commit => {
                let now = self.now.0;
                let committed = Committed { commit_ns: now, ready_ns: now, started_ns: now };
                self.inbox.push_back(Control::Committed(committed));
                Control::Alive(Alive::default())
            }
            _ => return,
        };
        self.inbox.push_back(answer);
    }

    fn flush(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn unsent(&self) -> usize {
        0
    }

    fn receive(&mut self) -> Result<Option<Control>, Lost> {
        self.received += 1;
        if let Some(message) = self.inbox.pop_front() {
            return Ok(Some(message));
        }
        match (&self.floods, self.lost.take()) {
            (Some(message), _) => Ok(Some(message.clone())),
            (None, Some(lost)) => Err(lost),
            (None, None) => Ok(None),
        }
    }

    fn break_control(&mut self) {
        self.inbox.clear();
        self.has_broken = true;
    }

    fn sent(&self) -> Sent {
        self.lanes.as_ref().map_or_else(Sent::default, |lane| lane.sent)
    }

    fn control_bytes(&self) -> ByteCount {
        ByteCount(0)
    }

    fn lanes(&mut self) -> Option<&mut dyn Lanes> {
        let lanes: &mut dyn Lanes = self.lanes.as_mut()?;
        Some(lanes)
    }

    fn wall_clock_ns(&self) -> i64 {
        0
    }

    fn show(&mut self, _: &Progress) {}

    fn finish(&mut self, ended: Ended) {
        self.ended = Some(ended);
    }

    fn unanswered(&mut self, _: &Error) {}
}

struct Scene {
    attempt: Attempt,
    outside: Outside,
}

fn scene(stall: Stall) -> Scene {
    scene_within(stall, None)
}

fn scene_within(stall: Stall, within: Option<Within>) -> Scene {
    let layout = [PageRange::try_new(Gfn(0), PageCount(PAGES)).unwrap()];
    let ram = Arc::new(GuestRam::create(&layout).unwrap());
    let protocol = SourceConfig {
        setup: Setup {
            migration: MigrationId([7; 16]),
            regions: vec![WireRange { start_gfn: 0, pages: PAGES }],
            machine: Vec::new(),
            channels: 1,
            boot_id: BOOT_ID_UNTOLD,
        },
        clock_key: None,
        verify: stall == Stall::Digest,
        downtime_limit: ACCEPTED,
    };
    let now = Instant(1_000_000_000);
    let config = Config {
        started: now,
        protocol,
        auto_converge: false,
        within,
        dirty: Arc::new(RamBitmap::new(&ram)),
        total: PageCount(PAGES),
    };
    let vmm = Vmm {
        ram,
        permit: Mutex::new(Some(RunPermit::for_new_guest())),
        is_silent: AtomicBool::new(stall == Stall::Device),
        is_late: AtomicBool::new(stall == Stall::Vcpus),
        is_saving: AtomicBool::new(stall == Stall::State),
        writes_all: Arc::default(),
        writes_all_last: stall == Stall::ManyLastPages,
        throttled: AtomicU8::new(0),
        cancelled_stops: AtomicU32::new(0),
        resumes: AtomicU32::new(0),
        observer_panics: AtomicBool::new(false),
        has_moved_away: AtomicBool::new(false),
    };
    let outside = Outside {
        now,
        stall,
        vmm,
        cancelled: false,
        inbox: VecDeque::new(),
        lost: None,
        floods: None,
        received: 0,
        has_broken: false,
        told: Vec::new(),
        events: Vec::new(),
        lanes: None,
        takes_call_off: Some(true),
        takes: Duration::ZERO,
        ended: None,
    };
    Scene { attempt: Attempt::new(now, config), outside }
}

impl Scene {
    /// One step, and what the outside does about it.
    fn step(&mut self) {
        self.attempt.step(&mut self.outside);
        let Outside { lanes, inbox, events, stall, now, takes, .. } = &mut self.outside;
        for (round, _) in lanes.iter_mut().flat_map(|lane| lane.barriers.drain(..)) {
            events.push(Event::BarrierSent { round });
            *now = now.after(*takes);
            if *stall != Stall::Arrival {
                inbox.push_back(Control::RoundReceived(RoundReceived { round }));
            }
        }
        self.outside.events.drain(..).for_each(|event| self.attempt.on_event(event));
    }

    /// Runs until it is over or this much time has passed.
    fn run(&mut self, time: Duration) {
        let end = self.outside.now.after(time);
        while self.outside.now < end && !self.attempt.is_over() {
            self.step();
            let a_moment = Duration::from_micros(1);
            self.outside.now = match self.attempt.wait(&self.outside) {
                _ if !self.outside.inbox.is_empty() => self.outside.now.after(a_moment),
                Wait::No | Wait::Yield => self.outside.now.after(a_moment),
                Wait::Until(at) => at.min(end),
            };
        }
    }

    fn ended(&mut self) -> Report {
        assert!(self.attempt.is_over(), "{:?}", self.attempt);
        self.attempt.conclude(&mut self.outside);
        self.outside.ended.take().expect("its owner is told").report
    }

    /// How it failed, with the guest here.
    fn failed(&mut self) -> Error {
        let report = self.ended();
        assert_eq!(report.outcome, Outcome::Failed, "{report:?}");
        self.check_here();
        report.error.expect("a reason")
    }

    fn check_here(&self) {
        assert!(self.outside.vmm.permit.lock().unwrap().is_some(), "the guest is here");
    }
}

const LONG: Duration = Duration::from_secs(100);

#[test]
fn a_guest_moves() {
    let mut scene = scene(Stall::Never);
    scene.run(LONG);
    let report = scene.ended();
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    assert!(scene.outside.vmm.permit.lock().unwrap().is_none());
    let switchover = report.switchover.expect("it came to one");
    assert!(switchover.blackout.is_some_and(|blackout| blackout < Duration::from_millis(1)));
    assert_eq!(switchover.source_observed.as_deref(), Some(&b"it has left"[..]));
    assert_eq!(report.transfer.pages.untouched, 0);
}

#[test]
fn a_cancel_is_heard_at_once_whoever_is_silent() {
    for stall in [
        Stall::Setup,
        Stall::Channels,
        Stall::Touched,
        Stall::Lanes,
        Stall::Arrival,
        Stall::Rehearse,
        Stall::Rehearsed,
        Stall::Device,
        Stall::Vcpus,
        Stall::LastPages,
        Stall::State,
        Stall::Digest,
    ] {
        let mut scene = scene(stall);
        scene.run(Duration::from_millis(100));
        assert!(!scene.attempt.is_over(), "{stall:?}");
        scene.outside.cancelled = true;
        scene.step();
        let report = scene.ended();
        assert_eq!(report.outcome, Outcome::Cancelled, "{stall:?}: {report:?}");
        scene.check_here();
    }
}

/// Two trackers of one guest would be in each other's way.
#[test]
fn an_attempt_ends_when_nobody_makes_a_tracker_for_it_any_more() {
    let mut scene = scene(Stall::Track);
    scene.run(Duration::from_millis(100));
    scene.outside.cancelled = true;
    scene.step();
    assert!(!scene.attempt.is_over());
    let tracker = scene.outside.vmm.track().unwrap();
    scene.attempt.on_event(Event::Tracked(Ok(tracker)));
    scene.step();
    assert_eq!(scene.ended().outcome, Outcome::Cancelled);
}

#[test]
fn a_silent_device_ends_the_attempt_and_its_late_answer_harms_nobody() {
    let mut scene = scene(Stall::Device);
    scene.run(LONG);
    let error = scene.failed();
    assert_eq!(error.fault(), Fault::Device, "{error}");
    assert_eq!(error.doing(), "suspend the devices");
    assert_eq!(scene.outside.vmm.cancelled_stops.load(Ordering::Relaxed), 1);
    let took = scene.outside.now.since(scene.attempt.started);
    assert!(took < limits::blackout_max(ACCEPTED) + ACCEPTED, "{took:?}");
    scene.outside.vmm.is_silent.store(false, Ordering::Relaxed);
    scene.step();
    scene.check_here();
}

#[test]
fn vcpus_that_do_not_stop_end_the_attempt() {
    let mut late = scene(Stall::Vcpus);
    late.run(LONG);
    assert_eq!(late.failed().fault(), Fault::Vmm);
    assert_eq!(late.outside.vmm.cancelled_stops.load(Ordering::Relaxed), 1);
    // One that is only late is waited for.
    let mut late = scene(Stall::Vcpus);
    late.run(limits::blackout_max(ACCEPTED) / 2);
    late.outside.vmm.is_late.store(false, Ordering::Relaxed);
    late.run(LONG);
    assert_eq!(late.ended().outcome, Outcome::Completed);
}

#[test]
fn a_state_that_does_not_come_ends_the_attempt() {
    let mut scene = scene(Stall::State);
    scene.run(LONG);
    let error = scene.failed();
    assert_eq!(error.fault(), Fault::Vmm, "{error}");
    assert_eq!(scene.outside.vmm.resumes.load(Ordering::Relaxed), 1);
}

/// Whoever wants a stop at any price gets his guest back when nothing moves at all.
#[test]
fn a_stop_that_its_owner_wants_has_a_bound() {
    let within = Within { limit: Duration::ZERO, then: Then::Stop };
    let mut scene = scene_within(Stall::LastPages, Some(within));
    scene.run(LONG);
    let error = scene.failed();
    assert_eq!(error.fault(), Fault::Peer);
    assert!(error.to_line().contains("nothing of the last pages got through for 5s"), "{error}");
    let took = scene.outside.now.since(scene.attempt.started);
    assert!(took < Duration::from_secs(6), "{took:?}");
}

/// An older destination gives up when a stop is called off.
#[test]
fn a_stop_is_called_off_only_where_that_is_understood() {
    for takes_call_off in [Some(true), None] {
        let mut scene = scene(Stall::LastPages);
        scene.outside.takes_call_off = takes_call_off;
        scene.run(LONG);
        let called_off = scene.outside.told.iter().any(|message| {
            matches!(message, Control::SwitchoverSoon(soon) if soon.called_off == Some(true))
        });
        assert_eq!(called_off, takes_call_off.is_some());
    }
}

#[test]
fn a_flood_is_taken_in_small_parts_and_ends_the_attempt() {
    let unasked = Control::Pong(Pong { sent_ns: 3, answered_ns: 3 });
    let mut flooded = scene(Stall::Arrival);
    flooded.run(Duration::from_millis(100));
    flooded.outside.floods = Some(unasked);
    let before = flooded.outside.received;
    flooded.step();
    assert!(flooded.outside.received - before < 100);
    assert_eq!(flooded.failed().fault(), Fault::Peer);
    // Nothing is wrong with each of these.
    let mut flooded = scene(Stall::Arrival);
    flooded.run(Duration::from_millis(100));
    flooded.outside.floods = Some(Control::Pong(Pong { sent_ns: 1_000_000_000, answered_ns: 0 }));
    flooded.run(LONG);
    assert_eq!(flooded.failed().fault(), Fault::Peer);
}

#[test]
fn what_is_no_message_is_the_peers_fault() {
    let mut scene = scene(Stall::Arrival);
    scene.run(Duration::from_millis(100));
    scene.outside.lost = Some(Lost::Malformed("an unknown kind".to_owned()));
    scene.step();
    let error = scene.failed();
    assert_eq!(error.fault(), Fault::Peer);
    assert!(error.to_line().contains("no message for this side: an unknown kind"), "{error}");
}

/// The clock wins over a peer that answers pings and nothing else.
#[test]
fn a_round_that_does_not_arrive_ends_at_its_deadline() {
    let mut scene = scene(Stall::Arrival);
    scene.run(LONG);
    let took = scene.outside.now.since(scene.attempt.started);
    assert!(took < limits::ROUND_ACK_MAX + Duration::from_secs(1), "{took:?}");
    assert_eq!(scene.failed().fault(), Fault::Peer);
}

#[test]
fn a_lane_that_is_full_is_left_alone_until_it_says_that_it_has_room() {
    let mut full = scene(Stall::Lanes);
    full.run(Duration::from_millis(500));
    assert!(matches!(full.attempt.wait(&full.outside), Wait::Until(_)));
    if let Some(lane) = &mut full.outside.lanes {
        lane.is_full = false;
    }
    full.attempt.on_event(Event::LaneRoom);
    full.run(LONG);
    assert_eq!(full.ended().outcome, Outcome::Completed);
}

#[test]
fn several_attempts_may_follow_each_other() {
    let mut first = scene(Stall::State);
    first.run(LONG);
    first.failed();
    let mut second = scene(Stall::Never);
    second.outside.vmm.permit = first.outside.vmm.permit;
    second.run(LONG);
    assert_eq!(second.ended().outcome, Outcome::Completed);
}

/// Lanes by RDMA end with the marker of a last round; it does not go out where that round is none.
#[test]
fn a_round_that_is_not_the_last_any_more_does_not_end_the_lanes() {
    let mut scene = scene(Stall::ManyLastPages);
    while scene.outside.vmm.resumes.load(Ordering::Relaxed) == 0 {
        scene.run(Duration::from_millis(1));
        assert!(!scene.attempt.is_over(), "the stop is called off");
    }
    if let Some(lane) = &mut scene.outside.lanes {
        lane.is_full_last = false;
        lane.is_full = false;
    }
    scene.attempt.on_event(Event::LaneRoom);
    scene.run(LONG);
    assert_eq!(scene.ended().outcome, Outcome::Completed);
}

/// The time passes while the guest is stopped; then that stop is called off.
#[test]
fn a_bound_that_passes_in_a_stop_holds_if_the_guest_goes_on() {
    let mut scene = scene(Stall::LastPages);
    while !scene.attempt.switchover.is_stopping() {
        scene.run(Duration::from_micros(10));
    }
    scene.attempt.owner.due = Some((scene.outside.now, Then::Cancel));
    scene.run(LONG);
    let report = scene.ended();
    assert_eq!(report.outcome, Outcome::Cancelled, "{report:?}");
    assert_eq!(scene.outside.vmm.resumes.load(Ordering::Relaxed), 1);
}

#[test]
fn a_guest_that_takes_too_long_is_throttled_if_its_owner_wants_that() {
    let outrun = |within| {
        let mut scene = scene_within(Stall::Never, within);
        scene.outside.vmm.writes_all.store(true, Ordering::Relaxed);
        scene.outside.takes = Duration::from_secs(1);
        scene.run(LONG);
        scene.outside.vmm.throttled.load(Ordering::Relaxed)
    };
    assert_eq!(outrun(None), 0);
    let within = Within { limit: Duration::from_secs(3), then: Then::Throttle };
    assert!(outrun(Some(within)) > 0);
}

/// To break the connection throws away what has come by it.
#[test]
fn an_override_hears_first_what_the_destination_has_said() {
    let committed = Control::Committed(Committed { commit_ns: 1, ready_ns: 2, started_ns: 3 });
    let pong = Control::Pong(Pong { sent_ns: 1_000_000_000, answered_ns: 0 });
    for (messages, outcome) in [
        (vec![], Outcome::Failed),
        (vec![committed.clone()], Outcome::Completed),
        // Behind more than is taken in one look.
        ([vec![pong; 100], vec![committed]].concat(), Outcome::Completed),
    ] {
        let mut scene = scene(Stall::Commit);
        scene.run(LONG);
        assert_eq!(scene.ended().outcome, Outcome::Undecided);
        let is_silent = messages.is_empty();
        scene.outside.inbox.extend(messages);
        let by = OperatorOverride::RunHere(OperatorsWord::given_by_a_person());
        scene.attempt.on_event(Event::Override(by));
        scene.step();
        assert_eq!(scene.outside.has_broken, is_silent);
        let gone = Error::new(Fault::Peer, "ask the destination", "it does not answer");
        scene.attempt.on_event(Event::Asked(Err(gone)));
        scene.run(LONG);
        assert_eq!(scene.ended().outcome, outcome);
        assert_eq!(scene.outside.vmm.permit.lock().unwrap().is_some(), is_silent);
    }
}

/// What it saw is only reported; what the guest needed here is freed all the same.
#[test]
fn an_observer_that_panics_keeps_nothing_of_a_guest_that_has_left() {
    let mut scene = scene(Stall::Never);
    scene.outside.vmm.observer_panics.store(true, Ordering::Relaxed);
    scene.run(LONG);
    let report = scene.ended();
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    assert_eq!(report.switchover.expect("it came to one").source_observed, None);
    assert!(scene.outside.vmm.has_moved_away.load(Ordering::Relaxed));
}
