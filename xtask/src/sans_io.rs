//! What must not do I/O does none: no thread, socket or clock in its source.

use std::fs;
use std::path::Path;

/// Folders whose crates take time, chance and events as arguments, and give actions.
const SANS_IO: [&str; 6] = [
    "migration/core",
    "migration/protocol",
    "migration/policy",
    "migration/ram",
    "migration/rdma",
    "drivers",
];

/// Where a driver meets the operating system.
const EDGES: [(&str, &str); 5] = [
    ("drivers/verbs_soft/", "stands for a device, which does its work by itself"),
    ("drivers/verbs/src/conformance/", "a suite for tests, with both ends of a connection"),
    ("drivers/verbs/src/ibv/", "librdmacm connects by waiting"),
    ("drivers/dsa/src/wait.rs", "waits for hardware, where a thread may"),
    ("drivers/dsa/src/tokens.rs", "a file that processes share, and whose lock it waits for"),
];

/// How source begins to do I/O.
const FORBIDDEN: [&str; 14] = [
    "std::thread",
    "rustix::thread",
    "TcpListener",
    "TcpStream",
    "UdpSocket",
    "UnixDatagram",
    "UnixListener",
    "UnixStream",
    "libc::socket",
    "rustix::net",
    "clock_gettime",
    "Instant::now",
    "SystemTime",
    "std::time::Instant",
];

/// Checks these files; what is wrong, a line each.
pub(crate) fn check<'a>(root: &Path, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let sources = names.filter(|name| is_sans_io(name));
    sources
        .filter_map(|name| Some((name, fs::read_to_string(root.join(name)).ok()?)))
        .flat_map(|(name, text)| complaints(name, &text))
        .collect()
}

fn is_sans_io(name: &str) -> bool {
    let inside = |folder: &str| name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    let is_source = name.contains("/src/") && name.ends_with(".rs");
    let is_test = name.contains("/tests/") || name.ends_with("tests.rs");
    let is_edge = EDGES.iter().any(|(edge, _)| name.starts_with(edge));
    SANS_IO.iter().any(|folder| inside(folder)) && is_source && !is_test && !is_edge
}

fn complaints(name: &str, text: &str) -> Vec<String> {
    let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let mut wrong = Vec::new();
    for (index, line) in shipped.lines().enumerate() {
        let code = line.split("//").next().unwrap_or(line);
        for word in FORBIDDEN.iter().filter(|word| code.contains(*word)) {
            let at = index + 1;
            wrong.push(format!("{name}:{at}: {word}: this zone has no thread, socket or clock"));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_a_socket_and_a_clock_are_found() {
        for line in ["use std::thread;", "let s = UnixStream::pair();", "let now = Instant::now();"]
        {
            let text = format!("fn a() {{\n    {line}\n}}\n");
            let wrong = complaints("migration/ram/src/a.rs", &text);
            assert_eq!(wrong.len(), 1, "{line}");
            assert!(wrong[0].starts_with("migration/ram/src/a.rs:2: "), "{}", wrong[0]);
        }
    }

    #[test]
    fn comments_and_tests_may_name_them() {
        let text = "// As std::thread would.\n#[cfg(test)]\nmod tests {\n    use std::thread;\n}\n";
        assert_eq!(complaints("migration/ram/src/a.rs", text), [""; 0]);
    }

    #[test]
    fn edges_tests_and_other_zones_are_left_alone() {
        for name in ["migration/policy/src/pace.rs", "drivers/dsa/src/zero/job.rs"] {
            assert!(is_sans_io(name), "{name}");
        }
        for name in [
            "drivers/dsa/src/wait.rs",
            "drivers/verbs_soft/src/lib.rs",
            "drivers/mlx5/tests/rig/mod.rs",
            "migration/ram/src/untouched_tests.rs",
            "migration/engine/src/lib.rs",
            "migration/policy_of_others/src/lib.rs",
        ] {
            assert!(!is_sans_io(name), "{name}");
        }
    }

    /// An edge that is gone, or never did I/O, has no place in the list.
    #[test]
    fn every_edge_needs_its_exemption() {
        let root = crate::root();
        for (edge, _) in EDGES {
            let path = root.join(edge);
            let files: Vec<_> =
                match fs::read_dir(path.join("src")).or_else(|_| fs::read_dir(&path)) {
                    Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
                    Err(_) => vec![path],
                };
            let texts = files.iter().filter_map(|file| fs::read_to_string(file).ok());
            assert!(texts.flat_map(|text| complaints(edge, &text)).next().is_some(), "{edge}");
        }
    }
}
