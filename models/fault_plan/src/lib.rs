//! Faults as data: what goes wrong in a model, and when. From a script, or from a seed.
//!
//! A model asks its plan at each point where something may go wrong. `P` names such points, `F`
//! the faults; both are the model's own types. The same plan and the same questions give the same
//! faults: a failing run is repeated by its seed.

#![forbid(unsafe_code)]

use martlet_simulation::{Chance, scatter};

/// One line of a script: at the points that are `at`, leave the first `skip` alone and let the
/// next `times` fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule<P, F> {
    /// Where.
    pub at: P,
    /// How often it goes well before.
    pub skip: u64,
    /// How often it goes wrong then; [`FOR_EVER`] for always.
    pub times: u64,
    /// What goes wrong.
    pub fault: F,
}

/// As [`Rule::times`]: never well again.
pub const FOR_EVER: u64 = u64::MAX;

/// What goes wrong, and when.
#[derive(Clone, Debug)]
pub struct FaultPlan<P, F> {
    script: Vec<Line<P, F>>,
    storm: Option<Storm<P, F>>,
    struck: u64,
}

#[derive(Clone, Debug)]
struct Line<P, F> {
    rule: Rule<P, F>,
    met: u64,
}

#[derive(Clone, Debug)]
struct Storm<P, F> {
    chance: Chance,
    per_million: u32,
    faults: Vec<(P, F)>,
}

impl<P, F> Default for FaultPlan<P, F> {
    /// Nothing ever goes wrong.
    fn default() -> FaultPlan<P, F> {
        FaultPlan { script: Vec::new(), storm: None, struck: 0 }
    }
}

impl<P, F: Clone> FaultPlan<P, F> {
    /// Exactly these faults. Where two rules meet, the first one strikes; the other counts the
    /// point all the same.
    pub fn script(rules: impl IntoIterator<Item = Rule<P, F>>) -> FaultPlan<P, F> {
        let script = rules.into_iter().map(|rule| Line { rule, met: 0 }).collect();
        FaultPlan { script, storm: None, struck: 0 }
    }

    /// The `nth` (from 0) point that is `at` fails, once.
    pub fn once(at: P, nth: u64, fault: F) -> FaultPlan<P, F> {
        FaultPlan::script([Rule { at, skip: nth, times: 1, fault }])
    }

    /// Each point fails with a chance of `per_million`, with one of the `faults` that fit it.
    pub fn random(seed: u64, per_million: u32, faults: Vec<(P, F)>) -> FaultPlan<P, F> {
        // Seeds next to each other begin far apart.
        let chance = Chance::new(scatter(seed));
        let storm = Some(Storm { chance, per_million, faults });
        FaultPlan { script: Vec::new(), storm, struck: 0 }
    }

    /// Adds a line to the script, counted from now.
    pub fn push(&mut self, rule: Rule<P, F>) {
        self.script.push(Line { rule, met: 0 });
    }

    /// Forgets all faults; what has struck stays counted.
    pub fn clear(&mut self) {
        self.script.clear();
        self.storm = None;
    }

    /// Asks whether something goes wrong here: at a point for which `is_here` says that a rule's
    /// point means it.
    pub fn strike_where(&mut self, is_here: impl Fn(&P) -> bool) -> Option<F> {
        let mut struck = None;
        for line in self.script.iter_mut().filter(|line| is_here(&line.rule.at)) {
            let met = line.met;
            line.met += 1;
            let due = met >= line.rule.skip && met - line.rule.skip < line.rule.times;
            if due && struck.is_none() {
                struck = Some(line.rule.fault.clone());
            }
        }
        let struck = struck.or_else(|| self.storm.as_mut()?.strike(is_here));
        self.struck += u64::from(struck.is_some());
        struck
    }

    /// How many faults have struck so far.
    pub fn struck(&self) -> u64 {
        self.struck
    }
}

impl<P: PartialEq, F: Clone> FaultPlan<P, F> {
    /// Asks whether something goes wrong at exactly this point.
    pub fn strike(&mut self, here: &P) -> Option<F> {
        self.strike_where(|at| at == here)
    }
}

impl<P, F: Clone> Storm<P, F> {
    fn strike(&mut self, is_here: impl Fn(&P) -> bool) -> Option<F> {
        let fitting = self.faults.iter().filter(|(at, _)| is_here(at));
        let count = u64::try_from(fitting.clone().count()).unwrap_or(u64::MAX);
        if count == 0 || self.chance.below(1_000_000) >= u64::from(self.per_million) {
            return None;
        }
        let chosen = usize::try_from(self.chance.below(count)).ok()?;
        self.faults.iter().filter(|(at, _)| is_here(at)).nth(chosen).map(|(_, fault)| fault.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_script_strikes_where_it_says() {
        let mut plan = FaultPlan::script([
            Rule { at: 'a', skip: 1, times: 2, fault: "first" },
            Rule { at: 'a', skip: 2, times: FOR_EVER, fault: "second" },
        ]);
        let struck: Vec<_> = "aabaaa".chars().map(|here| plan.strike(&here)).collect();
        let (first, second) = (Some("first"), Some("second"));
        assert_eq!(struck, [None, first, None, first, second, second]);
        assert_eq!(plan.struck(), 4);
        plan.clear();
        assert_eq!(plan.strike(&'a'), None);
    }

    proptest! {
        #[test]
        fn a_seed_repeats_itself(seed: u64, per_million in 0_u32..=1_000_000) {
            let run = || {
                let mut plan = FaultPlan::random(seed, per_million, vec![(1, 'x'), (1, 'y'), (2, 'z')]);
                (0..64).map(|n| plan.strike(&(n % 3))).collect::<Vec<_>>()
            };
            let faults = run();
            prop_assert_eq!(&faults, &run());
            prop_assert!(faults.iter().step_by(3).all(Option::is_none));
            if per_million == 1_000_000 {
                prop_assert!(faults.iter().skip(1).step_by(3).all(Option::is_some));
            }
        }
    }
}
