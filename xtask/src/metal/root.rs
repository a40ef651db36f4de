//! The machine's root: programs, libraries, modules and the script that runs it all.

use super::archive::Archive;
use super::modules;
use super::{Lane, Obstacle, failed};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Where Debian keeps the libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// What programs of this workspace need.
const NEEDED: [&str; 4] = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];

/// The verbs libraries, and what they need.
const VERBS: [&str; 4] =
    ["libibverbs.so.1", "librdmacm.so.1", "libnl-3.so.200", "libnl-route-3.so.200"];

/// Begins the lines by which the machine tells how it gets on.
pub(super) const MARK: &str = "@@";

/// Builds the archive.
pub(super) fn archive(tree: &Path, lane: &Lane) -> Result<Vec<u8>, Obstacle> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "etc", "lib64", "modules", "proc", "run", "sys", "tmp"] {
        archive.folder(folder);
    }
    let mut take = |from: &str, to: &str| {
        // Follows links: the archive holds files only.
        let content = fs::read(tree.join(from)).map_err(|error| failed(from, &error))?;
        archive.file(to, &content);
        Ok(())
    };
    take("usr/bin/busybox", "bin/busybox")?;
    let verbs: &[&str] = if lane.verbs { &VERBS } else { &[] };
    for name in NEEDED.iter().chain(verbs) {
        take(&format!("{LIBRARIES}/{name}"), &format!("{LIBRARIES}/{name}"))?;
    }
    take(&format!("{LIBRARIES}/ld-linux-x86-64.so.2"), "lib64/ld-linux-x86-64.so.2")?;
    if lane.verbs {
        let provider = provider(tree)?;
        take(&provider, &provider)?;
        take("etc/libibverbs.d/rxe.driver", "etc/libibverbs.d/rxe.driver")?;
    }
    for program in &lane.programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let content = fs::read(program).map_err(|error| failed(&name, &error))?;
        archive.file(&format!("bin/{name}"), &content);
    }
    let modules = modules::in_order(tree, lane.modules)?;
    for module in &modules {
        archive.file(&format!("modules/{}.ko", module.name), &module.content);
    }
    let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
    archive.file("init", init(lane, &names).as_bytes());
    Ok(archive.finish())
}

/// The user space of soft-RoCE, whose name has the version of an interface in it.
fn provider(tree: &Path) -> Result<String, Obstacle> {
    let folder = format!("{LIBRARIES}/libibverbs");
    let found = fs::read_dir(tree.join(&folder))
        .map_err(|error| failed(&folder, &error))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.starts_with("librxe-"));
    let name = found.ok_or_else(|| Obstacle::Failed(format!("no librxe in {folder}")))?;
    Ok(format!("{folder}/{name}"))
}

/// The first process: prepares the machine, runs the steps, and tells of each.
fn init(lane: &Lane, modules: &[&str]) -> String {
    let mut script = "#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp TMPDIR=/tmp LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu
"
    .to_owned();
    let modules = modules.iter().map(|name| format!("insmod /modules/{name}.ko"));
    let prepare = lane.prepare.iter().map(|&line| line.to_owned());
    for line in modules.chain(prepare) {
        let _ = writeln!(script, "{line} || echo '{MARK}unprepared {line}'");
    }
    let _ = writeln!(script, "echo \"{MARK}prepared $(cut -d' ' -f1 /proc/uptime)\"");
    for (index, step) in lane.steps.iter().enumerate() {
        let (line, seconds) = (step.line.replace('\'', "'\\''"), step.limit.as_secs());
        let _ = writeln!(script, "echo '{MARK}begin {index}'");
        let _ = writeln!(script, "timeout {seconds} sh -c '{line}' 2>&1");
        let _ = writeln!(script, "echo \"{MARK}end {index} $?\"");
    }
    // What the kernel itself found wrong counts, whatever the programs say.
    let _ = writeln!(
        script,
        "dmesg | grep -E 'BUG:|WARNING:|Oops|refcount_t' | sed 's/^/{MARK}kernel /'"
    );
    let _ = writeln!(script, "echo '{MARK}done'\npoweroff -f");
    script
}
