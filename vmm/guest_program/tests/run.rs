//! Runs the program's bytes as threads of this process and does to its memory what a bad
//! migration would do. The handler of the fault that a port write raises here plays the VMM.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
#![allow(unsafe_code)]
// UNSAFETY: maps guest memory, executes it, and reads registers in a signal handler.

use martlet_guest_program::{
    BEAT, GuestCounters, HEARTBEAT_PORT, Plan, ProgramParams, READY, WRONG_PAGE_PORT, page_word,
    read_counters,
};
use martlet_units::{Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// What the handler knows of a guest. Guests live until the process ends.
#[derive(Default)]
struct Guest {
    base: u64,
    end: u64,
    /// Frame of each page of memory, without holes.
    frames: Vec<u64>,
    vcpus: u16,
    pause: AtomicBool,
    paused: AtomicU32,
    ready: AtomicU32,
    beats: AtomicU64,
    wrong_frame: AtomicU64,
    unexpected: AtomicU64,
}

static GUESTS: [OnceLock<Guest>; 8] = [const { OnceLock::new() }; 8];

fn guests() -> impl Iterator<Item = &'static Guest> {
    GUESTS.iter().filter_map(OnceLock::get)
}

extern "C" fn on_fault(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context of the thread that faulted.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let registers = &mut context.uc_mcontext.gregs;
    let mut register = |index: libc::c_int| &raw mut registers[usize::try_from(index).unwrap()];
    let (rip, rax) = (register(libc::REG_RIP), register(libc::REG_RAX));
    let rdx = register(libc::REG_RDX);
    // SAFETY: the three point into the context, as no other reference does now.
    let (at, value, port) = unsafe { (*rip as u64, *rax as u64, *rdx as u16) };
    let Some(guest) = guests().find(|g| (g.base..g.end).contains(&at)) else {
        // SAFETY: not the guest's fault: end as if nobody had listened.
        unsafe { libc::abort() }
    };
    // SAFETY: the guest's code is mapped.
    match (unsafe { *(at as *const u8) }, port) {
        (0xee, HEARTBEAT_PORT) if value as u8 == READY => guest.ready.fetch_add(1, SeqCst).into(),
        (0xee, HEARTBEAT_PORT) if value as u8 == BEAT => guest.beats.fetch_add(1, SeqCst),
        (0xef, WRONG_PAGE_PORT) => guest.wrong_frame.swap(value & 0xffff_ffff, SeqCst),
        _ => guest.unexpected.fetch_add(1, SeqCst),
    };
    // SAFETY: as above; both instructions have one byte.
    unsafe { *rip += 1 };
    if guest.pause.load(SeqCst) {
        guest.paused.fetch_add(1, SeqCst);
        while guest.pause.load(SeqCst) {
            std::hint::spin_loop();
            // SAFETY: no arguments; gives the other threads the processor.
            unsafe { libc::sched_yield() };
        }
        guest.paused.fetch_sub(1, SeqCst);
    }
}

fn listen() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // SAFETY: a zeroed action is a valid one; the handler has the right signature, and Rust's
        // threads have alternate stacks.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            assert_eq!(libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()), 0);
        }
    });
}

fn start(layout: &[(u64, u64)], vcpus: u16, params: &str) -> &'static Guest {
    listen();
    let params: ProgramParams = params.parse().unwrap();
    let ranges: Vec<PageRange> = layout
        .iter()
        .map(|(start, pages)| PageRange::try_new(Gfn(*start), PageCount(*pages)).unwrap())
        .collect();
    let plan = Plan::new(&ranges, vcpus, &params, tsc_khz()).unwrap();
    let length = ranges.last().unwrap().end().0 * PAGE_SIZE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), length as usize, protection, flags, -1, 0)
    };
    assert_ne!(base, libc::MAP_FAILED);
    let base = base as u64;
    let guest = Guest {
        base,
        end: base + length,
        frames: ranges.iter().flat_map(|r| r.start().0..r.end().0).collect(),
        vcpus,
        ..Guest::default()
    };
    for (gpa, bytes) in plan.writes() {
        let to = (base + gpa.0) as *mut u8;
        // SAFETY: inside of the mapping, and nobody else knows it yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
    let guest = register(guest);
    for vcpu in 0..vcpus {
        let start = plan.start(vcpu, base);
        // SAFETY: the plan's registers lead to the program, which never returns.
        std::thread::spawn(move || unsafe {
            std::arch::asm!(
                "mov rsp, {rsp}", "jmp {rip}",
                rsp = in(reg) start.rsp, rip = in(reg) start.rip,
                in("rdi") start.rdi, in("rsi") start.rsi, options(noreturn),
            )
        });
    }
    guest
}

/// Makes a guest known to the handler.
fn register(mut guest: Guest) -> &'static Guest {
    for slot in &GUESTS {
        match slot.set(guest) {
            Ok(()) => return slot.get().unwrap(),
            Err(back) => guest = back,
        }
    }
    panic!("more guests than slots");
}

impl Guest {
    fn counters(&self) -> GuestCounters {
        read_counters(|gpa, buffer| self.read(gpa, buffer)).unwrap()
    }

    fn read(&self, gpa: Gpa, buffer: &mut [u8]) -> bool {
        let at = self.base + gpa.0;
        assert!(at + buffer.len() as u64 <= self.end);
        for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
            // SAFETY: inside of the mapping; each word is written at once.
            let value = unsafe { (at as *const u64).add(index).read_volatile() };
            word.copy_from_slice(&value.to_le_bytes());
        }
        true
    }

    /// Waits until the guest has come as far as is asked for.
    fn wait(&self, what: &str, until: impl Fn(&GuestCounters) -> bool) -> GuestCounters {
        let limit = Instant::now() + Duration::from_secs(180);
        loop {
            let counters = self.counters();
            if until(&counters) {
                return counters;
            }
            assert!(Instant::now() < limit, "{what}: {counters:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops all vCPUs, lets `change` have the memory, and goes on.
    fn stopped<T>(&self, change: impl FnOnce(&Guest) -> T) -> T {
        self.pause.store(true, SeqCst);
        while self.paused.load(SeqCst) < u32::from(self.vcpus) {
            std::thread::yield_now();
        }
        let result = change(self);
        self.pause.store(false, SeqCst);
        while self.paused.load(SeqCst) > 0 {
            std::thread::yield_now();
        }
        result
    }

    fn word(&self, frame: u64, index: u64) -> *mut u64 {
        (self.base + frame * PAGE_SIZE + index * 8) as *mut u64
    }

    fn page(&self, frame: u64) -> [u64; 512] {
        // SAFETY: the caller has stopped the guest and names a frame of it.
        unsafe { self.word(frame, 0).cast::<[u64; 512]>().read() }
    }

    fn set_page(&self, frame: u64, page: [u64; 512]) {
        // SAFETY: as above.
        unsafe { self.word(frame, 0).cast::<[u64; 512]>().write(page) }
    }

    /// The frames of filled pages with a version that `wanted` likes, while stopped.
    fn filled(&self, wanted: impl Fn(u64) -> bool) -> Vec<u64> {
        let is = |frame: &u64| {
            let page = self.page(*frame);
            page[1] == *frame && wanted(page[2]) && page[0] == page_word(*frame, page[2], 0)
        };
        self.frames.iter().copied().filter(is).collect()
    }
}

/// Measured, to a per cent: the tests don't depend on more.
fn tsc_khz() -> u32 {
    static KHZ: OnceLock<u32> = OnceLock::new();
    *KHZ.get_or_init(|| {
        // SAFETY: reads a counter.
        let tsc = || unsafe { core::arch::x86_64::_rdtsc() };
        let (from, begin) = (tsc(), Instant::now());
        std::thread::sleep(Duration::from_millis(20));
        let micros = begin.elapsed().as_micros();
        u32::try_from(u128::from(tsc() - from) * 1000 / micros).unwrap()
    })
}

const SMALL: &[(u64, u64)] = &[(0, 2048)];

#[test]
fn it_fills_beats_writes_and_verifies_across_a_hole() {
    let layout = [(0, 1024), (4096, 1024)];
    let guest = start(&layout, 2, "fill=4M,ws=512K,rate=40/ms,tick=100us");
    let filled = guest.wait("fill", |c| c.ready);
    assert_eq!((filled.filled_pages, filled.vcpus), (1024, 2));
    let counters = guest
        .wait("run", |c| c.heartbeats > 400 && c.written_pages > 1000 && c.verified_pages > 10_000);
    assert_eq!((counters.wrong_pages, counters.tsc_backwards), (0, 0), "{counters:?}");
    assert_eq!(counters.first_wrong, None);
    // 40 pages a millisecond are 4 a tick for both vCPUs together, 2 for each.
    let due = counters.heartbeats * 2;
    assert!(counters.written_pages.abs_diff(due) <= 16, "{counters:?}");
    guest.stopped(|guest| {
        assert_eq!(guest.filled(|_| true).len(), 1024);
        let rewritten = guest.filled(|version| version > 1).len();
        assert!((1..=128).contains(&rewritten), "{rewritten} pages of a working set of 128");
        for frame in guest.filled(|_| true) {
            let page = guest.page(frame);
            let expected = |index| page_word(frame, page[2], index);
            assert!((0..512).all(|index| page[index] == expected(index)), "frame {frame:#x}");
        }
        let above_hole = guest.filled(|_| true).into_iter().filter(|f| *f >= 4096).count();
        assert!(above_hole > 256, "{above_hole}");
    });
    assert_eq!(guest.ready.load(SeqCst), 2);
    assert_eq!(guest.unexpected.load(SeqCst), 0);
    assert!(guest.beats.load(SeqCst) >= counters.heartbeats);
}

#[test]
fn a_flipped_bit_is_found_and_told() {
    let guest = start(SMALL, 1, "fill=4M,ws=64K,rate=1/ms,tick=100us");
    guest.wait("first pass", |c| c.verified_pages > 1024);
    let frame = guest.stopped(|guest| {
        let frame = guest.filled(|version| version == 1)[700];
        // SAFETY: the guest is stopped.
        unsafe { *guest.word(frame, 300) ^= 1 << 17 };
        frame
    });
    let counters = guest.wait("find it", |c| c.wrong_pages > 0);
    let wrong = counters.first_wrong.unwrap();
    assert_eq!((wrong.frame, wrong.version, wrong.word), (Gfn(frame), 1, 300));
    assert_eq!(wrong.value, page_word(frame, 1, 300) ^ 1 << 17);
    while guest.wrong_frame.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(guest.wrong_frame.load(SeqCst), frame);
}

#[test]
fn a_page_of_an_older_version_is_found() {
    let guest = start(SMALL, 1, "fill=2M,ws=1M,rate=8/tick,tick=500us,verify=1000");
    guest.wait("some versions", |c| c.written_pages > 1000);
    let (frame, old) = guest.stopped(|guest| {
        let frame = guest.filled(|version| version > 2)[0];
        (frame, guest.page(frame))
    });
    let written = guest.counters().written_pages;
    guest.wait("a newer version", |c| c.written_pages > written + 300);
    assert_eq!(guest.counters().wrong_pages, 0);
    guest.stopped(|guest| guest.set_page(frame, old));
    let wrong = guest.wait("find it", |c| c.wrong_pages > 0).first_wrong.unwrap();
    assert_eq!((wrong.frame, wrong.word, wrong.value), (Gfn(frame), 2, old[2]));
    assert!(wrong.version > old[2]);
}

#[test]
fn a_version_table_of_an_older_moment_is_found() {
    let guest = start(SMALL, 1, "fill=2M,ws=1M,rate=8/tick,tick=500us,verify=1000");
    guest.wait("some versions", |c| c.written_pages > 1000);
    // The only page whose words are small and alike is the version table.
    let is_table = |page: &[u64; 512]| page[..256].iter().all(|v| (2..10_000).contains(v));
    let (table, old) = guest.stopped(|guest| {
        let table = guest.frames.iter().copied().find(|frame| is_table(&guest.page(*frame)));
        let table = table.unwrap();
        (table, guest.page(table))
    });
    let written = guest.counters().written_pages;
    guest.wait("newer versions", |c| c.written_pages > written + 300);
    guest.stopped(|guest| guest.set_page(table, old));
    guest.wait("find it", |c| c.wrong_pages > 0);
}

#[test]
fn a_page_that_should_be_zero_and_is_not_is_found() {
    let guest = start(SMALL, 1, "fill=1M,ws=64K,rate=1/ms,tick=50us");
    guest.wait("run", |c| c.heartbeats > 64 * 20);
    assert_eq!(guest.counters().wrong_pages, 0);
    // Everything behind the filled memory is free.
    guest.stopped(|guest| {
        let end = guest.filled(|_| true).last().unwrap() + 1;
        for frame in end..2048 {
            // SAFETY: the guest is stopped.
            unsafe { *guest.word(frame, 511) = 1 };
        }
    });
    let wrong = guest.wait("find it", |c| c.wrong_pages > 0).first_wrong.unwrap();
    assert_eq!((wrong.version, wrong.word, wrong.value), (0, 511, 1));
}
