//! A gate that has nothing to give now may have something after a pause.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, OpenGate, PlainCheck, Setup};
use martlet_dsa::{Ask, Gate, Grant, Outcome, ZeroEngine};
use martlet_units::Instant;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Refuses every other time.
struct Moody {
    open: OpenGate,
    asked: AtomicU32,
    pause: Duration,
}

impl Gate for Moody {
    fn admit(&self, now: Instant, ask: Ask) -> Option<Grant> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        (asked % 2 == 1).then(|| self.open.admit(now, ask)).flatten()
    }

    fn pause(&self, _pages: u32) -> Duration {
        self.pause
    }

    fn finish(&self, now: Instant, grant: Grant, outcome: Outcome) {
        self.open.finish(now, grant, outcome);
    }

    fn cpu(&self, _pages: u32, _time: Duration) {}
}

fn device_pages(pause: Duration) -> u64 {
    let bench = Bench::new(Setup::default());
    let open = OpenGate::new(bench.queues.len(), 5);
    let gate = Arc::new(Moody { open, asked: AtomicU32::new(0), pause });
    let (queues, memory) = (bench.queues.clone(), Arc::clone(&bench.memory));
    let config = Setup::default().engine;
    let mut engine =
        ZeroEngine::new(config, queues, gate, memory, &*bench.bus, PlainCheck).unwrap();
    bench.assert_right(&mut engine, 0, 512);
    engine.stats().device_pages
}

#[test]
fn a_refused_batch_is_offered_again_after_the_pause() {
    assert_eq!(device_pages(Duration::from_micros(20)), 512);
    assert!(device_pages(Duration::ZERO) < 512);
}
