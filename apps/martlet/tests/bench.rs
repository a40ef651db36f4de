//! `demo --vdpa`, `demo --zero-check`, `bench` and `sim`: what they print for machines is there, and
//! true as far as a busy host lets it be.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use serde_json::Value;
use std::process::{Command, Output};

fn martlet(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_martlet")).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "martlet {arguments:?}: {errors}");
    output
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_slice(&martlet(arguments).stdout).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_guest_moves_with_its_cards() {
    let cards = "model=mlx5,devices=2,queues=4";
    let program = "fill=16M,ws=4M,rate=1/ms";
    let result = json(&[
        "demo",
        "--vdpa",
        cards,
        "--memory",
        "128M",
        "--program",
        program,
        "--runs",
        "2",
        "--json",
        "--downtime-limit",
        "10s",
    ]);
    assert_eq!((&result["outcome"], &result["completed_runs"]), (&"completed".into(), &2.into()));
    let frames = &result["guest"]["frames"];
    assert!(frames["received"].as_u64().unwrap() > 1000, "{frames}");
    for bad in ["lost", "repeated", "damaged"] {
        assert_eq!(frames[bad], 0, "{frames}");
    }
    let network = &result["network"];
    assert_eq!(
        (network["cards_ms"].as_array().unwrap().len(), &network["trouble"]),
        (2, &Value::Null)
    );
    assert!(number(&network["suspend_ms"]) > 0.0 && number(&network["resume_ms"]) > 0.0);
    let spans = result["timeline"].as_array().unwrap();
    let place = |name: &str| spans.iter().find(|span| span["name"] == name).unwrap();
    assert!(
        place("suspend devices")["end_us"].as_i64() <= place("stop vCPUs")["start_us"].as_i64()
    );
    assert!(
        place("start vCPUs")["end_us"].as_i64() <= place("resume devices")["start_us"].as_i64()
    );
}

#[test]
fn a_destination_without_cards_keeps_the_guest_at_its_source() {
    let error = Command::new(env!("CARGO_BIN_EXE_martlet"))
        .args(["demo", "--vdpa", "model=e1000"])
        .output()
        .unwrap();
    assert_eq!(error.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&error.stderr).lines().count(), 1);
}

#[test]
fn a_modelled_accelerator_moves_a_guest() {
    let program = "fill=16M,ws=4M,rate=1/ms";
    let result = json(&[
        "demo",
        "--zero-check",
        "dsa:model",
        "--memory",
        "128M",
        "--program",
        program,
        "--verify",
        "--json",
        "--downtime-limit",
        "10s",
    ]);
    assert_eq!((&result["outcome"], &result["memory_equal"]), (&"completed".into(), &true.into()));
    assert_eq!(result["guest"]["wrong_pages"], 0);
}

#[test]
fn bench_vdpa_has_the_promised_fields() {
    let result = json(&["bench", "vdpa", "--queues", "8", "--memory", "4G", "--json"]);
    for field in ["serial_ms", "batched_unregistered_ms", "batched_ms"] {
        assert!(number(&result["suspend"][field]) > 0.0, "{result}");
    }
    // One command after the other never takes less than its latencies.
    assert!(number(&result["suspend"]["serial_ms"]) >= 8.0 * 0.79 + 10.5, "{result}");
    assert!(number(&result["resume"]["serial_ms"]) >= 8.0 * 0.48, "{result}");
    assert!(number(&result["resume"]["batched_ms"]) > 0.0);
    for field in ["create_speedup", "destroy_speedup"] {
        assert!(number(&result["mkey"][field]) > 0.0, "{result}");
    }
    for row in ["baseline", "parallel", "deferred", "martlet"] {
        let columns = result["downtime_ms"][row].as_array().unwrap();
        assert!(columns.len() == 2 && columns.iter().all(|column| number(column) > 0.0), "{row}");
    }
}

#[test]
fn bench_zero_check_has_a_row_for_each_method() {
    let result = json(&["bench", "zero-check", "--zero", "50", "--json"]);
    let rows = result["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["modelled"] == true));
    assert!(rows.iter().any(|row| row["method"] == "cpu (scalar)"));
    assert!(rows.iter().all(|row| number(&row["pages_per_s"]) > 0.0));
}

#[test]
fn sim_dsa_has_the_promised_fields() {
    let result = json(&["sim", "dsa", "--vms", "1", "--channels", "1", "--devices", "1", "--json"]);
    for scenario in ["half", "zero"] {
        for field in ["cpu_only_ms", "series_ms", "martlet_ms"] {
            assert!(number(&result["scenarios"][scenario][field]) > 0.0);
        }
    }
    let rows = result["table"].as_array().unwrap();
    assert_eq!(rows.len(), 4 * 5, "four shares of zero pages, five policies");
    for field in ["vms", "channels", "devices", "zero", "scan_gb_s", "p50_us", "p99_us"] {
        assert!(rows.iter().all(|row| number(&row[field]) >= 0.0), "{field}");
    }
    assert!(
        rows.iter().all(|row| row["cpu_cores"].is_number() && row["rejects_per_s"].is_number())
    );
}
