//! How much memory the control groups of this process let it have (cgroups(7)).

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The least limit of its own group and of those that it is in, in bytes; `None` without one.
pub(crate) fn memory_limit() -> Option<u64> {
    let mounts = read_to_string("/proc/self/mountinfo").ok()?;
    let groups = read_to_string("/proc/self/cgroup").ok()?;
    let files = limit_files(&mounts, &groups);
    files.iter().filter_map(|file| limit(&read_to_string(file).ok()?)).min()
}

/// What a limit's file says; `max` is none.
fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// The files with limits, from what `/proc/self/mountinfo` and `/proc/self/cgroup` say.
fn limit_files(mounts: &str, groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for (hierarchy, root, mount) in mounts.lines().filter_map(mounted) {
        let Some(group) = groups.lines().find_map(|line| hierarchy.group(line)) else { continue };
        // A container may see its own group as the root, under its name outside.
        let inner = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
        let folders = inner.ancestors().map(|folder| Path::new(mount).join(folder));
        files.extend(folders.map(|folder| folder.join(hierarchy.limit_file())));
    }
    files
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hierarchy {
    /// Version 2.
    Unified,
    /// Version 1, the controller of memory.
    Memory,
}

impl Hierarchy {
    fn limit_file(self) -> &'static str {
        match self {
            Hierarchy::Unified => "memory.max",
            Hierarchy::Memory => "memory.limit_in_bytes",
        }
    }

    /// The group in this hierarchy, if this line of `/proc/self/cgroup` is about it.
    fn group(self, line: &str) -> Option<&str> {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let is_it = match self {
            Hierarchy::Unified => controllers.is_empty(),
            Hierarchy::Memory => controllers.split(',').any(|name| name == "memory"),
        };
        is_it.then_some(group)
    }
}

/// The hierarchy that a line of `/proc/self/mountinfo` mounts, which group of it, and where.
fn mounted(line: &str) -> Option<(Hierarchy, &str, &str)> {
    let (mount, what) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, at) = (mount.next()?, mount.next()?);
    let mut what = what.split(' ');
    let (kind, options) = (what.next()?, what.nth(1)?);
    let hierarchy = match kind {
        "cgroup2" => Hierarchy::Unified,
        "cgroup" if options.split(',').any(|name| name == "memory") => Hierarchy::Memory,
        _ => return None,
    };
    Some((hierarchy, root, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw";

    fn files(mounts: &str, groups: &str) -> Vec<String> {
        let files = limit_files(mounts, groups);
        files.iter().map(|file| file.display().to_string()).collect()
    }

    #[test]
    fn a_limit_of_each_group_above_counts() {
        let mounts = format!("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{UNIFIED}");
        let slice = "0::/vms.slice/martlet.service\n";
        let expected = [
            "/sys/fs/cgroup/vms.slice/martlet.service/memory.max",
            "/sys/fs/cgroup/vms.slice/memory.max",
            "/sys/fs/cgroup/memory.max",
        ];
        assert_eq!(files(&mounts, slice), expected);
        assert_eq!(files(&mounts, "0::/\n"), ["/sys/fs/cgroup/memory.max"]);
        assert!(files(&mounts, "").is_empty());
        assert!(files("", slice).is_empty());
    }

    #[test]
    fn a_container_of_version_1_has_its_group_at_the_root() {
        let mounts = "40 30 0:33 /docker/1f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
                      41 30 0:34 /docker/1f /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n";
        let groups = "4:cpu,cpuacct:/docker/1f\n5:memory:/docker/1f/vm\n0::/\n";
        let expected = [
            "/sys/fs/cgroup/memory/vm/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        ];
        assert_eq!(files(mounts, groups), expected);
        // Outside of what is mounted: at least the mounted one.
        let elsewhere = "5:memory:/../else\n";
        assert_eq!(files(mounts, elsewhere), expected[1..]);
    }

    #[test]
    fn no_limit_is_none() {
        assert_eq!(limit("4294967296\n"), Some(4 << 30));
        assert_eq!(limit("max\n"), None);
        assert_eq!(limit(""), None);
    }
}
