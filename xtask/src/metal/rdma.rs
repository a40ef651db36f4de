//! Verbs over the kernel's soft-RoCE.

use super::machine::Pinning;
use super::summary::Summary;
use super::{Lane, Obstacle, Step, build, cache, failed, machine, need, packages, renamed};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Where the soft-RoCE device's network interface is. 127.0.0.1 on `lo` does not work: the
/// connection manager finds no route there.
const ADDRESS: &str = "10.8.0.1";

const MODULES: &[&str] =
    &["crc32_generic", "crc32c_generic", "dummy", "ib_uverbs", "rdma_ucm", "rdma_rxe"];

/// An MTU of 4200 lets RoCE have one of 4096.
const PREPARE: &[&str] = &[
    "ip link set lo up",
    "ip addr add 10.8.0.1/24 dev dummy0",
    "ip link set dummy0 mtu 4200 up",
    "conform add-rxe rxe0 dummy0",
    "ulimit -l unlimited",
];

/// Without a library the error must name the packages.
const WITHOUT_LIBRARY: &str = "cd /usr/lib/x86_64-linux-gnu && mv librdmacm.so.1 away && \
! conform devices 10.8.0.1 2> /tmp/why; mv away librdmacm.so.1; cat /tmp/why; \
grep -q 'cannot open librdmacm.so.1.*libibverbs1, librdmacm1 and ibverbs-providers' /tmp/why";

/// A guest moves between two processes, whose memories are compared before the commit. The options
/// of the migration come behind.
const MIGRATION: &str = "rm -f /tmp/a /tmp/b; export MARTLET_THREADS_BY_TCP=1; \
martlet receive --control /tmp/b --listen rdma:10.8.0.1:4444 --rdma-provider ibv --accel threads & \
martlet run --control /tmp/a --memory 64M --accel threads \
--program fill=8M,ws=1M,rate=1/ms,tick=10ms,verify=4 & \
until martlet status --control /tmp/a --json 2>/dev/null | grep -q filled.:true; do usleep 100000; done; \
until martlet status --control /tmp/b --json >/dev/null 2>&1; do usleep 100000; done; \
martlet migrate --control /tmp/a rdma:10.8.0.1:4444 --rdma-provider ibv --rdma-qps 2 \
--rdma-chunk 1M --downtime-limit 3s --verify --json";

/// The report must say that all of it went by the device and arrived; then the guest must be well.
const ARRIVED: &str = "cat /tmp/words /tmp/report; martlet status --control /tmp/b --json > /tmp/there; \
cat /tmp/there; martlet quit --control /tmp/b; martlet quit --control /tmp/a; \
grep -q outcome.:.completed /tmp/report && grep -q device.:.ibv /tmp/report && \
grep -q fell_back.:null /tmp/report && grep -q memory_equal.:true /tmp/report && \
grep -q wrong-pages.:0 /tmp/there";

/// What is run, in this order. A further step is a further line here, and its program one in
/// [`run`].
fn steps() -> Vec<Step> {
    let step = |name, line: String, seconds| {
        let limit = Duration::from_secs(seconds);
        Step { name, line, limit }
    };
    vec![
        step("devices", format!("conform devices {ADDRESS}"), 10),
        step("without librdmacm", WITHOUT_LIBRARY.to_owned(), 10),
        step("conformance", format!("conform ibv {ADDRESS} --soft-roce"), 60),
        step("in flight", format!("conform bench ibv {ADDRESS} --pages 2000"), 30),
        step("migration", migration(""), 40),
        step("migration, all pinned", migration("--rdma-pin-all"), 40),
    ]
}

fn migration(options: &str) -> String {
    format!("{MIGRATION} {options} > /tmp/report 2> /tmp/words; {ARRIVED}")
}

pub(super) fn run(only: &str) -> Result<Summary, Obstacle> {
    need("qemu-system-x86_64", "qemu-system-x86")?;
    let cache = cache()?;
    let packages = packages::fetch(&cache)?;
    let mut summary = Summary::new("rdma", packages.kernel()?.version);
    if "layouts".contains(only) {
        check_layouts(&packages.headers())?;
        summary.pass();
    }
    let steps: Vec<Step> = steps().into_iter().filter(|step| step.name.contains(only)).collect();
    if steps.is_empty() {
        return Ok(summary);
    }
    let mut programs = build("build", &["-p", "martlet-verbs-soft", "--example", "conform"])?;
    let is_migration = |step: &&Step| step.name.starts_with("migration");
    if steps.iter().any(|step| is_migration(&step)) {
        let built = build("build", &["-p", "martlet", "--bin", "martlet"])?;
        programs.push(renamed(&built, &cache, "martlet")?);
    }
    let lane = Lane {
        modules: MODULES,
        prepare: PREPARE,
        verbs: true,
        programs,
        steps,
        memory_mib: 768,
        limit: Duration::from_secs(100),
        pinning: Pinning::None,
    };
    let run = machine::run(&packages, &lane)?;
    summary.judge(&lane, &run);
    let ended = lane.steps.iter().zip(&run.endings);
    let moved = ended.filter(|(step, ending)| is_migration(step) && **ending == Some(0));
    summary.moves = moved.map(|_| 1).sum();
    Ok(summary)
}

/// Compares the structures of the `ibv` provider with rdma-core's own headers.
fn check_layouts(headers: &Path) -> Result<(), Obstacle> {
    need("cc", "gcc")?;
    let output = Command::new(env!("CARGO"))
        .args(["test", "-q", "-p", "martlet-verbs", "--lib", "--", "--nocapture", "layout"])
        .env("CPATH", headers)
        .current_dir(crate::root())
        .output()
        .map_err(|error| failed("cargo test", &error))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() || text.contains("skipped") {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Obstacle::Failed(format!(
            "layouts against rdma-core's headers: {text}{errors}"
        )));
    }
    println!("ok    layouts are those of rdma-core's headers");
    Ok(())
}
