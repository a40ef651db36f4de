//! Ordinary KVM: kvm_amd on the SVM that the emulator shows.
//!
//! What martlet's machine asks of a KVM must not be what one host's happens to give. This one traps
//! and schedules as on bare metal, and boots whatever a guest is.

use super::machine::{Pinning, Run};
use super::summary::Summary;
use super::{Lane, Obstacle, Step, build, cache, machine, need, packages, renamed};
use serde_json::Value;
use std::time::Duration;

const MODULES: &[&str] = &["kvm_amd"];

const PREPARE: &[&str] = &["ip link set lo up", "test -c /dev/kvm", KEEP_A_GUEST];

/// The kernel patches its own code when the first guest comes and when the last one goes, which the
/// emulator does not always survive. So one guest that does nothing stays from the beginning to the
/// end.
const KEEP_A_GUEST: &str = "(martlet run --accel kvm --memory 64M --paused --control /tmp/kept \
> /dev/null 2>&1 &); \
for i in $(seq 200); do test -S /tmp/kept && break; sleep 0.1; done; test -S /tmp/kept";

/// The built-in guest, moved from process to process.
const DEMO: &str = "martlet demo --accel kvm --memory 64M --program fill=16M,ws=2M,rate=1/ms \
--downtime-limit 3s --json";

/// Only the report is for us; how the demo got on is of interest if it failed.
const WORDS_IF_IT_FAILED: &str = "2> /tmp/words && exit; status=$?; cat /tmp/words; exit $status";

/// The machine's own tests, on this KVM.
const TESTS: &str = "machine-tests --nocapture";

/// Those of memory, of which some want a kernel that may lose some for good.
const RAM_TESTS: &str = "ram-tests --nocapture --ignored";

/// The limits are for a host that has much else to do; where it has not, all of this takes a minute
/// or two.
const STEP_MAX: Duration = Duration::from_secs(240);
const MACHINE_MAX: Duration = Duration::from_secs(600);

/// An emulator that has crashed is started again this often.
const CRASHES_MAX: u32 = 2;

/// What a group of steps runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Martlet,
    /// The tests of the machine's crate.
    MachineTests,
    /// Those of the memory's.
    RamTests,
}

impl Program {
    /// Its package and its name in the emulated PC, if it is a crate's tests.
    fn tests(self) -> Option<(&'static str, &'static str)> {
        match self {
            Program::Martlet => None,
            Program::MachineTests => Some(("martlet-machine", "machine-tests")),
            Program::RamTests => Some(("martlet-ram", "ram-tests")),
        }
    }
}

/// Steps that share an emulated PC.
struct Group {
    program: Program,
    steps: Vec<Step>,
}

fn groups() -> Vec<Group> {
    let step = |name, line: String| Step { name, line, limit: STEP_MAX };
    let demo = |name, options: &str| step(name, format!("{DEMO} {options} {WORDS_IF_IT_FAILED}"));
    let compared = |name, options: &str| demo(name, &format!("--runs 2 --verify {options}"));
    let tests = |name, filters: &str| step(name, format!("{TESTS} {filters}"));
    let demos = vec![
        compared("memory compared, log, 1 vCPU", "--dirty-tracking log --vcpus 1"),
        compared("memory compared, ring, 1 vCPU", "--dirty-tracking ring --vcpus 1"),
        compared("memory compared, log, 2 vCPUs", "--dirty-tracking log --vcpus 2"),
        compared("memory compared, ring, 2 vCPUs", "--dirty-tracking ring --vcpus 2"),
        demo("blackout, 1 vCPU", "--runs 3 --vcpus 1"),
        demo("blackout, 2 vCPUs", "--runs 3 --vcpus 2"),
    ];
    let machine_tests = vec![
        tests("what KVM writes", "tests::hypervisor_pages"),
        // One after the other: all have one host processor.
        tests("timers", "tests::timers --test-threads 1"),
        tests("resets", "tests::resets --test-threads 1"),
        tests("moving", "tests::moving --test-threads 1"),
        tests("clocks and rehearsals", "kvm::tests --test-threads 1"),
        tests("lost pages", "tests::lost --test-threads 1"),
    ];
    let poison = format!("{RAM_TESTS} a_poisoned_page_is_a_lost_page");
    vec![
        Group { program: Program::Martlet, steps: demos },
        Group { program: Program::MachineTests, steps: machine_tests },
        Group { program: Program::RamTests, steps: vec![step("poisoned memory", poison)] },
    ]
}

pub(super) fn run(only: &str) -> Result<Summary, Obstacle> {
    need("qemu-system-x86_64", "qemu-system-x86")?;
    need("taskset", "util-linux")?;
    let cache = cache()?;
    let packages = packages::fetch(&cache)?;
    let mut summary = Summary::new("kvm", packages.kernel()?.version);
    for group in groups() {
        let steps: Vec<Step> =
            group.steps.into_iter().filter(|step| step.name.contains(only)).collect();
        if steps.is_empty() {
            continue;
        }
        let martlet = build("build", &["-p", "martlet", "--bin", "martlet"])?;
        let mut programs = vec![renamed(&martlet, &cache, "martlet")?];
        if let Some((package, name)) = group.program.tests() {
            let tests = build("test", &["-p", package, "--lib", "--no-run"])?;
            programs.push(renamed(&tests, &cache, name)?);
        }
        let lane = Lane {
            modules: MODULES,
            prepare: PREPARE,
            verbs: false,
            programs,
            steps,
            memory_mib: 1536,
            limit: MACHINE_MAX,
            pinning: Pinning::OneProcessor,
        };
        let mut run = machine::run(&packages, &lane)?;
        for _ in 0..CRASHES_MAX {
            let Some(sign) = run.emulator_crash() else { break };
            println!("metal: the emulator crashed ({sign}); once more");
            run = machine::run(&packages, &lane)?;
        }
        count(&mut summary, &lane, &run);
    }
    Ok(summary)
}

/// Adds what the steps of one machine said.
fn count(summary: &mut Summary, lane: &Lane, run: &Run) {
    summary.judge(lane, run);
    for (step, lines) in lane.steps.iter().zip(&run.output) {
        for report in lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            summary.moves += report["completed_runs"].as_u64().unwrap_or(0);
            if let Some(blackout) = report["blackout"]["p50_ms"].as_f64() {
                summary.figure(&format!("{}, ms", step.name), blackout);
            }
        }
        summary.moves += lines.iter().filter_map(|line| moves(line)).sum::<u64>();
    }
}

/// The number in "... N moves ...".
fn moves(line: &str) -> Option<u64> {
    let before = line.split(" moves").next().filter(|before| before.len() < line.len())?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_counted_where_a_line_tells_them() {
        assert_eq!(moves("Pit: 628 ticks in 20 moves and 6.4 s"), Some(20));
        assert_eq!(moves("20 moves"), Some(20));
        assert_eq!(moves("it moves on"), None);
        assert_eq!(moves("no number"), None);
    }
}
