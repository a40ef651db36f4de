use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

/// How long from `now` until these bytes may go.
fn delay(pacer: &Pacer, now: Instant, bytes: ByteCount) -> Duration {
    pacer.wait(now, pacer.reserve(now, bytes))
}

/// Channels that always have something to send: whoever wakes first takes the next slot, waits for
/// it, oversleeps a little, sends, and comes back. Returns when how many bytes were sent.
fn run(
    pacer: &Pacer,
    pieces: &[u64],
    channels: usize,
    oversleep_ns: &[u64],
    until: u64,
) -> Vec<(u64, u64)> {
    let mut wakes = vec![0u64; channels];
    let mut sent = Vec::new();
    for (piece, late) in pieces.iter().cycle().zip(oversleep_ns.iter().cycle()) {
        let next = (0..channels).min_by_key(|channel| wakes[*channel]).unwrap_or(0);
        let now = wakes[next];
        if now >= until {
            return sent;
        }
        let wait = delay(pacer, Instant(now), ByteCount(*piece));
        let nanos = u64::try_from(wait.as_nanos()).unwrap();
        let at = now + nanos + if nanos > 0 { *late } else { 0 };
        sent.push((at, *piece));
        wakes[next] = at;
    }
    unreachable!("an endless cycle")
}

/// Most and least bytes in any window of this length that lies within the run.
fn extremes(sent: &[(u64, u64)], window: u64, until: u64) -> (u64, u64) {
    let mut sent = sent.to_vec();
    sent.sort_unstable();
    let within = |from: u64, to: u64| -> u64 {
        let first = sent.partition_point(|(at, _)| *at < from);
        let last = sent.partition_point(|(at, _)| *at < to);
        sent[first..last].iter().map(|(_, bytes)| bytes).sum()
    };
    let starts = sent.iter().map(|(at, _)| *at).filter(|at| at + window <= until);
    let starts: Vec<u64> = starts.collect();
    let most = starts.iter().map(|at| within(*at, at + window)).max();
    let least = starts.iter().map(|at| within(at + 1, at + 1 + window)).min();
    (most.unwrap_or(0), least.unwrap_or(u64::MAX))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn within_five_per_cent_over_any_100_ms(
        rate in 3_000_000..20_000_000_000u64,
        shares in prop::collection::vec(1..=1000u64, 1..20),
        channels in 1..9usize,
        late in prop::collection::vec(0..MS, 1..10),
    ) {
        let until = 400 * MS;
        let pacer = Pacer::new(Instant(0), Some(BytesPerSec(rate)));
        let slice = pacer.slice().unwrap().0;
        // From a few bytes up to the slice; not so small that the test takes long.
        let pieces: Vec<u64> = shares.iter().map(|s| (slice * s / 1000).max(slice / 50)).collect();
        let sent = run(&pacer, &pieces, channels, &late, until);
        let (most, least) = extremes(&sent, 100 * MS, until);
        let expected = rate / 10;
        prop_assert!(most <= expected + expected / 20, "{} of {}", most, expected);
        prop_assert!(least >= expected - expected / 20, "{} of {}", least, expected);
    }

    #[test]
    fn pieces_of_any_size_keep_the_rate(
        rate in 1_000..20_000_000_000u64, pieces in prop::collection::vec(1..8_000_000u64, 1..20),
    ) {
        let pacer = Pacer::new(Instant(7), Some(BytesPerSec(rate)));
        let mut now = Instant(7);
        let mut total = 0;
        for piece in &pieces {
            now = now.after(delay(&pacer, now, ByteCount(*piece)));
            total += piece;
        }
        // The next slot begins when all bytes would have passed.
        let end = now.after(delay(&pacer, now, ByteCount(1)));
        let took = u128::from(end.0 - 7);
        let ideal = (u128::from(total) * WORK_PER_BYTE).div_ceil(u128::from(rate));
        prop_assert_eq!(took, ideal);
    }

    #[test]
    fn tiny_pieces_add_up_exactly(rate in 1_000_000..100_000_000_000u64, piece in 1..100u64) {
        let pacer = Pacer::new(Instant(0), Some(BytesPerSec(rate)));
        let count = 10_000;
        (0..count).for_each(|_| { delay(&pacer, Instant(0), ByteCount(piece)); });
        let took = delay(&pacer, Instant(0), ByteCount(0)).as_nanos();
        let work = u128::from(piece * count) * WORK_PER_BYTE;
        prop_assert_eq!(took, work.div_ceil(u128::from(rate)));
    }
}

#[test]
fn idle_time_brings_no_burst() {
    let pacer = Pacer::new(Instant(0), Some(BytesPerSec(1_000_000_000)));
    let piece = pacer.slice().unwrap();
    assert_eq!(piece, ByteCount(2_000_000));
    let later = Instant(60_000 * MS);
    // 2 ms of catching up and the slot that begins now: two pieces at once, the third waits.
    assert_eq!(delay(&pacer, later, piece), Duration::ZERO);
    assert_eq!(delay(&pacer, later, piece), Duration::ZERO);
    assert_eq!(delay(&pacer, later, piece), Duration::from_millis(2));
    assert_eq!(delay(&pacer, later, piece), Duration::from_millis(4));
}

#[test]
fn without_a_limit_nobody_waits() {
    let pacer = Pacer::new(Instant(0), None);
    assert_eq!(pacer.slice(), None);
    assert_eq!(delay(&pacer, Instant(0), ByteCount(u64::MAX)), Duration::ZERO);
    assert_eq!(delay(&pacer, Instant(0), ByteCount(u64::MAX)), Duration::ZERO);
}

#[test]
fn a_new_rate_holds_from_now_on() {
    let pacer = Pacer::new(Instant(0), Some(BytesPerSec(1_000_000)));
    // 1 s worth at once: the next slot is in a second.
    delay(&pacer, Instant(0), ByteCount(1_000_000));
    assert_eq!(delay(&pacer, Instant(0), ByteCount(0)), Duration::from_secs(1));
    // Half of it has passed; the other half goes ten times as fast.
    pacer.set_rate(Instant(500 * MS), Some(BytesPerSec(10_000_000)));
    assert_eq!(delay(&pacer, Instant(500 * MS), ByteCount(0)), Duration::from_millis(50));
    pacer.set_rate(Instant(510 * MS), None);
    assert_eq!(delay(&pacer, Instant(510 * MS), ByteCount(1 << 40)), Duration::ZERO);
    // What was sent without a limit is not owed under the next one.
    pacer.set_rate(Instant(520 * MS), Some(BytesPerSec(1_000)));
    assert_eq!(delay(&pacer, Instant(520 * MS), ByteCount(1)), Duration::ZERO);
}

#[test]
fn absurd_values_do_no_harm() {
    let pacer = Pacer::new(Instant(u64::MAX), Some(BytesPerSec(0)));
    assert_eq!(pacer.slice(), Some(ByteCount(PAGE_SIZE)));
    assert_eq!(delay(&pacer, Instant(0), ByteCount(u64::MAX)), Duration::ZERO);
    assert_eq!(delay(&pacer, Instant(0), ByteCount(u64::MAX)), Duration::from_nanos(u64::MAX));
    let pacer = Pacer::new(Instant(0), Some(BytesPerSec(u64::MAX)));
    assert!(pacer.slice().is_some());
    assert_eq!(delay(&pacer, Instant(u64::MAX), ByteCount(u64::MAX)), Duration::ZERO);
}

/// Found at one byte a second: who had begun to wait waited for an hour, whatever became of the
/// limit meanwhile.
#[test]
fn who_waits_already_hears_of_a_new_rate() {
    let pacer = Pacer::new(Instant(0), Some(BytesPerSec(1)));
    pacer.reserve(Instant(0), ByteCount(4096));
    let slot = pacer.reserve(Instant(0), ByteCount(4096));
    assert_eq!(pacer.wait(Instant(0), slot), Duration::from_secs(4096));
    let second = Instant(1000 * MS);
    pacer.set_rate(second, Some(BytesPerSec(4095)));
    assert_eq!(pacer.wait(second, slot), Duration::from_secs(1), "one byte was worked off");
    pacer.set_rate(second, None);
    assert_eq!(pacer.wait(second, slot), Duration::ZERO);
    // A limit that is set again is owed nothing from before.
    pacer.set_rate(second, Some(BytesPerSec(1)));
    assert_eq!(pacer.wait(second, slot), Duration::ZERO);
    assert_eq!(delay(&pacer, second, ByteCount(1)), Duration::ZERO);
}
