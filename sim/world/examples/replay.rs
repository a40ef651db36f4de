//! Plays one seed and prints all that happened: `cargo run -p martlet-world --example replay -- 7`.

use martlet_world::{Scenario, run_traced};
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(seed) = std::env::args().nth(1).and_then(|text| text.parse().ok()) else {
        eprintln!("usage: replay SEED");
        return ExitCode::from(2);
    };
    let scenario = Scenario::random(seed);
    let (result, trace) = run_traced(&scenario);
    println!("{scenario:#?}\n{trace}");
    match result {
        Ok(summary) => {
            println!("{summary:#?}");
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("VIOLATION: {violation}");
            ExitCode::FAILURE
        }
    }
}
