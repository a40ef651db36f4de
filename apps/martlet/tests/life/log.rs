//! Diagnostics that can't be written.

use crate::command::*;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::process::Stdio;

/// The writing end of a pipe that is full and stays so, with the end that keeps it open.
fn full_pipe() -> (OwnedFd, Stdio) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    let size = fcntl_setpipe_size(&writer, 4096).expect("its size");
    assert_eq!(rustix::io::write(&writer, &vec![b'.'; size]).expect("room"), size);
    (reader, Stdio::from(writer))
}

fn moves_a_guest(here: &str, there: &str, listen: &str) {
    await_filled(here);
    let report = json(&martlet(&["migrate", "--control", here, listen, "--json"]));
    assert_eq!(report["outcome"], "completed");
    let arrived = await_status(there, "running", |now| now["status"] == "running");
    let later = await_status(there, "checking", |now| checked(now) > checked(&arrived));
    assert_eq!(later["guest"]["wrong-pages"], 0);
}

#[test]
fn the_reader_of_a_log_may_go_away() {
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let listen = format!("unix:{}", folder.at("m"));
    let mut source =
        start(&here, &["run", "--memory", "64M", "--program", PROGRAM, "--log", "trace"]);
    let mut destination = start(&there, &["receive", "--listen", &listen, "--log", "trace"]);
    for process in [&mut source, &mut destination] {
        let mut line = String::new();
        let stderr = process.0.stderr.take().expect("piped");
        BufReader::new(stderr).read_line(&mut line).expect("one line");
    }
    moves_a_guest(&here, &there, &listen);
    for (control, process) in [(&here, &mut source), (&there, &mut destination)] {
        assert!(martlet(&["quit", "--control", control]).status.success());
        assert!(process.wait().success());
    }
}

#[test]
fn a_log_that_nobody_reads_holds_nothing_up() {
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let listen = format!("unix:{}", folder.at("m"));
    let run = ["run", "--memory", "64M", "--program", PROGRAM, "--log", "trace"];
    let receive = ["receive", "--listen", &listen, "--log", "trace"];
    let ((_open, full), (_open_too, full_too)) = (full_pipe(), full_pipe());
    let mut source = start_command(&here, &run, &mut command(&run), full);
    let mut destination = start_command(&there, &receive, &mut command(&receive), full_too);
    moves_a_guest(&here, &there, &listen);
    for (control, process) in [(&here, &mut source), (&there, &mut destination)] {
        assert!(martlet(&["quit", "--control", control]).status.success());
        assert!(process.wait().success());
    }
}
