use super::*;
use proptest::prelude::*;

const US: u64 = 1000;
const MS: u64 = 1_000_000;
const BATCH: u32 = 128;

fn admission(policy: OffloadPolicy, devices: usize) -> Admission {
    Admission::new(AdmissionConfig::new(policy), &vec![DeviceProfile::default(); devices])
}

fn ask(admission: &mut Admission, now: u64, others: &[u64]) -> Option<Grant> {
    let request = Request { pages: BATCH, channel: 0 };
    match admission.decide(Instant(now), request, others) {
        Decision::Cpu => None,
        Decision::Offload(grant) => Some(grant),
    }
}

fn done(latency_ns: u64) -> Outcome {
    let latency = Latency::Measured(Duration::from_nanos(latency_ns));
    Outcome::Completed { latency, faulted: 0 }
}

/// What an unloaded device takes: 1 us and 129 ns a page.
fn model_ns(grant: &Grant) -> u64 {
    1000 + 129 * (grant.ahead + u64::from(grant.pages))
}

#[test]
fn names_are_those_of_the_command_line() {
    let names = OffloadPolicy::ALL.map(OffloadPolicy::name);
    assert_eq!(names, ["cpu-only", "block", "cpu-when-full", "adaptive", "adaptive-saving"]);
    for policy in OffloadPolicy::ALL {
        assert_eq!(OffloadPolicy::from_name(policy.name()), Some(policy));
    }
    assert_eq!(OffloadPolicy::from_name("series"), None);
}

#[test]
fn cpu_only_and_no_device_are_the_cpu() {
    assert_eq!(ask(&mut admission(OffloadPolicy::CpuOnly, 1), 0, &[]), None);
    for policy in OffloadPolicy::ALL {
        assert_eq!(ask(&mut admission(policy, 0), 0, &[]), None);
    }
}

/// The queueing model: 128 pages take the CPU 30.7 us, and a device 17.5 us and 16.5 us more for
/// each batch before it. So the first batch is worth it and the second is not.
#[test]
fn adaptive_offloads_only_what_comes_back_before_the_cpu_is_done() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let first = ask(&mut admission, 0, &[]).unwrap();
    assert_eq!(ask(&mut admission, 0, &[]), None);
    admission.finish(Instant(18 * US), first, done(17_500));
    assert!(ask(&mut admission, 18 * US, &[]).is_some());
}

#[test]
fn what_other_processes_have_outstanding_counts() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    assert_eq!(ask(&mut admission, 0, &[128]), None);
    let grant = ask(&mut admission, 0, &[12]).unwrap();
    assert_eq!(grant.ahead, 12);
}

/// Four times the CPU's time is 123 us: seven batches of 16.5 us and 1 us.
#[test]
fn saving_waits_for_a_multiple_of_the_cpus_time() {
    let mut admission = admission(OffloadPolicy::AdaptiveSaving, 1);
    let granted = (0..20).map_while(|_| ask(&mut admission, 0, &[])).count();
    assert_eq!(granted, 7);
}

#[test]
fn block_is_bound_to_a_device_by_its_channel() {
    let mut admission = admission(OffloadPolicy::Block, 2);
    for channel in 0..4 {
        let request = Request { pages: BATCH, channel };
        let Decision::Offload(grant) = admission.decide(Instant(0), request, &[1 << 40]) else {
            panic!("the series never asks how long it would take")
        };
        assert_eq!(grant.device, usize::from(channel % 2));
        assert_eq!(grant.tries, u32::MAX);
    }
}

#[test]
fn load_decides_between_equal_devices() {
    let mut admission = admission(OffloadPolicy::CpuWhenFull, 3);
    let request = Request { pages: BATCH, channel: 0 };
    let mut devices = Vec::new();
    for _ in 0..4 {
        match admission.decide(Instant(0), request, &[]) {
            Decision::Offload(grant) => devices.push(grant.device),
            Decision::Cpu => panic!("nothing is full"),
        }
    }
    assert_eq!(devices, [0, 1, 2, 0]);
}

#[test]
fn a_full_device_is_left_alone_for_a_while() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let grant = ask(&mut admission, 0, &[]).unwrap();
    assert_eq!(grant.tries, 5);
    admission.finish(Instant(US), grant, Outcome::Rejected);
    assert_eq!(admission.devices[0].outstanding, 0);
    assert_eq!(ask(&mut admission, MS / 2, &[]), None);
    let again = ask(&mut admission, 2 * MS, &[]).unwrap();
    admission.finish(Instant(2 * MS), again, Outcome::Rejected);
    assert_eq!(ask(&mut admission, 3 * MS + MS / 2, &[]), None);
    let third = ask(&mut admission, 5 * MS, &[]).unwrap();
    admission.finish(Instant(5 * MS + 20 * US), third, done(17_500));
    let fourth = ask(&mut admission, 6 * MS, &[]).unwrap();
    admission.finish(Instant(6 * MS), fourth, Outcome::Rejected);
    assert!(ask(&mut admission, 7 * MS, &[]).is_some(), "the pause is short again");
}

/// Others use the device, and there is no shared file that says so: only the latency does.
#[test]
fn latency_alone_turns_offload_off_and_probes_turn_it_on_again() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let (mut now, mut offloaded) = (0, 0);
    for _ in 0..1000 {
        now += 100 * US;
        if let Some(grant) = ask(&mut admission, now, &[]) {
            offloaded += 1;
            admission.finish(Instant(now + 200 * US), grant, done(200 * US));
        }
    }
    // A few batches to find out, and then a probe after 128, 256 and 512 batches.
    assert!((4..=8).contains(&offloaded), "{offloaded}");
    let mut regained = None;
    for step in 0..20_000 {
        now += 100 * US;
        if let Some(grant) = ask(&mut admission, now, &[]) {
            admission.finish(Instant(now + 18 * US), grant, done(model_ns(&grant)));
            regained = regained.or(Some(step));
        }
    }
    assert!(regained.is_some());
    let busy = (0..100).filter(|_| {
        now += 100 * US;
        admission.on_cpu(BATCH, Duration::from_nanos(30_720));
        let grant = ask(&mut admission, now, &[]);
        grant.map(|grant| admission.finish(Instant(now), grant, done(17_500))).is_some()
    });
    assert_eq!(busy.count(), 100);
}

#[test]
fn a_late_look_is_no_bad_sign() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    for n in 0..100 {
        admission.on_cpu(BATCH, Duration::from_nanos(30_720));
        let grant = ask(&mut admission, n * MS, &[]).unwrap();
        let latency = Latency::AtMost(Duration::from_micros(900));
        admission.finish(
            Instant(n * MS + 900 * US),
            grant,
            Outcome::Completed { latency, faulted: 0 },
        );
    }
}

/// A batch of which nobody has looked at the answer keeps nobody waiting once it is done.
#[test]
fn a_batch_that_is_done_but_not_collected_is_no_backlog() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let first = ask(&mut admission, 0, &[]).unwrap();
    assert_eq!((admission.devices[0].outstanding, admission.backlog(Instant(0), 0)), (128, 128));
    assert_eq!(ask(&mut admission, 0, &[]), None);
    assert_eq!(
        (admission.devices[0].outstanding, admission.backlog(Instant(18 * US), 0)),
        (128, 0)
    );
    let second = ask(&mut admission, 18 * US, &[]).unwrap();
    assert_eq!(second.ahead, 0);
    admission.finish(Instant(40 * US), first, done(17_500));
    admission.finish(Instant(40 * US), second, done(17_500));
}

/// Where the CPU is nearly as fast as the device, each does a part of a batch at the same time.
#[test]
fn a_part_is_what_the_device_has_done_when_the_cpu_alone_would_be() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let part = |admission: &mut Admission| {
        let request = Request { pages: BATCH, channel: 0 };
        let part = Part { pages_min: 16, has_pending: false };
        match admission.decide_part(Instant(0), request, part, &[]) {
            Decision::Cpu => 0,
            Decision::Offload(grant) => grant.pages,
        }
    };
    // Five eighths of 30.72 us are 141 pages of the device; of the second batch it would get 13,
    // which are too few.
    assert_eq!([part(&mut admission), part(&mut admission)], [128, 0]);
    // Pages that are not zero take the CPU 90 ns: 7.2 us are 48 pages.
    let mut admission = Admission::new(
        AdmissionConfig::new(OffloadPolicy::Adaptive),
        &[DeviceProfile::default(), DeviceProfile::default()],
    );
    admission.on_cpu(BATCH, Duration::from_nanos(90 * 128));
    let parts = [part(&mut admission), part(&mut admission), part(&mut admission)];
    assert_eq!(parts, [48, 48, 0]);
}

#[test]
fn the_cpu_is_measured_now_and_then() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let mut asked = |n: u64| {
        let Some(grant) = ask(&mut admission, n * MS, &[]) else {
            admission.on_cpu(BATCH, Duration::from_nanos(30_720));
            return false;
        };
        admission.finish(Instant(n * MS), grant, done(17_500));
        true
    };
    let refused: Vec<u64> = (0..200).filter(|n| !asked(*n)).collect();
    assert_eq!(refused, [8, 25, 58, 123, 188]);
}

#[test]
fn checks_that_wait_for_memory_are_spread() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    admission.on_cpu(BATCH, Duration::from_micros(38));
    assert_eq!(admission.pause(BATCH), Duration::ZERO);
    (0..100).for_each(|_| admission.on_cpu(BATCH, Duration::from_micros(160)));
    assert_eq!(admission.pause(BATCH), Duration::from_micros(37));
    // It is forgotten fast.
    (0..10).for_each(|_| admission.on_cpu(BATCH, Duration::from_micros(31)));
    assert_eq!(admission.pause(BATCH), Duration::ZERO);
}

#[test]
fn untouched_memory_turns_offload_off_for_a_while() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    let faulting = |faulted| {
        let latency = Latency::Measured(Duration::from_micros(18));
        Outcome::Completed { latency, faulted }
    };
    for n in 0..8 {
        let grant = ask(&mut admission, n, &[]).unwrap();
        admission.finish(Instant(n), grant, faulting(7));
    }
    assert_eq!(ask(&mut admission, 50 * MS, &[]), None);
    admission.on_cpu(BATCH, Duration::from_nanos(30_720));
    for n in 0..8 {
        let grant = ask(&mut admission, 101 * MS + n, &[]).unwrap();
        admission.finish(Instant(101 * MS + n), grant, faulting(7));
    }
    assert_eq!(ask(&mut admission, 250 * MS, &[]), None, "twice as long the second time");
    admission.on_cpu(BATCH, Duration::from_nanos(30_720));
    for n in 0..8 {
        let grant = ask(&mut admission, 302 * MS + n, &[]).unwrap();
        admission.finish(Instant(302 * MS + n), grant, faulting(6));
    }
    admission.on_cpu(BATCH, Duration::from_nanos(30_720));
    assert!(ask(&mut admission, 303 * MS, &[]).is_some(), "6 of 128 are below 5 %");
}

#[test]
fn a_device_that_owes_an_answer_gets_nothing_more() {
    let mut admission = admission(OffloadPolicy::CpuWhenFull, 1);
    let (one, two) = (ask(&mut admission, 0, &[]).unwrap(), ask(&mut admission, 0, &[]).unwrap());
    admission.finish(Instant(5 * MS), one, Outcome::TimedOut);
    admission.finish(Instant(5 * MS), two, Outcome::TimedOut);
    assert_eq!(admission.devices[0].outstanding, 0);
    assert_eq!(ask(&mut admission, 3600 * 1000 * MS, &[]), None);
}

#[test]
fn a_device_that_fails_is_tried_again_ever_more_rarely_and_one_that_is_gone_never() {
    let mut admission = admission(OffloadPolicy::CpuWhenFull, 1);
    let (one, two) = (ask(&mut admission, 0, &[]).unwrap(), ask(&mut admission, 0, &[]).unwrap());
    admission.finish(Instant(0), one, Outcome::Failed);
    admission.finish(Instant(0), two, Outcome::Failed);
    assert_eq!(ask(&mut admission, 99 * MS, &[]), None);
    let again = ask(&mut admission, 100 * MS, &[]).unwrap();
    admission.finish(Instant(100 * MS), again, Outcome::Failed);
    assert_eq!(ask(&mut admission, 299 * MS, &[]), None);
    let third = ask(&mut admission, 300 * MS, &[]).unwrap();
    admission.finish(Instant(300 * MS), third, Outcome::Gone);
    assert_eq!(ask(&mut admission, 1 << 60, &[]), None);
}

#[test]
fn the_cpus_time_is_learned() {
    let mut admission = admission(OffloadPolicy::Adaptive, 1);
    assert_eq!(admission.cpu_time(128), Duration::from_nanos(30_720));
    // Pages with content: the CPU sees the first line and is done. The device can't beat that.
    for _ in 0..200 {
        admission.on_cpu(BATCH, Duration::from_nanos(60 * 128));
    }
    assert!(admission.cpu_time(128) < Duration::from_micros(9));
    assert_eq!(ask(&mut admission, 0, &[]), None);
}

/// One device as a queue, first in, first out, and processes that know nothing of each other.
struct Queue {
    free_at: u64,
}

impl Queue {
    fn serve(&mut self, now: u64, pages: u32) -> u64 {
        self.free_at = self.free_at.max(now) + 129 * u64::from(pages);
        self.free_at + 1000
    }
}

/// Without a shared file, 40 processes on one device: none may wait much longer for the device than
/// its CPU would have taken, and together they still use it.
#[test]
fn processes_that_know_nothing_of_each_other_share_a_device() {
    let mut queue = Queue { free_at: 0 };
    let mut all: Vec<_> =
        (0..40).map(|n| (n * 700, admission(OffloadPolicy::Adaptive, 1))).collect();
    let (mut latencies, mut offloaded) = (Vec::new(), 0_u64);
    let end = 500 * MS;
    loop {
        let (next, process) = all.iter_mut().min_by_key(|(at, _)| *at).unwrap();
        if *next > end {
            break;
        }
        let now = *next;
        let took = match ask(process, now, &[]) {
            Some(grant) => {
                let at = queue.serve(now, grant.pages);
                process.finish(Instant(at), grant, done(at - now));
                offloaded += 1;
                at - now
            }
            None => 30_720,
        };
        latencies.push(took);
        *next = now + took;
    }
    latencies.sort_unstable();
    let p99 = latencies[latencies.len() * 99 / 100];
    assert!(p99 <= 37_000, "{p99}");
    let capacity = end / (129 * 128);
    assert!(offloaded * 10 > capacity, "{offloaded} of {capacity}");
}

proptest! {
    /// Whatever happens, what is outstanding is what was granted and not finished, and nothing
    /// panics.
    #[test]
    fn the_books_are_kept(
        policy in 0_usize..5,
        steps in proptest::collection::vec((0_u8..8, 0_u64..50_000_000, 0_u32..4096, any::<u64>()), 1..200),
    ) {
        let mut admission = admission(OffloadPolicy::ALL[policy], 3);
        let mut open: Vec<Grant> = Vec::new();
        let mut now = 0;
        for (kind, time, pages, other) in steps {
            now += time;
            let latency = Latency::Measured(Duration::from_nanos(other >> 30));
            let outcome = match kind {
                0..=3 => {
                    let request = Request { pages, channel: 7 };
                    let decision = admission.decide(Instant(now), request, &[other]);
                    if let Decision::Offload(grant) = decision {
                        prop_assert_eq!(grant.pages, pages);
                        open.push(grant);
                    }
                    continue;
                }
                4 => Outcome::Completed { latency, faulted: pages },
                5 => Outcome::Rejected,
                6 => Outcome::TimedOut,
                _ => Outcome::Failed,
            };
            admission.on_cpu(pages, Duration::from_nanos(other >> 20));
            if let Some(grant) = open.pop() {
                admission.finish(Instant(now), grant, outcome);
            }
            for device in 0..3 {
                let granted = open.iter().filter(|grant| grant.device == device);
                let granted: u64 = granted.map(|grant| u64::from(grant.pages)).sum();
                prop_assert_eq!(admission.devices[device].outstanding, granted);
            }
        }
    }
}
