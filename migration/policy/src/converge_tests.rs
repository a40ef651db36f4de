use super::*;
use crate::{Measurements, predict};
use martlet_units::{ByteCount, BytesPerSec};
use proptest::prelude::*;

const LIMIT: Duration = Duration::from_millis(300);
const MEASURED: Measurements = Measurements {
    pause: Duration::from_micros(40),
    save: Duration::from_micros(200),
    sync: Duration::from_micros(10),
    dirty: PageCount(0),
    bandwidth: BytesPerSec(1_000_000_000),
    state: ByteCount(50_000),
    round_trip: Duration::from_micros(30),
    load: Duration::from_micros(120),
    start: Duration::from_micros(25),
};

fn result(sent: u64, dirty: u64) -> RoundResult {
    let measured = Measurements { dirty: PageCount(dirty), ..MEASURED };
    RoundResult {
        sent: PageCount(sent),
        dirty: PageCount(dirty),
        duration: MEASURED.bandwidth.time_for(PageCount(sent).to_bytes()),
        prediction: predict(&measured),
    }
}

fn next(throttle_percent: u8) -> Decision {
    Decision::NextRound { throttle_percent, rest: Duration::ZERO }
}

/// The decisions after these rounds of `(sent, dirty)`.
fn decide(rounds: &[(u64, u64)], limit: Duration) -> Vec<Decision> {
    let mut convergence = Convergence::new(AutoConverge::On);
    rounds
        .iter()
        .map(|(sent, dirty)| convergence.after_round(&result(*sent, *dirty), limit))
        .collect()
}

#[test]
fn a_quiet_guest_leaves_after_one_round() {
    assert_eq!(decide(&[(131_072, 0)], LIMIT), [Decision::Switchover]);
    // 12 pages take 49 us.
    assert_eq!(decide(&[(131_072, 12)], LIMIT), [Decision::Switchover]);
    assert_eq!(decide(&[(0, 0)], LIMIT), [Decision::Switchover]);
}

#[test]
fn rounds_go_on_while_they_shorten_the_blackout() {
    // All of them fit 300 ms, the first by far.
    let rounds = [(131_072, 4000), (4000, 300), (300, 40), (40, 11)];
    assert_eq!(decide(&rounds, LIMIT), [next(0), next(0), next(0), Decision::Switchover]);
}

#[test]
fn rounds_end_when_they_no_longer_help() {
    let rounds = [(131_072, 4000), (4000, 1000), (1000, 900), (900, 1100)];
    assert_eq!(decide(&rounds, LIMIT), [next(0), next(0), next(0), Decision::Switchover]);
    // In a burst they wait for it to pass.
    let burst = [(9999, 1000), (1000, 990), (990, 3000), (3000, 3100), (3100, 1010)];
    let expected = [next(0), next(0), next(0), next(0), Decision::Switchover];
    assert_eq!(decide(&burst, LIMIT), expected);
    // But not for ever.
    let flood: Vec<_> = [(9999, 1000)].into_iter().chain([(1000, 3000); 6]).collect();
    let decisions = decide(&flood, LIMIT);
    assert_eq!(decisions.iter().position(|d| *d == Decision::Switchover), Some(6));
}

#[test]
fn polishing_has_an_end() {
    // Each second round gains just enough, so the guest never looks stagnant.
    let mut dirty = 1_000_000;
    let mut rounds = Vec::new();
    for round in 0..60 {
        rounds.push((dirty, dirty));
        dirty = if round % 2 == 1 { dirty * 4 / 5 } else { dirty };
    }
    let decisions = decide(&rounds, Duration::from_secs(3600));
    let stop = decisions.iter().position(|d| *d == Decision::Switchover);
    assert_eq!(stop, Some(POLISH_ROUNDS_MAX as usize - 1));
}

#[test]
fn what_does_not_fit_is_never_chosen() {
    // 20000 pages take 82 ms.
    let hot = [(131_072, 20_000); 80];
    let decisions = decide(&hot, Duration::from_millis(50));
    assert!(!decisions.contains(&Decision::Switchover));
}

#[test]
fn the_throttle_rises_step_by_step_and_stops_at_99() {
    let limit = Duration::from_millis(50);
    let hot = [(40_000, 20_000); 12];
    let expected = [0, 20, 30, 40, 50, 60, 70, 80, 90, 99, 99, 99].map(next);
    assert_eq!(decide(&hot, limit), expected);
    // A round below one half starts the count anew.
    let rounds = [(40_000, 20_000), (40_000, 19_000), (40_000, 20_000), (40_000, 20_000)];
    assert_eq!(decide(&rounds, limit), [0, 0, 0, 20].map(next));
    let mut off = Convergence::new(AutoConverge::Off);
    assert!(hot.iter().all(|(s, d)| off.after_round(&result(*s, *d), limit) == next(0)));
    assert_eq!(off.throttle_percent(), 0);
}

#[test]
fn the_guest_is_not_slowed_down_for_what_it_did_not_do() {
    // The fixed part alone is longer than the limit: rounds become rare instead.
    let limit = Duration::from_micros(100);
    let mut convergence = Convergence::new(AutoConverge::On);
    for _ in 0..10 {
        assert_eq!(convergence.after_round(&result(40_000, 20_000), limit), next(0));
    }
    let small = result(10, 5);
    let decision = convergence.after_round(&small, limit);
    let rest = Duration::from_millis(10) - small.duration;
    assert_eq!(decision, Decision::NextRound { throttle_percent: 0, rest });
    assert_eq!(convergence.after_round(&small, LIMIT), Decision::Switchover, "limit raised");
}

/// A guest that dirties a working set at a rate, over this link: the rounds as they would be, and
/// the throttle that slows the guest down. Returns rounds and dirty pages at the stop.
fn simulate(pages: u64, ws: u64, pages_per_s: u64, limit: Duration) -> Option<(u32, u64)> {
    const ROUND_OVERHEAD: Duration = Duration::from_micros(100);
    let mut convergence = Convergence::new(AutoConverge::On);
    let (mut sent, mut throttle) = (pages, 0u8);
    for round in 1..1000 {
        let duration = result(sent, 0).duration + ROUND_OVERHEAD;
        let speed = pages_per_s * (100 - u64::from(throttle)) / 100;
        let dirty = u128::from(speed) * duration.as_nanos() / 1_000_000_000;
        let dirty = u64::try_from(dirty).unwrap().min(ws);
        match convergence.after_round(&RoundResult { duration, ..result(sent, dirty) }, limit) {
            Decision::Switchover => return Some((round, dirty)),
            Decision::NextRound { throttle_percent, .. } => throttle = throttle_percent,
        }
        sent = dirty;
    }
    None
}

#[test]
fn guests_by_dirty_rate() {
    // The link carries 244 140 pages a second; 1 GiB is 262 144 pages, the working set 64 MiB.
    let table = [
        (0, Some((1, 0))),
        (4_000, Some((3, 1))),
        (40_000, Some((6, 6))),
        (120_000, Some((15, 23))),
        (200_000, Some((27, 199))),
    ];
    for (rate, expected) in table {
        assert_eq!(simulate(262_144, 16_384, rate, LIMIT), expected, "{rate} pages a second");
    }
}

#[test]
fn a_guest_faster_than_the_link_converges_by_the_throttle() {
    // 4 GiB of working set, written at twice the link's rate; without the throttle it never fits.
    let (rounds, dirty) = simulate(2_000_000, 1_048_576, 500_000, LIMIT).unwrap();
    assert!(rounds < 60, "{rounds} rounds");
    assert!(result(0, dirty).prediction.total() <= LIMIT);
}

proptest! {
    #[test]
    fn a_lower_limit_never_switches_earlier(
        rounds in prop::collection::vec((0..300_000u64, 0..100_000u64), 1..80),
        low_us in 0..500_000u64, more_us in 0..500_000u64,
    ) {
        let at = |limit_us| {
            let decisions = decide(&rounds, Duration::from_micros(limit_us));
            decisions.iter().position(|d| *d == Decision::Switchover).unwrap_or(usize::MAX)
        };
        prop_assert!(at(low_us) >= at(low_us + more_us));
    }

    #[test]
    fn every_stop_fits_and_a_fitting_guest_stops(
        rounds in prop::collection::vec((0..300_000u64, 0..100_000u64), 50..60),
        limit_us in 0..800_000u64,
    ) {
        let limit = Duration::from_micros(limit_us);
        let mut convergence = Convergence::new(AutoConverge::On);
        let mut throttle = 0;
        let mut stopped = false;
        for (sent, dirty) in &rounds {
            let result = result(*sent, *dirty);
            match convergence.after_round(&result, limit) {
                Decision::Switchover => {
                    prop_assert!(result.prediction.total() <= limit);
                    stopped = true;
                    break;
                }
                Decision::NextRound { throttle_percent, .. } => {
                    prop_assert!(throttle_percent >= throttle);
                    prop_assert!(throttle_percent <= THROTTLE_PERCENT_MAX);
                    throttle = throttle_percent;
                }
            }
        }
        let last_fits = result(0, rounds[rounds.len() - 1].1).prediction.total() <= limit;
        prop_assert!(stopped || !last_fits, "it fitted after {} rounds", rounds.len());
    }
}

#[test]
fn a_guest_faster_than_the_link_is_said_to_be() {
    // 100,000 pages take 410 ms.
    let fast = result(100_000, 100_000);
    let mut convergence = Convergence::new(AutoConverge::Off);
    assert_eq!(convergence.after_round(&fast, LIMIT), next(0));
    assert!(!convergence.is_outrun(), "once is a burst");
    assert_eq!(convergence.after_round(&fast, LIMIT), next(0));
    assert!(convergence.is_outrun());
    // Its owner lets it be slowed down.
    convergence.set_auto_converge(AutoConverge::On);
    assert!(!convergence.is_outrun());
    assert_eq!(convergence.after_round(&fast, LIMIT), next(20));
    for _ in 0..20 {
        convergence.after_round(&fast, LIMIT);
    }
    assert!(convergence.is_outrun(), "nothing more can be taken from it");
    convergence.after_round(&result(100_000, 1_000), LIMIT);
    assert!(!convergence.is_outrun());
}
