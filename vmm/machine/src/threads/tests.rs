//! Runs guests on threads: the built-in program, and a few bytes of code with a point.
#![allow(unsafe_code)]
// UNSAFETY: writes guest memory and faults on purpose.
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

use super::saved::SavedVcpu;
use super::*;
use crate::tests::START_HERE;
use crate::vcpu::backend::{Exit, Kicker, Level3Tables, Start};
use martlet_guest_program::{
    BEAT, GuestCounters, HEARTBEAT_PORT, Plan, ProgramParams, READY, WRONG_PAGE_PORT, read_counters,
};
use martlet_ram::testing::Spoiled;
use martlet_ram::{RamBitmap, RegionIndex};
use martlet_test_host::Want;
use martlet_units::{Gfn, Gpa, PAGE_SIZE, PageCount, PageRange};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Memory with a hole, at an address that no other test has.
fn memory() -> Arc<GuestRam> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let base = GUEST_BASE as u64 + (NEXT.fetch_add(1, Ordering::Relaxed) << 36);
    let range = |start, pages| PageRange::try_new(Gfn(start), PageCount(pages)).unwrap();
    let layout = [range(0, 1024), range(4096, 1024)];
    Arc::new(GuestRam::create_at(&layout, base as usize).unwrap())
}

fn pointer(ram: &GuestRam, gpa: Gpa) -> *mut u8 {
    let (region, page) = ram.find(gpa.to_gfn()).unwrap();
    ram.region(region).unwrap().host_ptr(page).wrapping_add((gpa.0 % PAGE_SIZE) as usize)
}

fn write(ram: &GuestRam, gpa: Gpa, bytes: &[u8]) {
    for (offset, byte) in bytes.iter().enumerate() {
        // SAFETY: in guest memory, which no vCPU uses yet.
        unsafe { pointer(ram, Gpa(gpa.0 + offset as u64)).write_volatile(*byte) };
    }
}

fn counters(ram: &GuestRam) -> GuestCounters {
    let read = |gpa: Gpa, buffer: &mut [u8]| {
        for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
            let from = pointer(ram, Gpa(gpa.0 + 8 * index as u64)).cast::<u64>();
            // SAFETY: in guest memory; the program writes each word at once.
            word.copy_from_slice(&unsafe { from.read_volatile() }.to_le_bytes());
        }
        true
    };
    read_counters(read).unwrap()
}

/// What the ports of a guest have seen.
#[derive(Default)]
struct Ports {
    beats: AtomicU64,
    ready: AtomicU64,
    wrong: AtomicU64,
    other: AtomicU64,
}

impl Ports {
    fn serve(&self, exit: &Exit<'_>) {
        let count = match exit {
            Exit::Out { port: HEARTBEAT_PORT, size: 1, data: [BEAT] } => &self.beats,
            Exit::Out { port: HEARTBEAT_PORT, size: 1, data: [READY] } => &self.ready,
            Exit::Out { port: WRONG_PAGE_PORT, size: 4, .. } => &self.wrong,
            Exit::Interrupted => return,
            _ => &self.other,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Threads that run vCPUs until they are stopped.
struct Running {
    stop: Arc<AtomicBool>,
    kickers: Vec<Arc<dyn Kicker>>,
    threads: Vec<JoinHandle<Vec<u8>>>,
}

/// How a vCPU begins.
#[derive(Clone)]
enum Begin {
    New(Start),
    Saved(Vec<u8>),
}

impl Running {
    fn start(built: Built, begins: Vec<Begin>, ports: &Arc<Ports>) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let kickers = built.vcpus.iter().map(|vcpu| vcpu.kicker()).collect();
        let threads = built
            .vcpus
            .into_iter()
            .zip(begins)
            .map(|(vcpu, begin)| {
                let (stop, ports) = (Arc::clone(&stop), Arc::clone(ports));
                std::thread::spawn(move || run_until(vcpu, &begin, &stop, &ports))
            })
            .collect();
        Running { stop, kickers, threads }
    }

    /// Stops all vCPUs and returns their states.
    fn stop(self) -> Vec<Begin> {
        self.stop.store(true, Ordering::SeqCst);
        self.kickers.iter().for_each(|kicker| kicker.kick());
        self.threads.into_iter().map(|thread| Begin::Saved(thread.join().unwrap())).collect()
    }
}

fn run_until(
    mut vcpu: Box<dyn VcpuBackend>,
    begin: &Begin,
    stop: &AtomicBool,
    ports: &Ports,
) -> Vec<u8> {
    vcpu.attach().unwrap();
    match begin {
        Begin::New(start) => vcpu.set_start(start).unwrap(),
        Begin::Saved(state) => {
            vcpu.load(state, START_HERE).unwrap();
            vcpu.enter_and_leave().unwrap();
        }
    }
    let kicker = vcpu.kicker();
    loop {
        kicker.clear();
        if stop.load(Ordering::SeqCst) {
            break;
        }
        let exit = vcpu.run().unwrap();
        assert!(!matches!(exit, Exit::Ended(_)), "{exit:?}");
        ports.serve(&exit);
    }
    assert!(matches!(vcpu.finish_io(), Ok(Exit::Interrupted)));
    let state = vcpu.save().unwrap();
    kicker.detach();
    state
}

fn program(ram: &Arc<GuestRam>, vcpus: u16, params: &str) -> (Built, Vec<Begin>) {
    let built = build(ram, vcpus, None).unwrap();
    let params: ProgramParams = params.parse().unwrap();
    let plan = Plan::new(&ram.layout(), vcpus, &params, built.vm.tsc_khz()).unwrap();
    for (gpa, bytes) in plan.writes() {
        write(ram, gpa, bytes);
    }
    let begin = |vcpu| {
        let start = plan.start(vcpu, built.vm.guest_base());
        Begin::New(Start::Level3 {
            rip: start.rip,
            rsp: start.rsp,
            rdi: start.rdi,
            rsi: start.rsi,
            tables: Level3Tables::default(),
        })
    };
    let begins = (0..vcpus).map(begin).collect();
    (built, begins)
}

fn wait(what: &str, until: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !until() {
        assert!(Instant::now() < limit, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const PARAMS: &str = "fill=5M,ws=512K,rate=40/ms,tick=100us";

#[test]
fn the_program_runs_on_two_vcpus() {
    let ram = memory();
    let (built, begins) = program(&ram, 2, PARAMS);
    let ports = Arc::new(Ports::default());
    let running = Running::start(built, begins, &ports);
    wait("heartbeats", || counters(&ram).heartbeats > 500);
    wait("a pass over all pages", || counters(&ram).verified_pages > 3000);
    running.stop();
    let counters = counters(&ram);
    assert_eq!((counters.wrong_pages, counters.tsc_backwards), (0, 0), "{counters:?}");
    // A vCPU may have counted a beat and stopped right before its port write.
    let beats = ports.beats.load(Ordering::Relaxed);
    assert!((counters.heartbeats - 2..=counters.heartbeats).contains(&beats), "{beats}");
    assert_eq!(ports.ready.load(Ordering::Relaxed), 2);
    let unexpected = [&ports.wrong, &ports.other].map(|count| count.load(Ordering::Relaxed));
    assert_eq!(unexpected, [0, 0]);
}

/// Hundreds of moves to new threads, at whatever instruction the kick hits.
#[test]
fn a_guest_goes_on_in_other_threads() {
    let ram = memory();
    let (mut built, mut begins) = program(&ram, 2, PARAMS);
    let ports = Arc::new(Ports::default());
    for round in 0..150_u64 {
        let running = Running::start(built, begins, &ports);
        std::thread::sleep(Duration::from_micros(round * 7 % 400));
        begins = running.stop();
        built = build(&ram, 2, None).unwrap();
    }
    let running = Running::start(built, begins, &ports);
    let before = counters(&ram);
    wait("a pass over all pages", || {
        let now = counters(&ram);
        now.ready && now.verified_pages > before.verified_pages + 3000
    });
    running.stop();
    let counters = counters(&ram);
    assert_eq!((counters.wrong_pages, counters.tsc_backwards), (0, 0), "{counters:?}");
    assert_eq!(ports.ready.load(Ordering::Relaxed), 2);
}

/// What a migration does with memory: copies what each sync reports. The copy is exact at the end.
#[test]
fn tracking_sees_every_write_of_the_program() {
    let ram = memory();
    let (built, begins) = program(&ram, 2, PARAMS);
    let vm = Arc::clone(&built.vm);
    let running = Running::start(built, begins, &Arc::new(Ports::default()));
    wait("the start", || counters(&ram).ready);
    let tracker = vm.track().map_err(|error| format!("{error:?}"));
    let Some(mut source) = Want::PagemapScan.take(tracker) else {
        running.stop();
        return;
    };
    let page = |region: RegionIndex, page: u64| {
        // SAFETY: a page of guest memory; a torn copy is repeated, as it is dirty again.
        unsafe { ram.region(region).unwrap().host_ptr(page).cast::<[u8; 4096]>().read_volatile() }
    };
    let all = || {
        let regions = (0..).map(RegionIndex).zip(ram.regions());
        regions.flat_map(|(region, memory)| (0..memory.pages()).map(move |page| (region, page)))
    };
    let mut copy: std::collections::BTreeMap<_, _> =
        all().map(|(region, number)| ((region, number), page(region, number))).collect();
    let mut sync = || {
        let bitmap = RamBitmap::new(&ram);
        source.sync(&bitmap).unwrap();
        for (region, pages) in bitmap.iter() {
            for number in pages.runs().flatten() {
                copy.insert((region, number), page(region, number));
            }
        }
        bitmap.count()
    };
    for _ in 0..20 {
        sync();
        std::thread::sleep(Duration::from_millis(1));
    }
    // On a busy host that takes as long as it takes.
    let before = counters(&ram).written_pages;
    wait("a write", || counters(&ram).written_pages > before);
    running.stop();
    let last = sync();
    assert!(last > 0 && last < 1000, "{last} pages");
    assert_eq!(sync(), 0);
    for (region, number) in all() {
        assert!(copy[&(region, number)] == page(region, number), "{region:?} page {number}");
    }
}

/// Code at the start of memory, on a thread of its own that is this one.
fn code(ram: &Arc<GuestRam>, bytes: &[u8]) -> Box<dyn VcpuBackend> {
    write(ram, Gpa(0), bytes);
    let Built { vm, mut vcpus } = build(ram, 1, None).unwrap();
    let mut vcpu = vcpus.remove(0);
    let base = vm.guest_base();
    vcpu.attach().unwrap();
    let tables = Level3Tables::default();
    let start = Start::Level3 { rip: base, rsp: base + 0x3000, rdi: 0, rsi: 0, tables };
    vcpu.set_start(&start).unwrap();
    vcpu
}

#[test]
fn ports_are_written_and_read() {
    let ram = memory();
    // mov eax, 0x11223344; mov dx, 0x3f8; out dx, eax; in al, 0x60; out 0xe9, ax
    let mut vcpu = code(
        &ram,
        &[0xb8, 0x44, 0x33, 0x22, 0x11, 0x66, 0xba, 0xf8, 0x03, 0xef, 0xe4, 0x60, 0x66, 0xe7, 0xe9],
    );
    match vcpu.run().unwrap() {
        Exit::Out { port: 0x3f8, size: 4, data } => assert_eq!(data, [0x44, 0x33, 0x22, 0x11]),
        exit => panic!("{exit:?}"),
    }
    match vcpu.run().unwrap() {
        Exit::In { port: 0x60, size: 1, data } => data.fill(0xab),
        exit => panic!("{exit:?}"),
    }
    // The read is complete in a state that is saved now.
    vcpu.finish_io().unwrap();
    let state = vcpu.save().unwrap();
    for _ in 0..2 {
        match vcpu.run().unwrap() {
            Exit::Out { port: 0xe9, size: 2, data } => assert_eq!(data, [0xab, 0x33]),
            exit => panic!("{exit:?}"),
        }
        vcpu.load(&state, START_HERE).unwrap();
    }
}

#[test]
fn a_guest_that_goes_astray_ends_and_the_process_does_not() {
    let cases: [(&[u8], &str); 7] = [
        (&[0x0f, 0x0b], "exception 6"),                                // ud2
        (&[0xf4], "exception 13"),                                     // hlt
        (&[0xcc, 0xeb, 0xfd], "exception 3"),                          // 1: int3; jmp 1b
        (&[0x31, 0xc9, 0xf7, 0xf1], "exception 0"),                    // xor ecx, ecx; div ecx
        (&[0x31, 0xc0, 0x88, 0x00], "page fault at 0x0"), // xor eax, eax; mov [rax], al
        (&[0x31, 0xc0, 0xff, 0xe0], "page fault at 0x0"), // xor eax, eax; jmp rax
        (&[0x48, 0x0f, 0xba, 0xe8, 0x3f, 0x88, 0x00], "exception 13"), // bts rax, 63; mov [rax], al
    ];
    for (bytes, expected) in cases {
        let ram = memory();
        let mut vcpu = code(&ram, bytes);
        for _ in 0..2 {
            match vcpu.run().unwrap() {
                Exit::Ended(reason) => assert!(reason.starts_with(expected), "{reason}"),
                exit => panic!("{exit:?}"),
            }
        }
        drop(vcpu);
    }
}

/// The guest's touch ends the guest; the host's own, on the same thread, is an error.
#[test]
fn a_lost_page_ends_neither_the_process_nor_the_thread() {
    let ram = memory();
    let page = pointer(&ram, Gpa(500 * PAGE_SIZE));
    let mut bytes = vec![0x48, 0xb8]; // mov rax, page
    bytes.extend((page.expose_provenance() as u64).to_le_bytes());
    bytes.extend([0x88, 0x00]); // mov [rax], al
    let mut vcpu = code(&ram, &bytes);
    let spoiled = Spoiled::new(&ram, RegionIndex(0), 500);
    for _ in 0..2 {
        match vcpu.run().unwrap() {
            Exit::Ended(reason) => assert!(reason.starts_with("guest page 0x1f4 "), "{reason}"),
            exit => panic!("{exit:?}"),
        }
        // SAFETY: a page of the guest's memory.
        assert!(unsafe { martlet_raw_memory::read(page, &mut [0]) }.is_err());
    }
    drop(spoiled);
    // SAFETY: as above.
    assert!(unsafe { martlet_raw_memory::read(page, &mut [0]) }.is_ok());
}

#[test]
fn a_kick_before_the_entry_is_not_lost_and_costs_no_instruction() {
    let ram = memory();
    // 1: inc rax; jmp 1b
    let mut vcpu = code(&ram, &[0x48, 0xff, 0xc0, 0xeb, 0xfb]);
    let kicker = vcpu.kicker();
    // Once in and out: afterwards the x87 and SSE registers count as used.
    vcpu.enter_and_leave().unwrap();
    let before = vcpu.save().unwrap();
    kicker.kick();
    assert!(matches!(vcpu.run(), Ok(Exit::Interrupted)));
    assert!(matches!(vcpu.run(), Ok(Exit::Interrupted)));
    assert_eq!(vcpu.save().unwrap(), before);
    kicker.clear();
    for _ in 0..100 {
        vcpu.enter_and_leave().unwrap();
    }
    assert_eq!(vcpu.save().unwrap(), before);
}

/// The guest never leaves by itself here: a lost kick would hang.
#[test]
fn kicks_at_any_moment_arrive() {
    let ram = memory();
    let mut vcpu = code(&ram, &[0x48, 0xff, 0xc0, 0xeb, 0xfb]);
    let kicker = vcpu.kicker();
    let (ask, asked) = mpsc::channel::<u64>();
    let (tell, told) = mpsc::channel();
    let kicking = std::thread::spawn(move || {
        let mut slowest = Duration::ZERO;
        for round in 0..3000_u64 {
            ask.send(round).unwrap();
            for _ in 0..round * 13 % 500 {
                std::hint::spin_loop();
            }
            let begin = Instant::now();
            kicker.kick();
            told.recv().unwrap();
            slowest = slowest.max(begin.elapsed());
        }
        slowest
    });
    for _ in asked {
        match vcpu.run().unwrap() {
            Exit::Interrupted => {}
            exit => panic!("{exit:?}"),
        }
        vcpu.kicker().clear();
        tell.send(()).unwrap();
    }
    println!("slowest kick: {:?}", kicking.join().unwrap());
}

/// All registers, also those that host code uses for itself, are as they were after many exits.
#[test]
fn registers_survive_exits_and_moves() {
    let ram = memory();
    // 1: out 0xe9, al; jmp 1b
    let mut vcpu = code(&ram, &[0xe6, 0xe9, 0xeb, 0xfc]);
    let state = with_noise(&vcpu.save().unwrap());
    vcpu.load(&state, START_HERE).unwrap();
    for _ in 0..200 {
        assert!(matches!(vcpu.run().unwrap(), Exit::Out { port: 0xe9, .. }));
        // Something that uses vector registers.
        let noise: Vec<f64> = (0..64).map(f64::from).collect();
        std::hint::black_box(noise.iter().map(|value| value * 1.5).sum::<f64>());
    }
    let saved = vcpu.save().unwrap();
    assert_eq!(without_rip(&saved), without_rip(&state));
    vcpu.load(&saved, START_HERE).unwrap();
    assert_eq!(vcpu.save().unwrap(), saved);
}

fn decoded(state: &[u8]) -> SavedVcpu {
    SavedVcpu::from_bytes(state).unwrap()
}

fn without_rip(state: &[u8]) -> SavedVcpu {
    SavedVcpu { rip: 0, ..decoded(state) }
}

/// Fills what may be filled: general registers but the stack pointer, x87 and vector registers.
fn with_noise(state: &[u8]) -> Vec<u8> {
    let mut saved = decoded(state);
    let mut next = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = || {
        next ^= next << 13;
        next ^= next >> 7;
        next ^= next << 17;
        next
    };
    for (index, register) in saved.general.iter_mut().enumerate() {
        if index != 4 {
            *register = noise();
        }
    }
    saved.flags |= 0x8d5;
    for byte in &mut saved.legacy[160..] {
        *byte = noise() as u8;
    }
    saved.legacy[24..28].copy_from_slice(&0x3f80_u32.to_le_bytes());
    saved.present |= 0b11;
    saved.to_bytes()
}

mod hostile {
    use super::*;
    use proptest::prelude::*;

    fn state() -> Vec<u8> {
        let ram = memory();
        let mut vcpu = code(&ram, &[0xe6, 0xe9, 0xeb, 0xfc]);
        with_noise(&vcpu.save().unwrap())
    }

    #[test]
    fn what_can_not_be_entered_is_refused() {
        let ram = memory();
        let mut vcpu = code(&ram, &[0xe6, 0xe9, 0xeb, 0xfc]);
        let before = vcpu.save().unwrap();
        let base = decoded(&before).rip;
        let change = |change: &dyn Fn(&mut SavedVcpu)| {
            let mut saved = decoded(&with_noise(&before));
            change(&mut saved);
            saved.to_bytes()
        };
        let hole = base + 2048 * PAGE_SIZE;
        for (bytes, expected) in [
            (change(&|s| s.rip = 0x1000), "instruction pointer 0x1000 is not"),
            (change(&|s| s.rip = hole), "is not in the guest's memory"),
            (change(&|s| s.rip = u64::MAX), "is not in the guest's memory"),
            (change(&|s| s.general[4] = base), "stack pointer"),
            (change(&|s| s.legacy[26] = 1), "MXCSR 0x13f80 has reserved bits"),
            (change(&|s| s.legacy.truncate(100)), "100 bytes of x87"),
            (change(&|s| s.present |= 1 << 2), "components 0x4"),
            (change(&|s| s.present |= 1 << 9), "components 0x200"),
            (change(&|s| s.present |= 1 << 63), "components 0x8000000000000000"),
            (change(&|s| s.components.push(2)), "components behind"),
        ] {
            let error = vcpu.load(&bytes, START_HERE).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(vcpu.save().unwrap(), before, "{expected}");
        }
        // Flags that a guest may not have are taken off, not refused.
        vcpu.load(&change(&|s| s.flags = u64::MAX), START_HERE).unwrap();
        vcpu.enter_and_leave().unwrap();
        assert_eq!(decoded(&vcpu.save().unwrap()).flags, 0xed7);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn no_bytes_break_the_process(
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(), keep: bool,
        ) {
            thread_local! {
                static STATE: Vec<u8> = state();
            }
            let mut bytes = STATE.with(Clone::clone);
            for (at, value) in flips {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if !keep {
                bytes.truncate(cut.index(bytes.len()));
            }
            let ram = memory();
            let mut vcpu = code(&ram, &[0xe6, 0xe9, 0xeb, 0xfc]);
            if vcpu.load(&bytes, START_HERE).is_ok() {
                let _ = vcpu.enter_and_leave();
            }
        }
    }
}

/// A fault that is not a guest's ends the process as it would without us. In a process of its own.
#[test]
fn a_fault_of_the_host_is_still_fatal() {
    use std::os::unix::process::ExitStatusExt;
    const ASKED: &str = "MARTLET_TEST_FAULT";
    if std::env::var_os(ASKED).is_some() {
        let ram = memory();
        let vcpu = code(&ram, &[0xf4]);
        // SAFETY: none, that is the point.
        unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
        drop(vcpu);
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "threads::tests::a_fault_of_the_host_is_still_fatal"])
        .env(ASKED, "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSEGV));
}

#[test]
fn a_user_that_stands_for_others_is_nobody_in_particular() {
    for (user, overflow, expected) in [
        (0, Some("65534\n"), false),
        (1000, Some("65534\n"), false),
        (65534, Some("65534\n"), true),
        (1000, Some("1000\n"), true),
        (65534, Some("1000\n"), false),
        (65534, None, true),
        (65534, Some("none"), true),
        (0, None, false),
    ] {
        assert_eq!(stands_for_others(user, overflow), expected, "{user} {overflow:?}");
    }
}
