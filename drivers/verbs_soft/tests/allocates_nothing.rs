//! The data path of the soft provider allocates nothing once it runs, on any of its threads.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code)]
// UNSAFETY: counts what goes through the allocator, and names a buffer of the test as memory.

use martlet_device_io::HostMemory;
use martlet_verbs::conformance::{Connected, Loopback, Site};
use martlet_verbs::{
    Access, Completion, Endpoint, Fabric, Flush, Operation, QueuePair, Region, SendWindow, Setup,
    Sge, Status, WorkId, WorkRequest,
};
use martlet_verbs_soft::{Soft, SoftPair};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is the system's allocator's; only a number is kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Relaxed: only a number.
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as this function's caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as this function's caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const PAGES: u64 = 256;

fn memory() -> HostMemory {
    let words: Arc<Vec<AtomicU64>> = Arc::new((0..PAGES * 512).map(AtomicU64::new).collect());
    let address = words.as_ptr().expose_provenance() as u64;
    // SAFETY: the vector's buffer stays where it is until its owner is dropped.
    unsafe { HostMemory::new(address, PAGES * 4096, words) }
}

struct Poster<'a> {
    pair: &'a mut SoftPair,
    window: SendWindow,
    list: Vec<WorkRequest>,
}

impl Poster<'_> {
    /// Writes, reads and tells, `count` times in all, and drains.
    fn run(&mut self, count: u64, request: impl Fn(u64) -> WorkRequest) {
        let mut next = 0;
        while next < count || self.window.in_flight() > 0 {
            self.list.clear();
            while next < count
                && let Some((id, signal)) = self.window.take(Flush::Last)
            {
                self.list.push(WorkRequest { id, signal, ..request(next) });
                next += 1;
            }
            self.pair.post(&self.list).unwrap();
            let mut places = [Completion::default(); 16];
            self.pair.arm().unwrap();
            let got = self.pair.poll(&mut places).unwrap();
            for completion in &places[..got] {
                assert_eq!(completion.status, Status::SUCCESS);
                self.window.on_completion(completion);
            }
            if got == 0 {
                self.pair.wait(Duration::from_secs(1)).unwrap();
            }
        }
    }
}

#[test]
fn a_running_connection_allocates_nothing() {
    let at = Endpoint::Ip("127.0.0.1:0".parse().unwrap());
    let site = Loopback { source: Soft::new(), target: Soft::new(), at };
    let setup = Setup { send_slots: 64, completion_slots: 64, ..Setup::default() };
    let Connected { mut source, mut target, .. } = site.connect(&setup, &setup, &[], &[]).unwrap();
    let from = site.source().register(&memory(), Access::LOCAL_WRITE).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let to = site.target().register(&memory(), access).unwrap();
    let request = |number: u64| {
        let at = number * 97 % PAGES * 4096;
        let (remote, key) = (martlet_verbs::RemoteAddress(to.address().0 + at), to.remote_key());
        let operation = match number % 8 {
            0 => Operation::Read { from: remote, key },
            _ => Operation::Write { to: remote, key },
        };
        let local = Sge { address: from.address().0 + at, bytes: 4096, key: from.local_key() };
        WorkRequest { operation, local, ..WorkRequest::marker(WorkId(0)) }
    };
    let list = Vec::with_capacity(64);
    let mut poster = Poster { pair: &mut source, window: SendWindow::new(64), list };
    poster.run(500, request);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    poster.run(5000, request);
    target.post_receives(&[WorkId(1), WorkId(2)]).unwrap();
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
}
