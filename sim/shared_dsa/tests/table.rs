//! The table: what a full accelerator does to those who share it.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_policy::admission::OffloadPolicy;
use martlet_shared_dsa::{Options, Report, Row, picture, scenarios, table};

fn small() -> Options {
    Options { vms: vec![1, 10], channels: vec![8], zero: vec![50, 100], ..Options::default() }
}

fn rows_of<'a>(rows: &'a [Row], policy: &str) -> Vec<&'a Row> {
    rows.iter().filter(|row| row.policy == policy).collect()
}

/// In every cell of the whole table: the scan is never more than 2 % slower than by the CPU alone,
/// one batch in a hundred is never more than 1.2 times as late, and a byte takes no more CPU. Where a
/// device has room, it takes clearly less.
#[test]
fn a_full_accelerator_slows_nobody_down() {
    let policies = vec![OffloadPolicy::CpuOnly, OffloadPolicy::Adaptive];
    let rows = table(&Options { policies, ..Options::default() });
    let (cpu, adaptive) = (rows_of(&rows, "cpu-only"), rows_of(&rows, "adaptive"));
    assert_eq!((cpu.len(), adaptive.len()), (48, 48));
    for (cpu, adaptive) in cpu.iter().zip(&adaptive) {
        assert!(adaptive.scan_gb_s >= cpu.scan_gb_s * 0.98, "{adaptive:?}\n{cpu:?}");
        assert!(adaptive.p99_us <= cpu.p99_us * 1.2, "{adaptive:?}\n{cpu:?}");
        let per_byte = |row: &Row| row.cpu_cores / row.scan_gb_s;
        assert!(per_byte(adaptive) < per_byte(cpu) * 1.02, "{adaptive:?}\n{cpu:?}");
        let offered = cpu.scan_gb_s / f64::from(cpu.devices);
        if offered < 28.0 {
            assert!(adaptive.cpu_cores < cpu.cpu_cores * 0.9, "{adaptive:?}\n{cpu:?}");
        }
        assert!(adaptive.rejects_per_s < 1.0, "{adaptive:?}");
    }
}

/// What the review of the series was afraid of.
#[test]
fn the_series_way_stops_at_the_devices_and_makes_others_wait() {
    let options = Options {
        vms: vec![100],
        channels: vec![8],
        devices: vec![1],
        zero: vec![100],
        ..Options::default()
    };
    let rows = table(&options);
    let of = |policy: &str| rows_of(&rows, policy)[0].clone();
    let (cpu, block) = (of("cpu-only"), of("block"));
    assert!(block.scan_gb_s < 32.0 && cpu.scan_gb_s > 390.0);
    assert!(block.p99_us > 10.0 * cpu.p99_us && block.rejects_per_s > 1e8);
    // It only helps a little that the CPU does what a full device refuses.
    assert!(of("cpu-when-full").p99_us > 1.5 * cpu.p99_us);
    assert!(of("adaptive").p99_us < 1.2 * cpu.p99_us);
}

#[test]
fn saving_waits_longer_and_saves_more() {
    let options = Options {
        vms: vec![1],
        channels: vec![8],
        devices: vec![1],
        zero: vec![90],
        ..Options::default()
    };
    let rows = table(&options);
    let of = |policy: &str| rows_of(&rows, policy)[0].clone();
    let (adaptive, saving) = (of("adaptive"), of("adaptive-saving"));
    assert!(saving.cpu_cores < adaptive.cpu_cores / 2.0);
    assert!(saving.p99_us > adaptive.p99_us);
}

#[test]
fn a_seed_gives_the_same_table_and_another_one_nearly() {
    let rows = table(&small());
    assert_eq!(rows, table(&small()));
    let other = table(&Options { seed: 2, ..small() });
    assert_ne!(rows, other);
    // The saving mode has more than one way to settle: with more or fewer channels on the CPU.
    let steady = rows.iter().zip(&other).filter(|(row, _)| row.policy != "adaptive-saving");
    for (one, two) in steady {
        let off = (one.scan_gb_s - two.scan_gb_s).abs() / one.scan_gb_s;
        assert!(off < 0.03, "{one:?}\n{two:?}");
    }
}

#[test]
fn the_json_has_the_agreed_fields() {
    let options = Options { vms: vec![1], channels: vec![1], devices: vec![1], ..small() };
    let report = Report { scenarios: scenarios(), table: table(&options) };
    let json = serde_json::to_value(&report).unwrap();
    let keys = |value: &serde_json::Value| {
        value.as_object().unwrap().keys().cloned().collect::<Vec<String>>().join(" ")
    };
    assert_eq!(keys(&json), "scenarios table");
    assert_eq!(keys(&json["scenarios"]), "half zero");
    assert_eq!(keys(&json["scenarios"]["half"]), "cpu_only_ms martlet_ms series_ms");
    assert_eq!(
        keys(&json["table"][0]),
        "channels cpu_cores devices p50_us p99_us policy rejects_per_s scan_gb_s vms zero"
    );
}

#[test]
fn the_picture_is_whole() {
    let svg = picture(&table(&small()));
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    // Two devices' rows of two panels, five policies each.
    assert_eq!(svg.matches("fill=\"none\" stroke=").count(), 4 + 4 * 5);
    for policy in OffloadPolicy::ALL {
        assert!(svg.contains(policy.name()));
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
    assert!(picture(&[]).ends_with("</svg>\n"));
}

#[test]
fn impossible_options_are_named() {
    assert_eq!(Options::default().problem(), None);
    for bad in [
        Options { vms: vec![0], ..small() },
        Options { vms: vec![2000], ..small() },
        Options { devices: vec![65], ..small() },
        Options { zero: vec![101], ..small() },
    ] {
        assert!(bad.problem().is_some());
    }
}
