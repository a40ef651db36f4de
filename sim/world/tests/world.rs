//! The world of what ships: many seeds, every single fault at every step, and built wrongly.

use martlet_world::{Sabotage, Scenario, Summary, When, all_faults, run, run_traced};
use std::collections::BTreeMap;

/// Seeds of the random search. `cargo xtask worlds` plays more.
const SEEDS: u64 = 1_500;

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
    let mut steps = 0;
    for seed in 0..SEEDS {
        let summary = must_hold(&Scenario::random(seed));
        steps += summary.steps;
        *ends.entry(format!("{:?}", summary.first)).or_default() += 1;
    }
    println!("{ends:?}, {steps} steps");
    // The search is worth something only if it gets everywhere.
    for end in ["Some(Completed)", "Some(Failed)", "Some(Cancelled)", "Some(Undecided)", "None"] {
        assert!(ends.contains_key(end), "no run ended in {end}: {ends:?}");
    }
}

/// Records a clean run, then plays it again once for each of its steps and each fault before it.
#[test]
fn every_single_fault_at_every_step() {
    let small = Scenario { regions: vec![2, 3], channels: 2, verify: false, ..Scenario::clean(7) };
    let (mut runs, mut undecided) = (0, 0);
    let steps = must_hold(&small).first_steps;
    for step in 0..steps {
        for fault in all_faults(small.channels) {
            let faults = vec![(When::Step(step), fault)];
            let summary = must_hold(&Scenario { faults, ..small.clone() });
            runs += 1;
            undecided += u64::from(summary.was_undecided);
        }
    }
    println!("{steps} steps, {runs} runs, {undecided} undecided");
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

/// A comparison before the commit notices what would otherwise be lost with the guest.
#[test]
fn verification_notices_lost_writes() {
    let mut noticed = 0;
    for seed in 0..2000 {
        let scenario = Scenario { verify: true, ..Scenario::clean(seed) };
        if let Err(violation) = run(&scenario.sabotaged(Sabotage::ReadBeforeRearm)) {
            // The second attempt is built as wrongly as the first and fails as well: safely.
            assert!(
                violation.what.contains("memory at the destination differs"),
                "seed {seed}: {violation}"
            );
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
        (Sabotage::OperatorLies, "permit"),
        (Sabotage::ForgetPaused, "running became true"),
    ] {
        let noticed = (0..2000).find_map(|seed| {
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
