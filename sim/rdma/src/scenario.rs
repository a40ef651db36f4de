//! A guest is moved while it writes, and everything goes wrong that may.

pub use crate::checker::Violation;

use crate::checker::Checker;
use crate::guest::Guest;
use crate::joint::{Joint, JointConfig, Note};
use martlet_fault_plan::FaultPlan;
use martlet_ram::{Run, RunKind};
use martlet_rdma::{DestinationConfig, Drain, HEARTBEAT_DEADLINE, Offered, SourceConfig};
use martlet_simulation::Chance;
use martlet_units::Instant;
use martlet_verbs_model::{Fault, Network, Params, Point, Side, Status};
use martlet_wire::rdma::Pinning;
use std::time::Duration;

/// Steps after which a run counts as stuck. Most take some thousand.
const STEPS_MAX: u64 = 400_000;

/// What to play.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Decides everything else.
    pub seed: u64,
    /// How often a request fails, in a million; 0 is never.
    pub faults_per_million: u32,
    /// After a failure pages take another way at once, without waiting for the revocation. For a
    /// proof that it is needed.
    pub impatient: bool,
    /// Both connections break at this step.
    pub cut_at: Option<u64>,
}

impl Options {
    /// As it should be, without faults.
    pub fn sound(seed: u64) -> Options {
        Options { seed, faults_per_million: 0, impatient: false, cut_at: None }
    }
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By RDMA.
    Arrived,
    /// By another way, after RDMA had failed.
    ArrivedOtherwise,
    /// Nobody can say what the destination has: the guest runs on at the source.
    Lost,
    /// It did not end.
    Stuck,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// What must not happen and did.
    pub violations: Vec<Violation>,
    /// Attempts by RDMA.
    pub attempts: u32,
    /// Requests that were posted.
    pub posts: u64,
    /// Bytes of the longest one.
    pub longest: u64,
    /// Units that made room for others.
    pub units_dropped: u64,
    /// Times that the cursor jumped.
    pub jumps: u32,
    /// Virtual time.
    pub took: Duration,
}

struct World {
    options: Options,
    chance: Chance,
    joint: Option<Joint<Guest>>,
    source: SourceConfig,
    destination: DestinationConfig,
    around: JointConfig,
    regions: Vec<u64>,
    outcome: Outcome,
    steps: u64,
}

/// Where the handing out of one attempt stands.
#[derive(Default)]
struct Handing {
    cursor: (u16, u64),
    held: Option<Run>,
    rounds_ended: u32,
    rounds_arrived: u32,
    rounds_planned: u32,
    stopped: bool,
    finished: bool,
    started: bool,
}

/// How an attempt ended.
enum AttemptEnd {
    Started,
    Closed { revoked: bool },
    Stuck,
}

/// Keeps a run's chances apart from those of the network's, whose seed may be the same number.
const APART: u64 = 0x5bd1_e995_9d1d_cafe;

/// Plays one run.
pub fn run(options: Options) -> Outcome {
    let mut chance = Chance::new(Chance::new(options.seed ^ APART).bits());
    let regions: Vec<u64> = (0..chance.between(1, 3)).map(|_| chance.between(40, 1_000)).collect();
    let source = source_config(&mut chance);
    let destination = DestinationConfig {
        queues_max: u16::try_from(chance.between(1, 5)).expect("small"),
        pinned_bytes_max: if chance.once_in(3) { 3 << 20 } else { u64::MAX },
    };
    let around = JointConfig {
        message: Duration::from_micros(chance.between(2, 60)),
        zeroing: Duration::from_micros(chance.below(60)),
        registering_threads: usize::try_from(chance.between(1, 3)).expect("small"),
        slots: u32::try_from(chance.between(2, 40)).expect("small"),
        closing: Duration::from_micros(chance.between(1, 20)),
    };
    let faults = match options.faults_per_million {
        0 => FaultPlan::default(),
        often => FaultPlan::random(chance.bits(), often, kinds()),
    };
    let net = Network::new(net_params(&mut chance), chance.bits(), faults);
    let guest = Guest::new(&regions, &mut chance);
    let outcome = Outcome {
        end: End::Stuck,
        violations: Vec::new(),
        attempts: 0,
        posts: 0,
        longest: 0,
        units_dropped: 0,
        jumps: 0,
        took: Duration::ZERO,
    };
    let mut world = World {
        options,
        chance,
        joint: None,
        source,
        destination,
        around,
        regions,
        outcome,
        steps: 0,
    };
    world.run(net, guest);
    world.outcome
}

fn source_config(chance: &mut Chance) -> SourceConfig {
    let size =
        |chance: &mut Chance, low, high| usize::try_from(chance.between(low, high)).expect("small");
    SourceConfig {
        chunk_bytes: 1 << 20,
        unit_chunks: 1 << chance.below(2),
        queues: u16::try_from(chance.between(1, 4)).expect("small"),
        pinning: if chance.once_in(4) { Pinning::All } else { Pinning::Dynamic },
        pinned_bytes_max: chance.between(2, 12) << 20,
        slots_max: u32::try_from(chance.between(2, 64)).expect("small"),
        registrations_max: size(chance, 1, 4),
        units_ahead: size(chance, 0, 4),
        messages_waiting_max: size(chance, 2, 64),
        unit_writes_max: if chance.once_in(6) { 1 } else { u32::MAX },
    }
}

/// A NIC that registers quickly, and is as unordered as the documents allow.
fn net_params(chance: &mut Chance) -> Params {
    let micros = Duration::from_micros;
    Params {
        skew: micros(chance.below(20)),
        placement_spread: micros(chance.below(4) * chance.below(400)),
        segment_bytes: 4096 << chance.below(6),
        retry_timeout: micros(500),
        register: (micros(chance.between(1, 20)), micros(chance.between(1, 30))),
        deregister: (micros(5), micros(5)),
        content: true,
        ..Params::ROCE_100G
    }
}

fn kinds() -> Vec<(Point, Fault)> {
    let (execute, acknowledge) = (Point::Execute(Side::A), Point::Acknowledge(Side::A));
    vec![
        (execute, Fault::Fail(Status::REMOTE_OPERATION)),
        (execute, Fault::Fail(Status::LOCAL_PROTECTION)),
        (execute, Fault::Pause { ns: 50_000 }),
        (acknowledge, Fault::Pause { ns: 50_000 }),
        (acknowledge, Fault::Fail(Status::RETRY_EXCEEDED)),
    ]
}

impl World {
    fn run(&mut self, net: Network, guest: Guest) {
        let mut parts = Some((net, guest, Instant(0)));
        let end = loop {
            let (net, guest, now) = parts.take().expect("put back");
            self.begin_attempt(net, guest, now);
            let ended = self.attempt();
            let joint = self.joint.as_mut().expect("begun");
            self.outcome.took = joint.now().since(Instant(0));
            self.outcome.units_dropped += joint.source.counters().units_dropped;
            if let Some(checker) = joint.checker() {
                self.outcome.posts += checker.posts;
                self.outcome.longest = self.outcome.longest.max(checker.longest);
                let found = checker.violations().to_vec();
                found.into_iter().for_each(|violation| self.note(violation));
            }
            match ended {
                AttemptEnd::Started => break End::Arrived,
                AttemptEnd::Stuck => break End::Stuck,
                AttemptEnd::Closed { revoked: false } if !self.options.impatient => {
                    break End::Lost;
                }
                AttemptEnd::Closed { .. } => {
                    self.take_back_unretired();
                    // By another way, or by RDMA once more, from the same dirty pages.
                    if self.options.impatient || self.chance.once_in(2) || self.outcome.attempts > 3
                    {
                        self.go_otherwise();
                        break End::ArrivedOtherwise;
                    }
                    let joint = self.joint.take().expect("begun");
                    let now = joint.now();
                    let (net, guest) = joint.into_parts();
                    parts = Some((net, guest, now));
                }
            }
        };
        self.outcome.end = end;
        if end == End::Stuck {
            self.note(Violation::Stuck);
        }
    }

    fn begin_attempt(&mut self, net: Network, guest: Guest, now: Instant) {
        self.outcome.attempts += 1;
        let (source, destination, around) = (self.source, self.destination, self.around);
        let joint = Joint::new(&self.regions, source, destination, around, net, guest, now);
        let mut joint = joint.expect("a layout that can be");
        joint.check_with(Checker::default());
        self.joint = Some(joint);
    }

    fn note(&mut self, violation: Violation) {
        if !self.outcome.violations.contains(&violation) {
            self.outcome.violations.push(violation);
        }
    }

    fn attempt(&mut self) -> AttemptEnd {
        let rounds_planned = u32::try_from(self.chance.between(1, 6)).expect("small");
        let mut handing = Handing { rounds_planned, ..Handing::default() };
        for _ in 0..STEPS_MAX {
            self.steps += 1;
            if self.options.cut_at == Some(self.steps) {
                self.joint().cut();
            }
            self.joint().pump();
            if let Some(end) = self.take_notes(&mut handing) {
                return end;
            }
            if self.options.impatient && self.joint().source.cause().is_some() {
                self.take_back_held(&mut handing);
                return AttemptEnd::Closed { revoked: false };
            }
            if self.joint().source.is_open() {
                self.hand_out(&mut handing);
            }
            self.check_budget();
            if !handing.stopped && self.chance.once_in(2) {
                let joint = self.joint.as_mut().expect("begun");
                joint.memory.run(&mut self.chance);
            }
            if !self.advance() {
                return AttemptEnd::Stuck;
            }
        }
        AttemptEnd::Stuck
    }

    fn joint(&mut self) -> &mut Joint<Guest> {
        self.joint.as_mut().expect("an attempt is under way")
    }

    /// To the next event, or only a little further. False if nothing will ever happen.
    fn advance(&mut self) -> bool {
        let little = self.chance.below(2_000);
        let short = self.chance.once_in(3);
        let joint = self.joint();
        let now = joint.now();
        let to = match joint.next_event() {
            Some(at) if !short => at.max(now),
            Some(at) => at.min(now.after(Duration::from_nanos(little))).max(now),
            None if joint.source.is_open() => now.after(Duration::from_nanos(little)),
            None => return false,
        };
        joint.advance(to);
        true
    }

    fn take_notes(&mut self, handing: &mut Handing) -> Option<AttemptEnd> {
        while let Some(note) = self.joint().take_note() {
            match note {
                Note::Drained(Drain::Jump) => {
                    // To where the guest works, as an urgent page wants; at last to the start.
                    let World { joint, chance, .. } = self;
                    let wanted = joint.as_ref().expect("begun").memory.urgent_page(chance);
                    handing.cursor = if handing.stopped { (0, 0) } else { wanted };
                    self.outcome.jumps += 1;
                }
                Note::Drained(Drain::Round { .. }) => {
                    handing.cursor = (0, 0);
                    handing.stopped = handing.rounds_ended >= handing.rounds_planned;
                }
                Note::Finished => handing.finished = true,
                Note::RoundArrived { last: true, .. } => {
                    handing.started = true;
                    self.check_start();
                }
                Note::RoundArrived { round, last: false } => handing.rounds_arrived = round + 1,
                Note::SourceClosed { revoked } => {
                    self.take_back_held(handing);
                    return Some(AttemptEnd::Closed { revoked });
                }
                Note::DestinationClosed => {}
            }
        }
        (handing.started && handing.finished).then_some(AttemptEnd::Started)
    }

    fn hand_out(&mut self, handing: &mut Handing) {
        let World { joint, chance, .. } = self;
        let joint = joint.as_mut().expect("begun");
        let memory = &joint.memory;
        joint.source.prefetch(|pages| memory.is_dirty_within(pages));
        for _ in 0..chance.between(1, 4) {
            let most = u32::try_from(chance.between(1, 700)).expect("small");
            let next = handing.held.take().or_else(|| joint.memory.take_run(handing.cursor, most));
            let Some(mut run) = next else {
                // The next round's end comes only when the destination has this one's.
                if handing.rounds_arrived == handing.rounds_ended {
                    joint.source.end_round(handing.stopped);
                    handing.rounds_ended += 1;
                }
                return;
            };
            let (first, count) = (run.first_page, run.count);
            let offered = joint.source.offer(&mut run);
            let taken = u64::from(count - run.count);
            if run.kind == RunKind::Zero
                && let Some(pages) = joint.source.layout().pages(run.region, first, taken)
                && let Some(checker) = joint.checker()
            {
                checker.on_zero_taken(pages);
            }
            handing.cursor = (run.region.0, run.first_page);
            if offered == Offered::Full {
                handing.held = Some(run);
                return;
            }
            if chance.once_in(25) {
                joint.source.jump();
                return;
            }
        }
    }

    fn take_back_held(&mut self, handing: &mut Handing) {
        if let Some(run) = handing.held.take() {
            let count = u64::from(run.count);
            self.joint().memory.mark_dirty(run.region, run.first_page, count);
        }
    }

    fn check_budget(&mut self) {
        let all = self.regions.iter().sum::<u64>() * 4096;
        let least = 2 * self.joint().source.layout().unit_bytes();
        let most = match self.source.pinning {
            Pinning::All if self.destination.pinned_bytes_max >= all => u64::MAX,
            Pinning::All => self.destination.pinned_bytes_max.max(least),
            Pinning::Dynamic => {
                self.source.pinned_bytes_max.min(self.destination.pinned_bytes_max).max(least)
            }
        };
        if self.joint().destination().pinned_bytes() > most {
            self.note(Violation::OverBudget);
        }
    }

    /// The guest starts at the destination now.
    fn check_start(&mut self) {
        if !self.joint().memory.is_equal() {
            self.note(Violation::StalePage);
        }
        if self.joint().writable() > 0 {
            self.note(Violation::KeyOutlivesStart);
        }
        self.watch_after_start();
    }

    /// From here on nothing that the source does may be seen.
    fn watch_after_start(&mut self) {
        let before = self.joint().memory.arrived();
        self.joint().memory.scribble();
        self.joint().attack();
        let until = self.joint().now().after(Duration::from_millis(2));
        while let Some(at) = self.joint().next_event().filter(|at| *at <= until) {
            self.joint().advance(at);
            self.joint().pump();
        }
        if self.joint().memory.arrived() != before {
            self.note(Violation::WrittenAfterStart);
        }
    }

    fn take_back_unretired(&mut self) {
        let joint = self.joint();
        let again: Vec<_> = joint.source.unretired().collect();
        for pages in again {
            joint.memory.mark_dirty(pages.region(), pages.first_page(), pages.pages());
        }
    }

    /// The rest goes by a stream, which is simpler: a page is there when it is sent.
    fn go_otherwise(&mut self) {
        let rounds = self.chance.between(1, 3);
        for round in 0..=rounds {
            let mut cursor = (0, 0);
            while let Some(run) = self.joint().memory.take_run(cursor, 64) {
                self.joint().memory.copy_run(&run);
                cursor = (run.region.0, run.first_page + u64::from(run.count));
                if round < rounds && self.chance.once_in(3) {
                    let World { joint, chance, .. } = self;
                    joint.as_mut().expect("begun").memory.run(chance);
                }
                let now = self.joint().now().after(Duration::from_nanos(500));
                self.joint().advance(now);
                self.joint().pump();
            }
        }
        // The bitmap is walked once more, as the guest is stopped now.
        while let Some(run) = self.joint().memory.take_run((0, 0), 64) {
            self.joint().memory.copy_run(&run);
        }
        if !self.joint().memory.is_equal() {
            self.note(Violation::StalePage);
        }
        self.watch_after_start();
    }
}

/// The longest time from the loss of everything to the end of both machines.
pub const LOSS_MAX: Duration = HEARTBEAT_DEADLINE.saturating_mul(2);
