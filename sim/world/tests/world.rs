//! The world under many seeds, under every single fault at every step, and built wrongly.

use martlet_world::{Sabotage, Scenario, Summary, When, all_faults, run, run_traced};
use std::collections::BTreeMap;

/// Seeds of the random search: a few seconds on two cores. `MARTLET_SEEDS` asks for more.
const SEEDS: u64 = 2_000;

fn seeds() -> u64 {
    std::env::var("MARTLET_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

/// Plays a scenario that must hold; prints how to play it again if it doesn't.
fn must_hold(scenario: &Scenario) -> Summary {
    match run(scenario) {
        Ok(summary) => summary,
        Err(violation) => {
            let (_, trace) = run_traced(scenario);
            panic!("{violation}\n{scenario:#?}\n{trace}");
        }
    }
}

#[test]
fn clean_runs_move_the_guest() {
    for seed in 0..200 {
        let summary = must_hold(&Scenario::clean(seed));
        assert!(summary.attempts == 1 && !summary.was_undecided, "seed {seed}: {summary:?}");
    }
}

#[test]
fn random_faults() {
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 0..seeds() {
        let summary = must_hold(&Scenario::random(seed));
        *ends.entry(format!("{:?}", summary.reached)).or_default() += 1;
    }
    // The search is worth something only if it gets everywhere.
    println!("{ends:?}");
    for end in ["Completed", "Failed", "Cancelled", "Undecided", "Committing", "Sending"] {
        assert!(ends.contains_key(end), "no run ended in {end}: {ends:?}");
    }
}

/// Records a clean run, then plays it again once for each of its steps and each fault before it.
#[test]
fn every_single_fault_at_every_step() {
    let small =
        |verify, running| Scenario { pages: 8, channels: 2, verify, running, ..Scenario::clean(7) };
    let (mut runs, mut undecided) = (0, 0);
    for scenario in [small(false, true), small(true, false)] {
        let steps = must_hold(&scenario).first_steps;
        for step in 0..steps {
            for fault in all_faults(scenario.channels) {
                let faults = vec![(When::Step(step), fault)];
                let summary = must_hold(&Scenario { faults, ..scenario.clone() });
                runs += 1;
                undecided += u64::from(summary.was_undecided);
            }
        }
    }
    println!("{runs} runs, {undecided} undecided");
    assert!(undecided > 0);
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    let mut hashes = Vec::new();
    for seed in 0..50 {
        let scenario = Scenario::random(seed);
        let first = must_hold(&scenario);
        let (second, trace) = run_traced(&scenario);
        assert_eq!(second.as_ref(), Ok(&first), "seed {seed}\n{trace}");
        hashes.push(first.hash);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 50, "different seeds give different runs");
}

/// Seeds that once showed a mistake.
#[test]
fn pinned_seeds() {
    for line in include_str!("seeds.txt").lines() {
        let text = line.split('#').next().unwrap_or_default().trim();
        if !text.is_empty() {
            must_hold(&Scenario::random(text.parse().expect("a seed")));
        }
    }
}

/// A comparison before the commit notices what would otherwise be lost with the guest.
#[test]
fn verification_notices_lost_writes() {
    let mut noticed = 0;
    for seed in 0..3000 {
        let scenario = Scenario { verify: true, ..Scenario::clean(seed) };
        if let Err(violation) = run(&scenario.sabotaged(Sabotage::ReadBeforeRearm)) {
            // The second attempt is built as wrongly as the first and fails as well: safely.
            assert!(violation.what.contains("MemoryDiffers"), "seed {seed}: {violation}");
            noticed += 1;
        }
    }
    assert!(noticed > 0);
}

/// The checkers are worth something only if they notice.
#[test]
fn mistakes_are_noticed() {
    for (sabotage, complaint) in [
        (Sabotage::FirstBarrierCounts, "at the destination"),
        (Sabotage::ReadBeforeRearm, "at the destination"),
        (Sabotage::KeepRehearsedState, "state"),
        (Sabotage::ResumeWhenUndecided, "permit"),
        (Sabotage::OperatorLies, "started"),
        (Sabotage::ForgetPaused, "running became true"),
    ] {
        let noticed = (0..500).find_map(|seed| {
            let scenario = match sabotage {
                Sabotage::FirstBarrierCounts
                | Sabotage::ReadBeforeRearm
                | Sabotage::KeepRehearsedState => Scenario::clean(seed),
                Sabotage::ResumeWhenUndecided | Sabotage::OperatorLies | Sabotage::ForgetPaused => {
                    Scenario::random(seed)
                }
            };
            // A mistake may be seen by what follows from it before it is seen itself.
            let violation = run(&scenario.sabotaged(sabotage)).err();
            violation.filter(|violation| violation.what.contains(complaint))
        });
        let violation = noticed.unwrap_or_else(|| panic!("{sabotage:?} went unnoticed"));
        println!("{sabotage:?}: {violation}");
    }
}
