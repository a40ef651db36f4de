//! The emulated PC.

use super::packages::Packages;
use super::root::{self, MARK};
use super::{Lane, Obstacle, failed};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
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

/// How a step ended: its exit status, 124 or 143 if it took too long.
type Endings = Vec<Option<i32>>;

/// Boots the machine and runs the lane's steps.
pub(super) fn run(packages: &Packages, lane: &Lane) -> Result<(), Obstacle> {
    let archive = root::archive(&packages.tree(), lane)?;
    let image = packages.cache().join(format!("initrd-{}", std::process::id()));
    fs::write(&image, archive).map_err(|error| failed("the initial RAM disk", &error))?;
    let outcome = boot(&kernel(&packages.tree())?, &image, lane);
    let _ = fs::remove_file(&image);
    outcome
}

fn kernel(tree: &Path) -> Result<PathBuf, Obstacle> {
    let folder = tree.join("boot");
    let listed = fs::read_dir(&folder).map_err(|error| failed("the kernel", &error))?;
    let mut files = listed.flatten().map(|entry| entry.path());
    let found = files.find(|path| path.to_string_lossy().contains("vmlinuz-"));
    found.ok_or_else(|| Obstacle::Failed(format!("no kernel in {}", folder.display())))
}

fn boot(kernel: &Path, image: &Path, lane: &Lane) -> Result<(), Obstacle> {
    let began = Instant::now();
    let mut child = Command::new("qemu-system-x86_64")
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
    let result = follow(&told, lane, began + lane.limit);
    println!("metal: {:.1} s in the emulated PC", began.elapsed().as_secs_f32());
    result
}

/// Prints what the machine prints and judges it.
fn follow(lines: &Receiver<String>, lane: &Lane, deadline: Instant) -> Result<(), Obstacle> {
    let mut endings: Endings = vec![None; lane.steps.len()];
    let mut wrong = Vec::new();
    let mut done = false;
    while !done {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = match lines.recv_timeout(left) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                wrong.push(format!("stopped after {} s", lane.limit.as_secs()));
                break;
            }
        };
        let Some(at) = line.find(MARK) else {
            println!("      {line}");
            continue;
        };
        done = on_mark(&line[at + MARK.len()..], lane, &mut endings, &mut wrong);
    }
    for (step, ending) in lane.steps.iter().zip(&endings) {
        match ending {
            Some(0) => {}
            Some(status) => wrong.push(format!("{} ended with {status}", step.name)),
            None => wrong.push(format!("{} did not end", step.name)),
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(Obstacle::Failed(wrong.join("; "))) }
}

/// Takes a line of the machine's own; whether it was the last.
fn on_mark(mark: &str, lane: &Lane, endings: &mut Endings, wrong: &mut Vec<String>) -> bool {
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
            } else {
                endings[index] = number();
            }
        }
        "unprepared" | "kernel" => wrong.push(mark.to_owned()),
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

    fn outcome(lines: &[&str]) -> Result<(), String> {
        let step = |name| Step { name, line: String::new(), limit: Duration::ZERO };
        let lane = Lane {
            modules: &[],
            prepare: &[],
            programs: Vec::new(),
            steps: vec![step("one"), step("two")],
            memory_mib: 0,
            limit: Duration::from_secs(5),
        };
        let (tell, told) = channel();
        for line in lines {
            tell.send((*line).to_owned()).unwrap();
        }
        drop(tell);
        follow(&told, &lane, Instant::now() + lane.limit).map_err(|why| match why {
            Obstacle::Missing(why) | Obstacle::Failed(why) => why,
        })
    }

    #[test]
    fn every_step_must_end_well() {
        let good = ["boot", "@@prepared 2.1", "@@begin 0", "x", "@@end 0 0", "@@end 1 0", "@@done"];
        assert_eq!(outcome(&good), Ok(()));
        assert_eq!(outcome(&good[..5]), Err("two did not end".to_owned()));
        assert_eq!(outcome(&["@@end 0 3", "@@end 1 0"]), Err("one ended with 3".to_owned()));
        let trouble = ["@@end 0 0", "@@end 1 0", "@@kernel WARNING: here", "@@done"];
        assert_eq!(outcome(&trouble), Err("kernel WARNING: here".to_owned()));
        assert!(outcome(&["@@end 9 0", "@@end x", "@@"]).is_err());
    }
}
