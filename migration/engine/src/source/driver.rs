//! The source's thread: does what the protocol's machine says, and tells it what came of that.

mod blackout;
mod decide;
mod ending;
mod last_run;
mod look;
mod rounds;

use super::connecting::{self, Unconnected};
use super::lanes::{self, Lanes, Sent};
use super::shared::Shared;
use super::switchover::Moments;
use super::{MigrateOptions, Then};
use crate::{Error, Fault, GuestCheck, SourceVmm, chain, host};
use crate::{Outcome, Report, Status};
use last_run::LastRun;
use martlet_policy::{
    AutoConverge, Convergence, Measurements, Pacer, Prediction, default_channels,
};
use martlet_protocol::{
    Decision, Doubt, Failure, OperatorOverride, Source, SourceAction, SourceConfig, SourceEvent,
    SourceOutcome,
};
use martlet_ram::{Chunk, DirtySource, GuestRam, RamBitmap, Scanner};
use martlet_transport::{Address, ControlLink, Stream, Target, monotonic_now};
use martlet_units::{ByteCount, Instant};
use martlet_wire::control::{
    Alive, BOOT_ID_UNTOLD, Committed, Control, MigrationId, Setup, WireRange,
};
use martlet_wire::frame::Reader;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info};

/// Last pages up to this many are sent by the driver itself; more are worth the lanes' wake-up.
const LAST_PAGES_INLINE_MAX: u64 = 1024;

/// From the announcement of the stop to the stop. The destination gets awake meanwhile, and on a
/// host with few cores the vCPUs get theirs back from the threads of the round before: a vCPU that
/// waits for a core when it is told to stop has been standing still already.
const SETTLE: Duration = Duration::from_micros(300);

/// Chunks handed out before the driver looks at its events again.
const FEED_BURST: usize = 64;

/// Panics of one attempt after which nothing more is expected of its machine.
const PANICS_MAX: u32 = 8;

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
    let (shared, ram) = (Arc::clone(&start.shared), start.vmm.ram());
    // A driver catches its own panics; nobody would hear the end of an attempt that has none.
    let error = match host::guarded(|| connect(start, &ram)) {
        Ok(Ok(driver)) => return driver.run(),
        Ok(Err(Unconnected::Failed(reason))) => Some(Error::new(Fault::Peer, "", reason)),
        Err(reason) => Some(Error::new(Fault::Host, "", reason)),
        Ok(Err(Unconnected::Cancelled)) => None,
    };
    info!(error = error.as_ref().map(Error::to_line), "the migration ended before it began");
    let (status, outcome) = match error {
        Some(_) => (Status::Failed, Outcome::Failed),
        None => (Status::Cancelled, Outcome::Cancelled),
    };
    let total = monotonic_now().since(shared.started);
    shared.finish(status, Report::not_begun(outcome, error, total));
}

fn connect(start: Start, ram: &Arc<GuestRam>) -> Result<Driver<'_>, Unconnected> {
    let (stream, target) = connecting::control(&start.shared, &start.to)?;
    Driver::new(start, ram, stream, target).map_err(Unconnected::Failed)
}

struct Driver<'ram> {
    shared: Arc<Shared>,
    vmm: Arc<dyn SourceVmm>,
    ram: &'ram Arc<GuestRam>,
    to: Address,
    /// What the address led to: the channels go there too.
    target: Target,
    /// What the channels show.
    token: [u8; 16],
    options: MigrateOptions,
    channels: u16,
    migration: MigrationId,
    machine: Source,
    control: ControlLink,
    /// Cleared once the control connection broke: it stays readable for ever then.
    control_open: bool,
    /// The peer may have said more than was taken in.
    unread: bool,
    full_looks: u32,
    told_cancel: bool,
    /// Until when the guest is to be stopped, while that has not passed.
    due: Option<(Instant, Then)>,
    /// The guest is stopped next, whatever is predicted.
    stop_now: bool,
    /// Why it was cancelled, if not by its owner's word.
    cancelled_because: Option<String>,
    lanes: Option<Lanes>,
    /// The last pages, for as long as the stop may be called off.
    last_chunks: Vec<Chunk>,
    /// How many of them the lanes have.
    last_handed: usize,
    /// Few last pages are sent by this thread itself.
    inline_run: Option<lanes::LastRun<'ram>>,
    /// Between the stop and the commit.
    last_run: Option<LastRun>,
    call_offs: u32,
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
    /// When that began.
    rehearsed_at: Instant,
    /// A chunk that its lane had no room for.
    held: Option<Chunk>,
    lanes_full: bool,
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
    /// What its operator wants done if the destination does not answer.
    overriding: Option<OperatorOverride>,
    next_question: Instant,
    question_pause: Duration,
    /// Bytes on their way when that was looked at the last time, and when it is next.
    moving: (ByteCount, Instant),
    panics: u32,
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
    pages_before: u64,
    handed_out: bool,
    barriers_left: usize,
    /// How long it took until the destination had all of it.
    took: Option<Duration>,
}

impl<'ram> Driver<'ram> {
    /// Begins an attempt on a control connection. The error is one line for people.
    fn new(
        start: Start,
        ram: &'ram Arc<GuestRam>,
        stream: Stream,
        target: Target,
    ) -> Result<Driver<'ram>, String> {
        let Start { vmm, to, options, shared, pacer } = start;
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
            boot_id: BOOT_ID_UNTOLD,
        };
        let config = SourceConfig {
            setup,
            clock_key: host::clock_key(),
            verify: options.verify,
            downtime_limit: options.downtime_limit,
        };
        let auto_converge =
            if options.auto_converge { AutoConverge::On } else { AutoConverge::Off };
        let dirty = Arc::new(RamBitmap::new(ram));
        let now = monotonic_now();
        Ok(Driver {
            machine: Source::new(now, config),
            convergence: Convergence::new(auto_converge),
            scanner: Scanner::new(Arc::clone(&dirty)),
            last_handed: 0,
            inline_run: None,
            last_run: None,
            call_offs: 0,
            last_chunks: Vec::with_capacity(usize::try_from(LAST_PAGES_INLINE_MAX).unwrap_or(0)),
            control: ControlLink::new(stream, Reader::Source),
            control_open: true,
            unread: false,
            full_looks: 0,
            told_cancel: false,
            due: options.within.map(|within| (shared.started.after(within.limit), within.then)),
            stop_now: false,
            cancelled_because: None,
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
            rehearsed_at: now,
            held: None,
            lanes_full: false,
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
            overriding: None,
            next_question: now,
            question_pause: Duration::ZERO,
            moving: (ByteCount(0), now),
            panics: 0,
            shared,
            vmm,
            ram,
            to,
            target,
            token: [0; 16],
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
            self.guarded(Driver::step);
        }
        self.finish();
        self.stay_for_questions();
    }

    /// Does something that must not take the permit with it should it panic; whether it did not.
    /// The machine has the permit then, and what it does about a failure gives it back.
    fn guarded(&mut self, work: impl FnOnce(&mut Driver<'ram>)) -> bool {
        let Err(reason) = host::guarded(|| work(self)) else { return true };
        error!(%reason, "the migration's thread panicked");
        self.panics += 1;
        if self.panics >= PANICS_MAX {
            // The machine itself does not get on. Whatever it holds, a stopped guest stays so.
            let reason = Doubt::Unconfirmed(Failure::Host { reason: reason.clone() });
            self.outcome.get_or_insert(SourceOutcome::Undecided { reason });
        }
        self.tell(SourceEvent::HostFailed { reason });
        false
    }

    /// Performs what is due, then waits for what comes next.
    fn step(&mut self) {
        self.settle();
        if self.outcome.is_some() {
            return;
        }
        self.hand_out();
        self.mind_last_run();
        self.end_rest();
        self.mind_bound();
        self.mind_doubt();
        self.publish();
        self.look();
        self.settle();
        self.look_at_clock();
    }

    /// Tells the machine what happened and does what it wants, until it wants nothing more.
    fn settle(&mut self) {
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
    }

    fn tell(&mut self, event: SourceEvent) {
        self.pending.push_back(event);
    }

    fn host_failed(&mut self, what: &str, error: &dyn std::error::Error) {
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
}
