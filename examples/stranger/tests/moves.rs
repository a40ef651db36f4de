//! The guest goes to another process and comes back, as often as it takes to believe it.

use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::process::Command;

#[test]
fn a_guest_moves_between_two_processes_twenty_times() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        let required = std::env::var("MARTLET_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|one| one == "kvm"), "/dev/kvm is required: {error}");
        // Past the test's own capture.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no /dev/kvm ({error})");
        return;
    }
    let command = Command::new(env!("CARGO_BIN_EXE_martlet-stranger"))
        .args(["--runs", "20", "--json"])
        .output()
        .expect("the example starts");
    let errors = String::from_utf8_lossy(&command.stderr);
    assert!(command.status.success(), "{errors}");
    let result: Value = serde_json::from_slice(&command.stdout).expect("one JSON object");
    println!("{result}");
    assert_eq!(result["outcome"], "completed");
    assert_eq!(result["runs"], 20);
    assert_eq!(result["memory_equal"], true);
    for key in ["p50_ms", "p99_ms", "max_ms"] {
        assert!(result["blackout"][key].as_f64().is_some_and(|ms| ms > 0.0), "{key}");
    }
}
