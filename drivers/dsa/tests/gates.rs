//! What a gate may say, and what an engine makes of it.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, Setup, fill_some};
use martlet_dsa::{
    Ask, CompletionWait, EngineConfig, Gate, Grant, Latency, Outcome, StatusByte, WorkQueue,
};
use martlet_dsa_model::{Fault, FaultPoint, Faults, QueueConfig};
use martlet_units::Instant;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A gate that does as it is told, and keeps books.
struct Script {
    /// How much of what is asked for is granted, in percent; nothing below the least.
    percent: u32,
    /// No leave while something is pending.
    one_at_a_time: bool,
    log: Mutex<Vec<(Ask, Option<Outcome>)>>,
    cpu: Mutex<(u32, Duration)>,
}

impl Script {
    fn new(percent: u32, one_at_a_time: bool) -> Arc<Script> {
        let (log, cpu) = (Mutex::default(), Mutex::default());
        Arc::new(Script { percent, one_at_a_time, log, cpu })
    }

    fn outcomes(&self) -> Vec<Outcome> {
        let log = self.log.lock().unwrap();
        log.iter().map(|(_, outcome)| outcome.expect("every grant is finished")).collect()
    }
}

impl Gate for Script {
    fn admit(&self, now: Instant, ask: Ask) -> Option<Grant> {
        let pages = ask.pages * self.percent / 100;
        if pages < ask.pages_min || (self.one_at_a_time && ask.has_pending) {
            return None;
        }
        let mut log = self.log.lock().unwrap();
        log.push((ask, None));
        let ahead = (log.len() - 1) as u64;
        Some(Grant { queue: 0, tries: 2, pages, ahead, at: now })
    }

    fn asks_again(&self) -> bool {
        self.one_at_a_time
    }

    fn finish(&self, _now: Instant, grant: Grant, outcome: Outcome) {
        let mut log = self.log.lock().unwrap();
        let (_, place) = &mut log[usize::try_from(grant.ahead).unwrap()];
        assert_eq!(place.replace(outcome), None, "every grant is finished once");
    }

    fn cpu(&self, pages: u32, time: Duration) {
        let mut cpu = self.cpu.lock().unwrap();
        *cpu = (cpu.0 + pages, cpu.1 + time);
    }
}

fn bench_with(gate: &Arc<Script>, setup: Setup) -> Bench {
    let mut bench = Bench::new(setup);
    bench.gate = Arc::clone(gate) as Arc<dyn Gate>;
    fill_some(&bench.guest, 512);
    bench
}

#[test]
fn what_is_not_granted_is_checked_meanwhile() {
    let gate = Script::new(40, false);
    let bench = bench_with(&gate, Setup::default());
    let mut engine = bench.engine();
    (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    // 51 of each 128 pages.
    assert_eq!(engine.stats().device_pages, 3 * 4 * 51);
    assert_eq!(engine.stats().cpu_pages, 3 * 4 * 77);
    assert_eq!(gate.cpu.lock().unwrap().0, 0, "virtual time measures no CPU");
    let (ask, _) = gate.log.lock().unwrap()[0];
    assert_eq!((ask.pages, ask.pages_min, ask.has_pending), (128, 1, false));
}

/// On a clock that runs, the CPU's share is measured.
#[test]
fn the_cpus_time_is_told() {
    let gate = Script::new(0, false);
    let mut bench = bench_with(&gate, Setup::default());
    let clock = Arc::new(Ticking(std::sync::atomic::AtomicU64::new(1)));
    let (portal, limits) = (bench.models[0].portal(0).unwrap(), bench.queues[0].limits());
    bench.queues = vec![WorkQueue::new("wq0.0", Box::new(portal), clock, limits)];
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 512);
    bench.assert_right(&mut engine, 0, 10);
    let (pages, time) = *gate.cpu.lock().unwrap();
    assert_eq!(pages, 512, "ten pages are too few");
    assert!(time > Duration::ZERO);
}

/// A clock that goes on whenever it is read.
struct Ticking(std::sync::atomic::AtomicU64);

impl CompletionWait for Ticking {
    fn now(&self) -> Instant {
        Instant(self.0.fetch_add(1000, std::sync::atomic::Ordering::Relaxed))
    }

    fn poll(&self) {}

    fn wait(&self, _status: StatusByte<'_>, _until: Instant) {}

    fn let_pass(&self, _time: Duration) {}
}

#[test]
fn a_grant_cuts_a_range_in_two() {
    let gate = Script::new(50, false);
    let bench = bench_with(&gate, Setup::default());
    (0..512).for_each(|page| (0..4096).for_each(|at| bench.guest.write(page, at, 0)));
    let mut engine = bench.engine();
    (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    bench.guest.write(70, 0, 1);
    bench.assert_right(&mut engine, 3, 509);
    bench.assert_right(&mut engine, 0, 7);
    let told: u32 = gate.log.lock().unwrap().iter().map(|(ask, _)| ask.pages).sum();
    let stats = engine.stats();
    assert!(stats.device_pages <= u64::from(told) / 2 + 1, "{stats:?}, asked for {told}");
}

/// With leave for one batch at a time the engine waits for its own, and the CPU does nothing.
#[test]
fn an_engine_waits_for_its_own_pages_where_the_gate_wants_it() {
    let gate = Script::new(100, true);
    let bench = bench_with(&gate, Setup::default());
    let mut engine = bench.engine();
    for _ in 0..3 {
        engine.begin(&[bench.guest.run(0, 512)]);
        engine.begin(&[bench.guest.run(100, 300)]);
        bench.assert_answer(&engine.collect().unwrap(), 0, 512);
        bench.assert_answer(&engine.collect().unwrap(), 100, 300);
    }
    assert_eq!(engine.stats().cpu_pages, 0);
    let outcomes = gate.outcomes();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Completed { .. })));
}

/// 128 pages are one grant and four batches of 32: the gate hears once, when the last one is done.
#[test]
fn a_grant_of_several_batches_is_finished_once() {
    let gate = Script::new(100, false);
    let bench = bench_with(&gate, Setup::with_queue(QueueConfig::shared(64)));
    (0..512).step_by(2).for_each(|page| bench.guest.write(page, 0, 1));
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 128);
    assert_eq!(bench.model().counters().batches, 4);
    let [Outcome::Completed { latency: Latency::Measured(took), faulted: 0 }] = gate.outcomes()[..]
    else {
        panic!("{:?}", gate.outcomes())
    };
    assert!(took > Duration::from_micros(5) && took < Duration::from_micros(25), "{took:?}");
    // One of the four fails: so has the grant.
    bench.model().set_faults(Faults::once(
        FaultPoint::Batch,
        2,
        Fault::Status(martlet_dsa_abi::Status::HARDWARE),
    ));
    bench.assert_right(&mut engine, 0, 128);
    assert_eq!(gate.outcomes()[1], Outcome::Failed);
    // One of the four hangs.
    bench.model().set_faults(Faults::once(FaultPoint::Batch, 1, Fault::Hang));
    bench.assert_right(&mut engine, 0, 128);
    assert_eq!(gate.outcomes()[2], Outcome::TimedOut);
}

/// The queue takes two of four batches: the CPU does the others, and the gate hears of it.
#[test]
fn a_grant_that_is_taken_in_part_is_a_sign_of_a_full_queue() {
    let gate = Script::new(100, false);
    let bench = bench_with(&gate, Setup::with_queue(QueueConfig::shared(64)));
    (0..512).step_by(2).for_each(|page| bench.guest.write(page, 0, 1));
    let full =
        martlet_fault_plan::Rule { at: FaultPoint::Submit, skip: 2, times: 2, fault: Fault::Retry };
    bench.model().set_faults(Faults::script([full]));
    let engine = EngineConfig { offload_pages_min: 1, ..EngineConfig::default() };
    let mut engine = bench.engine_with(engine);
    bench.assert_right(&mut engine, 0, 128);
    assert_eq!((engine.stats().device_pages, engine.stats().cpu_pages), (64, 64));
    assert_eq!(gate.outcomes(), [Outcome::Rejected]);
}

#[test]
fn an_engine_without_queues_is_the_cpu() {
    let mut bench = Bench::new(Setup::default());
    bench.queues.clear();
    fill_some(&bench.guest, 512);
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 512);
    assert_eq!((engine.stats().cpu_pages, engine.stats().batches), (512, 0));
}
