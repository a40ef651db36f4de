//! How long the last pages of a large idle guest take on a modelled 100 Gbit/s NIC.
//!
//! Three ways to do it: `before`, as RDMA migration worked until 2026 (one write in flight in each
//! chunk, a drain behind each slice, registration in the middle of the sending); `after`, as the
//! public series by Yanfei Xu has it (many in flight, a drain behind each round); `martlet`, which
//! registers ahead of its cursor and in the background. All three are the same machine with
//! different limits, driven over [`martlet_verbs_model`] by a program whose own time is modelled.
//!
//! The series' cover letter reports this table (32 vCPUs, 128 GiB, idle, 32 MiB chunks,
//! 100 Gbit/s, mean of 10 runs):
//!
//! | | pin-all before | after | dynamic before | after |
//! |---|---|---|---|---|
//! | downtime, ms | 396.7 | 345.7 | 248.7 | 191.1 |
//! | final iterable, MiB/s | 9952 | 11639 | 5605 | 9826 |
//!
//! [`Constants`] says where each number of the model comes from. Two of them are fitted to two of
//! the four bandwidths; the other two follow.

use crate::joint::{Joint, JointConfig, Note};
use martlet_fault_plan::FaultPlan;
use martlet_ram::{RegionIndex, Run, RunKind};
use martlet_rdma::{DestinationConfig, Drain, Offered, PageSpan, SourceConfig};
use martlet_units::{Instant, PAGE_SIZE};
use martlet_verbs_model::{Network, NoMemory, Params};
use martlet_wire::rdma::Pinning;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Pages that the program looks at between two offers: a chunk of `martlet_ram`, 2 MiB.
const STEP_PAGES: u64 = 512;

/// The model's numbers beside those of the NIC, which are [`Params::ROCE_100G`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// The NIC and the link.
    pub nic: Params,
    /// Guest memory: the series' guest.
    pub memory_bytes: u64,
    /// The series' chunk.
    pub chunk_bytes: u64,
    /// The final set and the rest of the downtime with everything pinned. Solved from the cover
    /// letter: `downtime = set / bandwidth + rest` has to hold before and after with one set and
    /// one rest. 3501 MiB is the default downtime limit of 300 ms at 11 639 MiB/s, so the guest
    /// was stopped when that much of the first round was left.
    pub pin_all_final: (u64, Duration),
    /// The same, registered on demand.
    pub dynamic_final: (u64, Duration),
    /// The older program's time for a page: walking the bitmap, merging. Fitted to "dynamic, after",
    /// which is bound by it and by the registration: 80 ns.
    pub scan_page: Duration,
    /// From a completion to the program that sleeps on it: interrupt, event channel, poll(2), wake.
    /// Fitted to "pin-all, before", where every message waits for it: 28 µs, within the usual 10
    /// to 30.
    pub sleeping_completion: Duration,
    /// A message of the older program, one way. It goes by SEND with a credit of one, so each way
    /// is a wait for the peer's credit and one for the own completion, each a wake-up: 60 µs.
    pub credit_message: Duration,
    /// Longest slice of the older program between two drains: 50 ms.
    pub slice: Duration,
    /// Ours for a page: the scanner, and the zero check, which for a page with content is one read
    /// that misses the caches: 100 ns.
    pub martlet_page: Duration,
    /// Our message, one way: a small TCP segment and a thread's wake-up, 30 µs.
    pub martlet_message: Duration,
    /// Our threads that register memory, on each side.
    pub martlet_threads: usize,
}

impl Constants {
    /// As documented at the fields.
    pub const SERIES: Constants = Constants {
        nic: Params::ROCE_100G,
        memory_bytes: 128 << 30,
        chunk_bytes: 32 * MIB,
        pin_all_final: (3_501 * MIB, Duration::from_micros(44_800)),
        dynamic_final: (752 * MIB, Duration::from_micros(114_600)),
        scan_page: Duration::from_nanos(80),
        sleeping_completion: Duration::from_micros(28),
        credit_message: Duration::from_micros(60),
        slice: Duration::from_millis(50),
        martlet_page: Duration::from_nanos(100),
        martlet_message: Duration::from_micros(30),
        martlet_threads: 4,
    };

    /// What nobody can beat: the set's bytes at the link's rate, and the rest.
    pub fn least_downtime_ms(&self, pinning: Pinning) -> f64 {
        let (bytes, rest) = self.last(pinning);
        millis(rest) + bytes_f64(bytes) * 8_000.0 / bytes_f64(self.nic.line_bits_per_sec)
    }

    fn last(&self, pinning: Pinning) -> (u64, Duration) {
        match pinning {
            Pinning::All => self.pin_all_final,
            Pinning::Dynamic => self.dynamic_final,
        }
    }
}

/// One cell of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// How long the guest stands still.
    pub downtime_ms: f64,
    /// The final set's bytes by the time that it took, in MiB a second.
    pub mib_s: f64,
}

/// One half of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Half {
    /// One write in flight in each chunk.
    pub before: Cell,
    /// Many.
    pub after: Cell,
    /// Ours.
    pub martlet: Cell,
}

/// The table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Table {
    /// All memory registered at the start.
    pub pin_all: Half,
    /// Memory registered when it is first needed.
    pub dynamic: Half,
}

/// Computes the table. Takes about a second; the result depends on nothing but the constants.
pub fn table(constants: &Constants) -> Table {
    let half = |pinning| Half {
        before: cell(constants, Way::Before, pinning),
        after: cell(constants, Way::After, pinning),
        martlet: cell(constants, Way::Martlet, pinning),
    };
    Table { pin_all: half(Pinning::All), dynamic: half(Pinning::Dynamic) }
}

/// A way to send memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Before,
    After,
    Martlet,
}

impl Way {
    fn source(self, constants: &Constants, pinning: Pinning) -> SourceConfig {
        let chunk_bytes = constants.chunk_bytes;
        match self {
            Way::Before | Way::After => SourceConfig {
                chunk_bytes,
                unit_chunks: 1,
                queues: 1,
                pinning,
                // Nothing was ever given back before the end.
                pinned_bytes_max: u64::MAX,
                slots_max: 512,
                registrations_max: if pinning == Pinning::All { 64 } else { 1 },
                units_ahead: 0,
                messages_waiting_max: if self == Way::Before { 1 } else { 512 },
                unit_writes_max: if self == Way::Before { 1 } else { u32::MAX },
            },
            Way::Martlet => SourceConfig {
                chunk_bytes,
                // With everything pinned larger registrations cost nothing.
                unit_chunks: if pinning == Pinning::All { 32 } else { 1 },
                pinning,
                ..SourceConfig::DEFAULT
            },
        }
    }

    fn around(self, constants: &Constants) -> JointConfig {
        let is_ours = self == Way::Martlet;
        JointConfig {
            message: if is_ours { constants.martlet_message } else { constants.credit_message },
            zeroing: Duration::ZERO,
            registering_threads: if is_ours { constants.martlet_threads } else { 1 },
            slots: 512,
            closing: Duration::from_micros(20),
        }
    }

    /// The NIC's constants: whoever polls sees a completion at once, whoever sleeps does not.
    fn nic(self, constants: &Constants) -> Params {
        match self {
            Way::Before | Way::After => {
                Params { completion: constants.sleeping_completion, ..constants.nic }
            }
            Way::Martlet => constants.nic,
        }
    }
}

fn cell(constants: &Constants, way: Way, pinning: Pinning) -> Cell {
    let (last_bytes, rest) = constants.last(pinning);
    let mut program = Program::start(constants, way, pinning);
    let pages = constants.memory_bytes / PAGE_SIZE;
    let last_from = pages - last_bytes / PAGE_SIZE;
    program.send(0..last_from);
    program.settle(last_from..pages);
    let took = program.send_last(last_from..pages);
    let mib_s = bytes_f64(last_bytes) / bytes_f64(MIB) / took.as_secs_f64();
    Cell { downtime_ms: millis(took + rest), mib_s }
}

/// The source's program: one thread that hands out pages, and its time.
struct Program {
    joint: Joint<NoMemory>,
    way: Way,
    pinning: Pinning,
    page: Duration,
    slice: Option<Duration>,
    slice_began: Instant,
}

impl Program {
    /// Connected, and with everything pinned if that is wanted.
    fn start(constants: &Constants, way: Way, pinning: Pinning) -> Program {
        let net = Network::new(way.nic(constants), 0, FaultPlan::default());
        let regions = [constants.memory_bytes / PAGE_SIZE];
        let joint = Joint::new(
            &regions,
            way.source(constants, pinning),
            DestinationConfig::DEFAULT,
            way.around(constants),
            net,
            NoMemory,
            Instant(0),
        );
        let mut program = Program {
            joint: joint.expect("the series' memory can be cut"),
            way,
            pinning,
            page: match way {
                Way::Before | Way::After => constants.scan_page,
                Way::Martlet => constants.martlet_page,
            },
            slice: (way == Way::Before).then_some(constants.slice),
            slice_began: Instant(0),
        };
        program.joint.pump();
        program.wait_until(|joint| joint.source.is_open());
        if pinning == Pinning::All {
            let all: Vec<PageSpan> = {
                let layout = program.joint.source.layout();
                layout.all_units().map(|unit| layout.unit_pages_of(unit)).collect()
            };
            program.wait_until(|joint| {
                joint.source.prefetch(|_| true);
                all.iter().all(|pages| joint.source.is_registered(*pages))
            });
        }
        program.slice_began = program.joint.now();
        program
    }

    /// Hands out pages, as fast as they are taken.
    fn send(&mut self, pages: std::ops::Range<u64>) {
        let mut next = pages.start;
        while next < pages.end {
            let end = ((next / STEP_PAGES + 1) * STEP_PAGES).min(pages.end);
            let steps = u32::try_from(end - next).expect("a step");
            self.work(self.page * steps);
            if self.way == Way::Martlet {
                let ahead = |unit: PageSpan| unit.end() > next;
                self.joint.source.prefetch(ahead);
                self.joint.pump();
            } else if self.pinning == Pinning::Dynamic {
                self.register_now(next);
            }
            self.offer(Run {
                region: RegionIndex(0),
                kind: RunKind::Data,
                first_page: next,
                count: steps,
            });
            next = end;
            self.end_slice();
        }
    }

    /// The program does nothing else for so long; the NIC and the other threads go on.
    fn work(&mut self, time: Duration) {
        let until = self.joint.now().after(time);
        self.joint.wake_at(until);
        self.wait_until(|joint| joint.now() >= until);
    }

    /// Registers the chunk of a page and waits for it.
    fn register_now(&mut self, page: u64) {
        let first = self.joint.source.layout().pages(RegionIndex(0), page, 1);
        let first = first.expect("a page of the guest");
        if !self.joint.source.is_registered(first) {
            self.joint.source.expect(first);
            self.joint.pump();
            self.wait_until(|joint| joint.source.is_registered(first));
        }
    }

    fn offer(&mut self, mut run: Run) {
        while self.joint.source.offer(&mut run) == Offered::Full {
            self.joint.pump();
            self.step();
        }
        self.joint.pump();
        if self.way == Way::Before {
            // The program sleeps until the chunk's last write is done and this one is posted.
            self.wait_until(|joint| joint.source.counters().messages_waiting == 0);
        }
    }

    fn end_slice(&mut self) {
        let Some(slice) = self.slice else { return };
        if self.joint.now().since(self.slice_began) >= slice {
            self.joint.source.jump();
            self.wait_for(Note::Drained(Drain::Jump));
            self.slice_began = self.joint.now();
        }
    }

    /// Before the stop. The older program stops between two slices, with nothing left over: its
    /// measured 97.6 Gbit/s afterwards leave no room for a backlog. Ours ends the round, and while the guest still runs has the first units of
    /// what is dirty registered: the time between the decision and the stop is enough for that.
    fn settle(&mut self, dirty: std::ops::Range<u64>) {
        match self.way {
            Way::Before | Way::After => {
                self.joint.source.jump();
                self.wait_for(Note::Drained(Drain::Jump));
                self.slice = None;
            }
            Way::Martlet => {
                self.joint.source.end_round(false);
                self.wait_for(Note::Drained(Drain::Round { round: 0, last: false }));
                for _ in 0..20 {
                    self.joint.source.prefetch(|unit| unit.end() > dirty.start);
                    self.joint.pump();
                    self.work(Duration::from_micros(500));
                }
            }
        }
    }

    /// The last pages; how long until the destination has them.
    fn send_last(&mut self, pages: std::ops::Range<u64>) -> Duration {
        let stopped = self.joint.now();
        self.send(pages);
        self.joint.source.end_round(true);
        self.joint.pump();
        let (mut finished, mut arrived) = (false, false);
        while !(finished && arrived) {
            match self.joint.take_note() {
                Some(Note::Finished) => finished = true,
                Some(Note::RoundArrived { last: true, .. }) => arrived = true,
                Some(_) => {}
                None => self.step(),
            }
        }
        self.joint.now().since(stopped)
    }

    fn wait_for(&mut self, note: Note) {
        self.joint.pump();
        loop {
            match self.joint.take_note() {
                Some(found) if found == note => return,
                Some(_) => {}
                None => self.step(),
            }
        }
    }

    fn wait_until(&mut self, mut is_so: impl FnMut(&mut Joint<NoMemory>) -> bool) {
        while !is_so(&mut self.joint) {
            self.step();
        }
    }

    fn step(&mut self) {
        let at = self.joint.next_event().expect("something is under way");
        self.joint.advance(at);
        self.joint.pump();
        assert!(self.joint.source.cause().is_none(), "{:?}", self.joint.source.cause());
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a guest, for a ratio")]
fn bytes_f64(bytes: u64) -> f64 {
    bytes as f64
}
