//! Plays many seeds on all cores, and prints what goes wrong and how to play it again. With
//! `--sweep N`, for each of N seeds one fault at every step, and two around the commit.

use martlet_world::{Cut, Fault, LinkId, Scenario, Side, Summary, When, all_faults, run};
use std::collections::BTreeMap;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const USAGE: &str = "usage: worlds [--seeds A..B] [--sweep N]";

/// Failures after which nothing more is played.
const FAILURES_MAX: u64 = 20;

/// Steps before the commit is sent and behind it in which two faults strike.
const BEFORE_COMMIT: u64 = 8;
const BEHIND_COMMIT: u64 = 16;

struct Asked {
    seeds: Range<u64>,
    sweep: u64,
}

fn parse(arguments: &[String]) -> Option<Asked> {
    let mut asked = Asked { seeds: 0..10_000, sweep: 0 };
    for pair in arguments.chunks(2) {
        let [name, value] = pair else { return None };
        match name.as_str() {
            "--seeds" => {
                let (from, to) = value.split_once("..")?;
                asked.seeds = from.parse().ok()?..to.parse().ok()?;
            }
            "--sweep" => asked.sweep = value.parse().ok()?,
            _ => return None,
        }
    }
    Some(asked)
}

/// What was seen so far, by all threads.
#[derive(Default)]
struct Seen {
    runs: AtomicU64,
    failures: AtomicU64,
    ends: Mutex<BTreeMap<String, u64>>,
    stop: AtomicBool,
}

impl Seen {
    fn play(&self, scenario: &Scenario, again: &str) -> Option<Summary> {
        let played = run(scenario);
        self.runs.fetch_add(1, Ordering::Relaxed);
        match played {
            Ok(summary) => {
                let end = summary.first.map_or("SourceDied".to_owned(), |end| format!("{end:?}"));
                let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
                *ends.entry(end).or_default() += 1;
                Some(summary)
            }
            Err(violation) => {
                println!("{again}: {violation}\n    {:?}", scenario.faults);
                if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX {
                    self.stop.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    /// Does `work` for each of these, on all cores.
    fn each(&self, of: Range<u64>, work: impl Fn(u64) + Sync) {
        let next = AtomicU64::new(of.start);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..cores {
                scope.spawn(|| {
                    while !self.stop.load(Ordering::Relaxed) {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= of.end {
                            return;
                        }
                        work(number);
                    }
                });
            }
        });
    }
}

/// Faults that matter most around the commit.
fn sharp_faults() -> Vec<Fault> {
    let sides = [Side::Source, Side::Destination];
    let mut faults = vec![
        Fault::Cut(LinkId::Control, Cut::Close),
        Fault::Cut(LinkId::Control, Cut::Reset),
        Fault::Cut(LinkId::Control, Cut::SilenceBoth),
        Fault::Cut(LinkId::Data(0), Cut::Reset),
        Fault::Cancel,
    ];
    for side in sides {
        faults.push(Fault::Cut(LinkId::Control, Cut::Silence(side)));
        faults.push(Fault::Stall(LinkId::Control, side, Duration::from_secs(9)));
        faults.push(Fault::Freeze(side, Duration::from_secs(15)));
        faults.extend([true, false].map(|delivered| Fault::Crash { side, delivered }));
        faults.extend([Fault::Quit(side), Fault::Host(side)]);
    }
    faults
}

fn sweep_one(seen: &Seen, seed: u64) {
    let clean = Scenario::clean(seed);
    let again = format!("sweep of seed {seed}");
    let Some(summary) = seen.play(&clean, &again) else { return };
    for step in 0..summary.first_steps {
        for fault in all_faults(clean.channels) {
            let faults = vec![(When::Step(step), fault)];
            seen.play(&Scenario { faults, ..clean.clone() }, &again);
            if seen.stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }
    let Some(commit) = summary.commit_step else { return };
    let window = commit.saturating_sub(BEFORE_COMMIT)..commit + BEHIND_COMMIT;
    let sharp = sharp_faults();
    for first in window.clone() {
        // The second one at once, soon, and late.
        for second in [first, first + 2, first + 9].into_iter().filter(|at| window.contains(at)) {
            for one in &sharp {
                for other in &sharp {
                    let faults = vec![(When::Step(first), *one), (When::Step(second), *other)];
                    seen.play(&Scenario { faults, ..clean.clone() }, &again);
                }
            }
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(asked) = parse(&arguments) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let (seen, began) = (Seen::default(), Instant::now());
    seen.each(asked.seeds, |seed| {
        let again = format!("cargo run -p martlet-world --release --example replay -- {seed}");
        seen.play(&Scenario::random(seed), &again);
    });
    seen.each(0..asked.sweep, |seed| sweep_one(&seen, seed));
    let (runs, failures) = (seen.runs.into_inner(), seen.failures.into_inner());
    let ends = seen.ends.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!(
        "{runs} runs in {:.1} s, {failures} failures: {ends:?}",
        began.elapsed().as_secs_f64()
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
