//! The emulated PC.

use super::packages::Packages;
use super::root::{self, MARK};
use super::{Lane, Obstacle, failed};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

/// Ends the machine, however this ends.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// On which of the host's processors the emulator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pinning {
    /// On any.
    None,
    /// All of it on one: QEMU 10's emulation of SVM crashes every few minutes while two of its
    /// processors really run at once.
    OneProcessor,
}

/// What a machine did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    /// How each step ended: its exit status, 124 or 143 if it took too long.
    pub(super) endings: Vec<Option<i32>>,
    /// What each step printed.
    pub(super) output: Vec<Vec<String>>,
    /// What went wrong besides.
    pub(super) wrong: Vec<String>,
}

impl Run {
    /// A sign that the machine itself crashed, which no program in it can bring about: its kernel
    /// runs on another's registers, or on code that it has patched since (it does when the first
    /// guest comes and when the last goes).
    pub(super) fn emulator_crash(&self) -> Option<&'static str> {
        const SIGNS: [&str; 2] = ["BUG: TASK stack guard page", "Oops: int3"];
        let mut lines = self.wrong.iter().chain(self.output.iter().flatten());
        lines.find_map(|line| SIGNS.into_iter().find(|sign| line.contains(sign)))
    }
}

/// Boots the machine and runs the lane's steps.
pub(super) fn run(packages: &Packages, lane: &Lane) -> Result<Run, Obstacle> {
    let archive = root::archive(&packages.tree(), lane)?;
    let image = packages.cache().join(format!("initrd-{}", std::process::id()));
    fs::write(&image, archive).map_err(|error| failed("the initial RAM disk", &error))?;
    let outcome = boot(&packages.kernel()?.path, &image, lane);
    let _ = fs::remove_file(&image);
    outcome
}

/// The emulator, not started yet.
fn emulator(pinning: Pinning) -> Result<Command, Obstacle> {
    const EMULATOR: &str = "qemu-system-x86_64";
    if pinning == Pinning::None {
        return Ok(Command::new(EMULATOR));
    }
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|error| failed("the processors that may be used", &error))?;
    let mut command = Command::new("taskset");
    command.args(["-c", first_processor(&status).unwrap_or("0"), EMULATOR]);
    Ok(command)
}

/// The first of the processors that a process may use, from its `/proc/PID/status`.
fn first_processor(status: &str) -> Option<&str> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    list.trim().split(['-', ',']).next().filter(|number| !number.is_empty())
}

fn boot(kernel: &Path, image: &Path, lane: &Lane) -> Result<Run, Obstacle> {
    let began = Instant::now();
    let mut child = emulator(lane.pinning)?
        // Emulated even where there is a KVM: what a nested one lacks must not decide. All that
        // the emulator has: a guest of threads does not start on a processor of 2008.
        .args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"])
        .args(["-m", &lane.memory_mib.to_string()])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"])
        .arg("-no-reboot")
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(image)
        .args([
            "-append",
            "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr tsc=reliable",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed("qemu-system-x86_64", &error))?;
    let stdout = child.stdout.take();
    let _machine = Machine(child);
    let (tell, told) = channel();
    if let Some(stdout) = stdout {
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout).split(b'\n');
            while let Some(Ok(line)) = lines.next() {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
    }
    let run = follow(&told, lane, began + lane.limit);
    println!("metal: {:.1} s in the emulated PC", began.elapsed().as_secs_f32());
    Ok(run)
}

/// Prints what the machine prints and keeps it, until it is done.
fn follow(lines: &Receiver<String>, lane: &Lane, deadline: Instant) -> Run {
    let steps = lane.steps.len();
    let mut run =
        Run { endings: vec![None; steps], output: vec![Vec::new(); steps], wrong: Vec::new() };
    let mut current: Option<usize> = None;
    let mut done = false;
    while !done {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = match lines.recv_timeout(left) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                run.wrong.push(format!("stopped after {} s", lane.limit.as_secs()));
                break;
            }
        };
        let Some(at) = line.find(MARK) else {
            println!("      {line}");
            match current {
                Some(step) => run.output[step].push(line),
                // Nobody but the kernel speaks before the first step and behind the last.
                None if line.contains("BUG: ") || line.contains("Oops: ") => run.wrong.push(line),
                None => {}
            }
            continue;
        };
        done = on_mark(&line[at + MARK.len()..], lane, &mut run, &mut current);
    }
    run
}

/// Takes a line of the machine's own; whether it was the last.
fn on_mark(mark: &str, lane: &Lane, run: &mut Run, current: &mut Option<usize>) -> bool {
    let mut words = mark.split(' ');
    let kind = words.next().unwrap_or_default();
    let mut number = || words.next().and_then(|word| word.parse::<i32>().ok());
    match kind {
        "prepared" => println!("metal: prepared at {} s", &mark["prepared".len()..].trim()),
        "begin" | "end" => {
            let index = number().and_then(|index| usize::try_from(index).ok());
            let Some(index) = index.filter(|&index| index < lane.steps.len()) else { return false };
            let name = lane.steps[index].name;
            if kind == "begin" {
                println!("metal: {name}");
                *current = Some(index);
            } else {
                run.endings[index] = number();
                *current = None;
            }
        }
        "unprepared" | "kernel" => run.wrong.push(mark.to_owned()),
        "done" => return true,
        _ => {}
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metal::Step;
    use std::time::Duration;

    fn followed(lines: &[&str]) -> Run {
        let step = |name| Step { name, line: String::new(), limit: Duration::ZERO };
        let lane = Lane {
            modules: &[],
            prepare: &[],
            verbs: false,
            programs: Vec::new(),
            steps: vec![step("one"), step("two")],
            memory_mib: 0,
            limit: Duration::from_secs(5),
            pinning: Pinning::None,
        };
        let (tell, told) = channel();
        for line in lines {
            tell.send((*line).to_owned()).unwrap();
        }
        drop(tell);
        follow(&told, &lane, Instant::now() + lane.limit)
    }

    #[test]
    fn steps_end_and_print() {
        let lines = ["boot", "@@prepared 2.1", "@@begin 0", "x", "@@end 0 0", "@@end 1 3"];
        let run = followed(&lines);
        assert_eq!(run.endings, [Some(0), Some(3)]);
        assert_eq!(run.output, [vec!["x".to_owned()], Vec::new()]);
        assert!(run.wrong.is_empty() && run.emulator_crash().is_none());
        let trouble = ["@@end 0 0", "@@kernel WARNING: here", "@@done", "@@end 1 0"];
        let run = followed(&trouble);
        assert_eq!((run.endings, run.wrong.len()), (vec![Some(0), None], 1));
        assert_eq!(followed(&["@@end 9 0", "@@end x", "@@"]).endings, [None, None]);
    }

    #[test]
    fn a_crash_of_the_machine_is_told_from_a_failure() {
        let crash = ["@@begin 0", "[  48.1] BUG: TASK stack guard page was hit at 1"];
        assert!(followed(&crash).emulator_crash().is_some());
        let early = ["[   74.3] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI"];
        assert_eq!(followed(&early).emulator_crash(), Some("Oops: int3"));
        let other = ["@@begin 0", "[   74.3] Kernel panic - not syncing: Fatal exception"];
        assert_eq!(followed(&other).emulator_crash(), None);
        let own = ["@@begin 0", "warming up: triple fault", "@@end 0 1"];
        assert_eq!(followed(&own).emulator_crash(), None);
    }

    #[test]
    fn the_emulator_takes_a_processor_that_it_may_use() {
        let status = |list| format!("Name:\tx\nCpus_allowed_list:\t{list}\nMems_allowed:\t1\n");
        assert_eq!(first_processor(&status("0-1")), Some("0"));
        assert_eq!(first_processor(&status("12,14-15")), Some("12"));
        assert_eq!(first_processor("Name:\tx\n"), None);
    }
}
