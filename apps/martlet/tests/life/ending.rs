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
    assert!(last_words(&mut process).contains("SIGHUP is ignored"));
}

#[test]
fn quit_takes_force() {
    let folder = Folder::new();
    let control = folder.at("a");
    let mut process = start_guest(&control);
    assert!(martlet(&["quit", "--force", "--control", &control]).status.success());
    assert!(process.wait().success());
}
