//! The source's thread: does what the protocol's machine says, and tells it what came of that.

mod blackout;
mod decide;
mod ending;

use super::MigrateOptions;
use super::events::Event;
use super::lanes::{Common, Lanes, Sent};
use super::shared::Shared;
use super::switchover::Moments;
use crate::report::{Report, Status};
use crate::{GuestCheck, SourceVmm, chain, host};
use martlet_policy::{
    AutoConverge, Convergence, Measurements, Pacer, Prediction, default_channels,
};
use martlet_protocol::{Decision, Source, SourceAction, SourceConfig, SourceEvent, SourceOutcome};
use martlet_ram::{
    Chunk, DirtySource, GuestRam, PageBatch, RamBitmap, Scanner, TrackError, mark_touched,
};
use martlet_transport::{Address, ControlLink, RdmaSender, connect, monotonic_now, wait_any};
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};
use martlet_wire::control::{Alive, Committed, Control, MigrationId, Setup, WireRange};
use martlet_wire::hello::{Hello, Role};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::info;

/// Last pages up to this many are sent by the driver itself; more are worth the lanes' wake-up.
const LAST_PAGES_INLINE_MAX: u64 = 1024;

/// How long a lane may take to accept the barrier behind its queue.
const BARRIER_PATIENCE: Duration = Duration::from_secs(30);

/// While a round is handed out, the driver looks again this soon for room in the lanes.
const FEED_INTERVAL: Duration = Duration::from_micros(250);

/// With nothing to wait for, the driver still looks this often.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// From the announcement of the stop to the stop. The destination gets awake meanwhile, and on a
/// host with few cores the vCPUs get theirs back from the threads of the round before: a vCPU that
/// waits for a core when it is told to stop has been standing still already.
const SETTLE: Duration = Duration::from_micros(300);

/// Chunks handed out before the driver looks at its events again.
const FEED_BURST: usize = 64;

/// What a migration starts from.
pub(super) struct Start {
    pub(super) vmm: Arc<dyn SourceVmm>,
    pub(super) to: Address,
    pub(super) options: MigrateOptions,
    pub(super) shared: Arc<Shared>,
    pub(super) pacer: Arc<Pacer>,
}

/// The body of the migration's thread.
pub(super) fn run(start: Start) {
    let ram = start.vmm.ram();
    let shared = Arc::clone(&start.shared);
    match Driver::connect(start, &ram) {
        Ok(driver) => driver.run(),
        Err(reason) => {
            info!(%reason, "the migration failed before it began");
            let report = Report::not_begun(reason, shared.started);
            shared.finish(Status::Failed, report);
        }
    }
}

struct Driver<'ram> {
    shared: Arc<Shared>,
    vmm: Arc<dyn SourceVmm>,
    ram: &'ram Arc<GuestRam>,
    to: Address,
    options: MigrateOptions,
    channels: u16,
    migration: MigrationId,
    machine: Source,
    control: ControlLink,
    /// Cleared once the control connection broke: it stays readable for ever then.
    control_open: bool,
    lanes: Option<Lanes>,
    /// For the last pages, which this thread may send itself.
    batch: PageBatch<'ram>,
    last_chunks: Vec<Chunk>,
    sent: Arc<Sent>,
    pacer: Arc<Pacer>,
    tracker: Option<Box<dyn DirtySource>>,
    dirty: Arc<RamBitmap>,
    scanner: Scanner,
    convergence: Convergence,
    measured: Measurements,
    prediction: Option<Prediction>,
    round: Option<Round>,
    rounds: u32,
    last_sync: Instant,
    /// What to do next, and when.
    rest: Option<(Instant, Decision)>,
    /// The round behind which the stop was rehearsed the last time.
    rehearsed_round: Option<u32>,
    /// A chunk that no lane had room for.
    held: Option<Chunk>,
    /// Events for the machine that came up while an action was performed.
    pending: VecDeque<SourceEvent>,
    moments: Option<Moments>,
    last_heartbeat: Option<Instant>,
    last_frames: Vec<Option<Instant>>,
    committed: Option<Committed>,
    alive: Option<Alive>,
    memory_equal: Option<bool>,
    /// From the call to the destination's confirmation.
    total: Option<Duration>,
    cpu_before: Duration,
    guest: Option<GuestCheck>,
    outcome: Option<SourceOutcome>,
    /// The destination is being asked what became of the guest.
    is_asking: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The guest runs.
    PreCopy,
    /// It is stopped.
    Last,
}

/// A round that the lanes are sending.
#[derive(Clone, Copy, Debug)]
struct Round {
    number: u32,
    kind: Kind,
    started: Instant,
    pages: u64,
    bytes_before: u64,
    handed_out: bool,
    barriers_left: usize,
    /// How long it took until the destination had all of it.
    took: Option<Duration>,
}

impl<'ram> Driver<'ram> {
    /// Connects to the destination. The error is one line for people.
    fn connect(start: Start, ram: &'ram Arc<GuestRam>) -> Result<Driver<'ram>, String> {
        let Start { vmm, to, options, shared, pacer } = start;
        let stream = connect(&to, &Hello::control()).map_err(|error| error.to_string())?;
        let random = host::random_id().map_err(|error| format!("no random bytes: {error}"))?;
        let migration = MigrationId(random);
        let channels = match to {
            // Many queue pairs, one thread.
            Address::Rdma { .. } => 1,
            _ => options.channels.unwrap_or_else(|| default_channels(host::cores())),
        };
        let regions = ram
            .regions()
            .iter()
            .map(|region| WireRange { start_gfn: region.range().start().0, pages: region.pages() });
        let setup = Setup {
            migration,
            regions: regions.collect(),
            machine: vmm.machine_description(),
            channels,
            boot_id: host::clock_id(),
        };
        let config =
            SourceConfig { setup, verify: options.verify, downtime_limit: options.downtime_limit };
        let auto_converge =
            if options.auto_converge { AutoConverge::On } else { AutoConverge::Off };
        let dirty = Arc::new(RamBitmap::new(ram));
        let now = monotonic_now();
        Ok(Driver {
            machine: Source::new(now, config),
            convergence: Convergence::new(auto_converge),
            scanner: Scanner::new(Arc::clone(&dirty)),
            batch: PageBatch::new(ram),
            last_chunks: Vec::with_capacity(usize::try_from(LAST_PAGES_INLINE_MAX).unwrap_or(0)),
            control: ControlLink::new(stream),
            control_open: true,
            lanes: None,
            sent: Arc::default(),
            tracker: None,
            measured: Measurements::default(),
            prediction: None,
            round: None,
            rounds: 0,
            last_sync: now,
            rest: None,
            rehearsed_round: None,
            held: None,
            pending: VecDeque::new(),
            moments: None,
            last_heartbeat: None,
            last_frames: Vec::new(),
            committed: None,
            alive: None,
            memory_equal: None,
            total: None,
            cpu_before: host::process_cpu(),
            guest: None,
            outcome: None,
            is_asking: false,
            shared,
            vmm,
            ram,
            to,
            options,
            channels,
            migration,
            pacer,
            dirty,
        })
    }

    /// Runs the attempt to its end. Afterwards the report is in `shared`.
    pub(super) fn run(mut self) {
        while self.outcome.is_none() {
            self.step();
        }
        self.finish();
        self.stay_for_questions();
    }

    /// Performs what is due, then waits for what comes next.
    fn step(&mut self) {
        loop {
            while let Some(action) = self.machine.poll_action() {
                self.perform(action);
            }
            match self.pending.pop_front() {
                Some(event) => self.machine.on_event(monotonic_now(), event),
                None => break,
            }
        }
        self.flush_control();
        if self.outcome.is_some() || !self.pending.is_empty() {
            return;
        }
        self.hand_out();
        self.end_rest();
        self.publish();
        if self.pending.is_empty() {
            self.await_events();
        }
    }

    fn tell(&mut self, event: SourceEvent) {
        self.pending.push_back(event);
    }

    fn host_failed(&mut self, what: &str, error: &dyn Error) {
        self.tell(SourceEvent::HostFailed { reason: format!("{what}: {}", chain(error)) });
    }

    fn perform(&mut self, action: SourceAction) {
        match action {
            SourceAction::Send(message) => {
                if let (Control::Commit(_), Some(moments)) = (&message, &mut self.moments) {
                    moments.commit_sent = monotonic_now();
                }
                self.control.queue(&message);
            }
            SourceAction::OpenChannels { count, token } => self.open_channels(count, token),
            SourceAction::RunRound { round } => self.begin_round(round),
            SourceAction::Decide => self.decide(),
            SourceAction::Rehearse => self.rehearse(),
            SourceAction::Pause => self.pause(),
            SourceAction::RunLastRound { round } => self.run_last_round(round),
            SourceAction::SaveState => self.save_state(),
            SourceAction::ComputeDigest => self.compute_digest(),
            SourceAction::Resume { permit, running } => self.resume(permit, running),
            SourceAction::MovedAway(committed) => {
                self.total = Some(monotonic_now().since(self.shared.started));
                self.committed = Some(committed);
            }
            SourceAction::Finish(outcome) => self.outcome = Some(outcome),
        }
    }

    fn flush_control(&mut self) {
        if let Err(error) = self.control.flush() {
            // What the peer said before it went comes first: it may be why, or the commit's answer.
            self.read_control();
            self.lose_control(error.to_string());
        }
    }

    fn open_channels(&mut self, count: u16, token: [u8; 16]) {
        self.flush_control();
        match self.connect_lanes(count, token) {
            Ok(lanes) => {
                self.lanes = Some(lanes);
                self.tell(SourceEvent::ChannelsConnected);
            }
            Err(error) => {
                let reason = format!("cannot open the data channels: {error}");
                self.tell(SourceEvent::ChannelLost { reason });
            }
        }
    }

    fn connect_lanes(&self, count: u16, token: [u8; 16]) -> Result<Lanes, String> {
        let common = Common::new(self.ram, &self.sent, &self.pacer, &self.shared);
        let finders = self.options.zero_finders.as_ref();
        if matches!(self.to, Address::Rdma { .. }) {
            return self.connect_rdma(common, token);
        }
        let mut streams = Vec::with_capacity(usize::from(count));
        for channel in 0..count {
            let hello = Hello::data(channel, token);
            streams.push(connect(&self.to, &hello).map_err(|error| error.to_string())?);
        }
        Lanes::start(streams, common, finders).map_err(|error| error.to_string())
    }

    fn connect_rdma(&self, common: Common, token: [u8; 16]) -> Result<Lanes, String> {
        self.shared.note_rdma(|_| {});
        let hello = Hello { role: Role::RDMA, ..Hello::data(0, token) };
        let stream = connect(&self.to, &hello).map_err(|error| error.to_string())?;
        let breaker = stream.try_clone().map_err(|error| error.to_string())?;
        let sender = RdmaSender::new(stream, self.ram, &self.options.rdma, token)?;
        let finders = self.options.zero_finders.as_ref();
        Lanes::start_rdma(sender, breaker, common, &self.dirty, finders)
            .map_err(|error| error.to_string())
    }

    /// Starts a round. The first one begins the tracking and sends what the guest ever touched;
    /// a later one sends what the decision's sync found.
    fn begin_round(&mut self, number: u32) {
        if number == 0
            && let Err(error) = self.begin_tracking()
        {
            return self.host_failed("cannot track dirty pages", &error);
        }
        self.open_round(number, Kind::PreCopy);
    }

    fn open_round(&mut self, number: u32, kind: Kind) {
        self.rounds = number + 1;
        self.round = Some(Round {
            number,
            kind,
            started: monotonic_now(),
            pages: self.dirty.count(),
            bytes_before: self.sent.bytes.load(Ordering::Relaxed),
            handed_out: false,
            barriers_left: self.lanes.as_ref().map_or(0, Lanes::count),
            took: None,
        });
    }

    fn begin_tracking(&mut self) -> Result<(), TrackError> {
        self.shared.set_status(Status::Active);
        self.last_sync = monotonic_now();
        self.tracker = Some(self.vmm.track()?);
        let mut touched = 0;
        for (region, (_, bitmap)) in self.ram.regions().iter().zip(self.dirty.iter()) {
            touched += mark_touched(region, bitmap).map_err(|source| TrackError {
                operation: format!("finding the touched pages of {}", region.range()),
                source,
            })?;
        }
        self.shared.update(|progress| progress.pages.untouched = self.ram.pages().0 - touched);
        Ok(())
    }

    /// Hands out as much of the round as the lanes take, but not too much at once.
    fn hand_out(&mut self) {
        let (Some(lanes), Some(tracker), Some(round)) =
            (&self.lanes, &mut self.tracker, &mut self.round)
        else {
            return;
        };
        if round.handed_out {
            return;
        }
        for _ in 0..FEED_BURST {
            let next = match self.held.take() {
                Some(chunk) => Ok(Some(chunk)),
                None => match round.kind {
                    Kind::PreCopy => self.scanner.next(tracker.as_mut()),
                    Kind::Last => Ok(self.scanner.next_last()),
                },
            };
            match next {
                Ok(Some(chunk)) => {
                    if let Err(chunk) = lanes.offer(chunk) {
                        self.held = Some(chunk);
                        return;
                    }
                }
                Ok(None) => {
                    round.handed_out = true;
                    let last = round.kind == Kind::Last;
                    lanes.barrier(round.number, last, BARRIER_PATIENCE);
                    return;
                }
                Err(error) => return self.host_failed("cannot track dirty pages", &error),
            }
        }
    }

    fn end_rest(&mut self) {
        if let Some((until, decision)) = self.rest
            && until <= monotonic_now()
        {
            self.rest = None;
            self.tell(SourceEvent::Decided(decision));
        }
    }

    fn is_handing_out(&self) -> bool {
        self.round.is_some_and(|round| !round.handed_out)
    }

    /// Waits for a message, an event or the machine's next deadline.
    fn await_events(&mut self) {
        let now = monotonic_now();
        let mut limit = IDLE_INTERVAL;
        if let Some(at) = self.machine.poll_timeout() {
            limit = limit.min(at.since(now));
        }
        if let Some((at, _)) = self.rest {
            limit = limit.min(at.since(now));
        }
        if self.is_handing_out() {
            limit = if self.held.is_some() { FEED_INTERVAL } else { Duration::ZERO };
        }
        let mut fds = [
            PollFd::new(self.shared.events.wake(), PollFlags::IN),
            PollFd::new(&self.control, PollFlags::IN),
        ];
        let watched = if self.control_open { 2 } else { 1 };
        if !limit.is_zero()
            && let Err(error) = wait_any(&mut fds[..watched], limit)
        {
            return self.host_failed("cannot wait for events", &error);
        }
        // The peer first: one of our own events may be the last before the commit.
        self.read_control();
        while let Some(event) = self.shared.events.take() {
            self.on_own_event(event);
        }
        // What came in counts first, however late this thread is.
        let now = monotonic_now();
        if self.pending.is_empty() && self.machine.poll_timeout().is_some_and(|at| at <= now) {
            self.machine.on_timeout(now);
        }
    }

    fn on_own_event(&mut self, event: Event) {
        match event {
            Event::BarrierSent { round } => {
                let Some(current) = &mut self.round else { return };
                if current.number == round {
                    current.barriers_left -= 1;
                    if current.barriers_left == 0 {
                        match current.kind {
                            Kind::PreCopy => self.tell(SourceEvent::RoundSent { round }),
                            Kind::Last => self.end_last_round(round),
                        }
                    }
                }
            }
            Event::Digested(Ok(digest)) => self.tell(SourceEvent::OwnDigest(digest)),
            Event::Digested(Err(error)) => self.host_failed("cannot digest guest memory", &error),
            Event::LaneLost { reason } => self.tell(SourceEvent::ChannelLost { reason }),
            Event::Cancel => {
                self.tell(SourceEvent::Cancel { reason: "cancelled by its owner".to_owned() });
            }
            Event::Resolve => self.ask_fate(),
            Event::Asked(answer) => self.on_answer(answer),
        }
    }

    fn read_control(&mut self) {
        while self.control_open {
            match self.control.try_receive() {
                Ok(Some(message)) => {
                    self.note(&message);
                    self.tell(SourceEvent::Received(message));
                }
                Ok(None) => return,
                Err(error) => return self.lose_control(chain(&error)),
            }
        }
    }

    fn lose_control(&mut self, reason: String) {
        if self.control_open {
            self.control_open = false;
            self.tell(SourceEvent::ControlLost { reason });
        }
    }

    fn publish(&self) {
        let bytes = self.sent.bytes.load(Ordering::Relaxed);
        let round = self.round;
        let now = monotonic_now();
        let remaining = match round {
            Some(round) if !round.handed_out => {
                PageCount(round.pages.saturating_sub(self.scanner.handed_out().0))
            }
            _ => self.measured.dirty,
        };
        self.shared.update(|progress| {
            progress.bytes_sent = ByteCount(bytes);
            progress.pages.normal = self.sent.normal.load(Ordering::Relaxed);
            progress.pages.zero = self.sent.zero.load(Ordering::Relaxed);
            progress.remaining = remaining;
            if let Some(round) = round {
                progress.round = round.number;
                let elapsed = round.took.unwrap_or_else(|| now.since(round.started));
                progress.rate =
                    BytesPerSec::measured(ByteCount(bytes - round.bytes_before), elapsed);
            }
        });
    }
}
