//! Checking pages allocates nothing after an engine was made, whatever goes wrong.
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests")]
// UNSAFETY: an allocator that counts.

mod bench;

use bench::{Bench, OpenGate, Setup, fill_some};
use martlet_device_io::{DESCRIPTOR_BYTES, Portal, Submission};
use martlet_dsa::{WorkQueue, ZeroEngine};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

struct Counting;

thread_local! {
    /// Whether this thread's allocations count, and how many there were.
    static COUNT: Cell<Option<u64>> = const { Cell::new(None) };
}

// SAFETY: everything is the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get().map(|count| count + 1)));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The model allocates, so its part is not counted.
fn uncounted<T>(body: impl FnOnce() -> T) -> T {
    let before = COUNT.with(|count| count.replace(None));
    let result = body();
    COUNT.with(|count| count.set(before));
    result
}

struct UncountedPortal(Box<dyn Portal>);

impl Portal for UncountedPortal {
    fn submit(&self, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Submission {
        uncounted(|| self.0.submit(descriptor))
    }
}

struct UncountedWait(martlet_dsa::SeatWait);

impl martlet_dsa::CompletionWait for UncountedWait {
    fn now(&self) -> martlet_units::Instant {
        self.0.now()
    }

    fn poll(&self) {
        uncounted(|| self.0.poll());
    }

    fn wait(&self, status: martlet_dsa::StatusByte<'_>, until: martlet_units::Instant) {
        uncounted(|| self.0.wait(status, until));
    }

    fn let_pass(&self, time: std::time::Duration) {
        uncounted(|| self.0.let_pass(time));
    }
}

#[test]
fn scanning_allocates_nothing() {
    use martlet_dsa_model::{Fault, FaultPoint};
    let bench = Bench::new(Setup::default());
    fill_some(&bench.guest, 512);
    let seat = bench.stage.seat(bench.models[0].clone());
    let wait = Arc::new(UncountedWait(martlet_dsa::SeatWait::new(seat)));
    let portal = Box::new(UncountedPortal(Box::new(bench.models[0].portal(0).unwrap())));
    let queue = WorkQueue::new("wq0.0", portal, wait, bench.queues[0].limits());
    let gate = Arc::new(OpenGate::new(1, 3));
    let (config, memory) = (Default::default(), bench.memory.clone());
    let check = bench::PlainCheck;
    let mut engine =
        ZeroEngine::new(config, vec![queue], gate, memory, &*bench.bus, check).unwrap();
    let runs = [bench.guest.run(0, 300), bench.guest.run(400, 100)];
    for fault in
        [None, Some(Fault::PageFault { after: 0 }), Some(Fault::NoRecord), Some(Fault::Hang)]
    {
        if let Some(fault) = fault {
            let faults = martlet_dsa_model::Faults::once(FaultPoint::Operation, 3, fault);
            bench.model().set_faults(faults);
        }
        COUNT.with(|count| count.set(Some(0)));
        for _ in 0..3 {
            engine.begin(&runs);
            engine.begin(&runs[..1]);
            engine.collect().unwrap();
            engine.collect().unwrap();
        }
        let count = COUNT.with(|count| count.replace(None));
        assert_eq!(count, Some(0), "{fault:?}");
    }
    assert!(engine.stats().device_pages > 0 && engine.stats().timed_out > 0);
}
