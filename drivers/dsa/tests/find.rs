//! Discovery, on made-up trees.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_dsa::{Mode, OpenError, QueueLimits, QueueName, find, find_queue, open};
use martlet_dsa_abi::{Opcode, Version};
use std::path::{Path, PathBuf};

/// A directory of this test's own, empty.
fn directory(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("dsa-find-{name}"));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn put(root: &Path, name: &str, attributes: &[(&str, &str)]) {
    let path = root.join(name);
    std::fs::create_dir_all(&path).unwrap();
    for (attribute, value) in attributes {
        std::fs::write(path.join(attribute), format!("{value}\n")).unwrap();
    }
}

/// As Linux 6.1 shows a Sapphire Rapids, typed from its documentation.
fn sapphire_rapids(root: &Path) {
    let operations = "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff";
    put(
        root,
        "dsa2",
        &[
            ("version", "0x100"),
            ("pasid_enabled", "1"),
            ("state", "enabled"),
            ("op_cap", operations),
            ("max_batch_size", "1024"),
            ("max_transfer_size", "2147483648"),
        ],
    );
    put(
        root,
        "wq2.0",
        &[
            ("mode", "shared"),
            ("type", "user"),
            ("driver_name", "user"),
            ("state", "enabled"),
            ("size", "16"),
            ("max_batch_size", "32"),
            ("max_transfer_size", "2097152"),
            ("op_config", operations),
        ],
    );
    put(
        root,
        "wq2.10",
        &[
            ("mode", "dedicated"),
            ("type", "user"),
            ("state", "enabled"),
            ("size", "8"),
            ("max_batch_size", "64"),
            ("max_transfer_size", "4096"),
        ],
    );
    put(
        root,
        "wq2.3",
        &[("mode", "shared"), ("type", "kernel"), ("state", "disabled"), ("size", "0")],
    );
    put(root, "group2.0", &[("engines", "engine2.0 engine2.1"), ("work_queues", "wq2.0")]);
    put(root, "engine2.0", &[("group_id", "0")]);
    put(root, "iax1", &[("state", "enabled")]);
}

#[test]
fn a_hosts_devices_are_read_as_linux_shows_them() {
    let root = directory("host");
    sapphire_rapids(&root);
    let devices = find(&root).unwrap();
    let [device] = &devices[..] else { panic!("{devices:?}") };
    assert_eq!((device.number, device.version), (2, Some(Version::V1)));
    assert!(device.pasid && device.enabled);
    assert_eq!((device.batch_max, device.transfer_bytes_max), (Some(1024), Some(2 << 30)));
    assert!(device.operations.unwrap().has(Opcode::COMPVAL));
    let names: Vec<String> = device.queues.iter().map(|queue| queue.name.to_string()).collect();
    assert_eq!(names, ["wq2.0", "wq2.3", "wq2.10"]);
    let queue = &device.queues[0];
    assert_eq!((queue.mode, queue.size), (Some(Mode::Shared), 16));
    assert_eq!(device.obstacle(queue), None);
    assert_eq!(device.obstacle(&device.queues[1]), Some("it is not enabled"));
    // On a kernel without `driver_name`.
    assert_eq!(device.obstacle(&device.queues[2]), None);
}

#[test]
fn limits_are_the_queues_and_the_ways() {
    let root = directory("limits");
    sapphire_rapids(&root);
    let limits = |name: &str, through_file| {
        let (device, queue) = find_queue(&root, name.parse().unwrap()).unwrap().unwrap();
        device.limits(&queue, through_file)
    };
    let shared = QueueLimits { batch_max: 32, transfer_bytes_max: 2 << 20, credits: None };
    assert_eq!(limits("wq2.0", false), shared);
    // Version 1: no batches through the file.
    assert_eq!(limits("wq2.0", true), QueueLimits { batch_max: 1, ..shared });
    let dedicated = QueueLimits { batch_max: 64, transfer_bytes_max: 4096, credits: Some(8) };
    assert_eq!(limits("wq2.10", false), dedicated);
    put(&root, "dsa2", &[("version", "0x200"), ("max_batch_size", "16")]);
    assert_eq!(limits("wq2.0", true), QueueLimits { batch_max: 16, ..shared });
    put(&root, "dsa2", &[("op_cap", "40")]);
    assert_eq!(limits("wq2.0", false).batch_max, 1, "it has no batches");
}

#[test]
fn nonsense_is_no_device_and_no_number() {
    let root = directory("nonsense");
    assert_eq!(find(&root.join("nowhere")).unwrap(), []);
    assert_eq!(find(&root).unwrap(), []);
    let long = "9".repeat(100_000);
    put(
        &root,
        "dsa0",
        &[("version", "x"), ("max_batch_size", &long), ("op_cap", ",,"), ("pasid_enabled", "")],
    );
    put(&root, "wq0.0", &[("mode", "both"), ("size", "-5"), ("state", "enabled")]);
    for name in ["dsa", "dsa-1", "dsa99999", "dsa+1", "wq0", "wq0.", "wq.0", "wq0.0.0", "wq00x.1"] {
        put(&root, name, &[]);
    }
    std::fs::write(root.join("wq0.1"), "a file").unwrap();
    let devices = find(&root).unwrap();
    let [device] = &devices[..] else { panic!("{devices:?}") };
    assert_eq!((device.version, device.batch_max), (None, None));
    assert_eq!((device.operations, device.pasid), (None, false));
    assert_eq!((device.queues[0].mode, device.queues[0].size), (None, 0));
    assert!(device.obstacle(&device.queues[0]).is_some());
    assert_eq!(QueueName::of_path(Path::new("/dev/dsa/wq4.0")).unwrap().to_string(), "wq4.0");
    assert_eq!(QueueName::of_path(Path::new("/dev/dsa/wq4")), None);
}

#[test]
fn opening_says_what_is_in_the_way() {
    let root = directory("open");
    sapphire_rapids(&root);
    let error = |file: &Path| open(&root, file).unwrap_err();
    assert!(matches!(error(Path::new("/dev/null")), OpenError::Name(_)));
    let missing = error(Path::new("/dev/dsa/wq7.7"));
    assert_eq!(missing.to_string(), "there is no work queue wq7.7 here");
    let unusable = error(Path::new("/dev/dsa/wq2.3"));
    assert_eq!(unusable.to_string(), "work queue wq2.3 can't be used: it is not enabled");
    // Everything is right but the file.
    let file = root.join("nodes").join("wq2.0");
    assert!(matches!(error(&file), OpenError::Open { .. }));
    put(&root, "dsa2", &[("pasid_enabled", "0")]);
    assert!(error(&file).to_string().contains("intel_iommu=on,sm_on"));
}
