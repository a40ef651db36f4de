//! How a process comes to its end.

use crate::command::*;
use std::path::Path;

#[test]
fn a_guest_outlives_the_terminal_that_it_was_started_from() {
    let folder = Folder::new();
    let control = folder.at("a");
    let mut process = start_guest(&control);
    process.signal("-HUP");
    assert_eq!(status(&control)["status"], "running");
    process.signal("-TERM");
    assert!(process.wait().success());
    assert!(!Path::new(&control).exists());
    let is_told = last_words(&mut process).contains("SIGHUP is ignored");
    assert!(is_told || own_signals("SigIgn:") & HANGUP != 0);
}

const HANGUP: u64 = 1;

/// Of this process, whose children inherit them. Tests may run under nohup.
fn own_signals(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("of this process");
    let field = status.lines().find_map(|line| line.strip_prefix(name)).expect("Linux has it");
    u64::from_str_radix(field.trim(), 16).expect("a mask")
}

/// What a signal that comes meets on a thread that does not hold it back is the default: the end.
#[test]
fn every_thread_holds_the_signals_back() {
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let listen = format!("unix:{}", folder.at("m"));
    let source = start_guest(&here);
    let destination = start(&there, &["receive", "--listen", &listen]);
    await_filled(&here);
    for process in [&source, &destination] {
        assert!(unheld(process).is_empty(), "{:?}", unheld(process));
    }
    assert!(martlet(&["migrate", "--control", &here, &listen]).status.success());
    for process in [&source, &destination] {
        assert!(unheld(process).is_empty(), "{:?}", unheld(process));
    }
}

/// The threads that one of SIGHUP (1), SIGINT (2) and SIGTERM (15) may meet.
fn unheld(process: &Process) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.0.id())).expect("its threads");
    let all = 0x4003 & !own_signals("SigIgn:");
    let mut seen = 0;
    let mut unheld = Vec::new();
    for task in tasks.flatten() {
        // One that has ended meanwhile has nothing to hold.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let Some(mask) = field("SigBlk:") else { continue };
        seen += 1;
        let name = field("Name:").unwrap_or_default();
        // The one that takes them: what sigwait waits for is not shown as held back meanwhile.
        if name != "signals" && u64::from_str_radix(mask, 16).expect("a mask") & all != all {
            unheld.push(format!("{name}: {mask}"));
        }
    }
    assert!(seen > 1, "{seen} threads");
    unheld
}
