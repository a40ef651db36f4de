//! The names of sockets in the file system: private, and gone with their process.

use crate::command::*;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

/// Everything that listens in one folder.
struct Scene {
    folder: Folder,
    processes: Vec<(String, Process)>,
}

impl Scene {
    /// A guest with a serial socket, and a process that waits for one, with the sockets of both.
    fn new(folder: Folder) -> Scene {
        let (here, there) = (folder.at("a"), folder.at("b"));
        let serial = format!("unix:{}", folder.at("serial"));
        let other_serial = format!("unix:{}", folder.at("serial2"));
        let listen = format!("unix:{}", folder.at("m"));
        let run = ["run", "--memory", "64M", "--program", PROGRAM, "--serial", &serial];
        let receive = ["receive", "--listen", &listen, "--serial", &other_serial];
        let processes =
            vec![(here.clone(), start(&here, &run)), (there.clone(), start(&there, &receive))];
        for (control, _) in &processes {
            status(control);
        }
        Scene { folder, processes }
    }

    fn sockets(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.folder.0).expect("the folder");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("plain"))
            .collect();
        names.sort();
        names
    }
}

const ALL: [&str; 5] = ["a", "b", "m", "serial", "serial2"];

#[test]
fn sockets_are_private_and_gone_after_a_quit() {
    let mut scene = Scene::new(Folder::new());
    assert_eq!(scene.sockets(), ALL);
    for name in ALL {
        let metadata = std::fs::metadata(scene.folder.at(name)).expect("there");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{name}");
    }
    for (control, process) in &mut scene.processes {
        assert!(martlet(&["quit", "--control", control]).status.success());
        assert!(process.wait().success());
    }
    assert_eq!(scene.sockets(), [""; 0]);
}

#[test]
fn sockets_are_gone_after_a_signal() {
    let mut scene = Scene::new(Folder::new());
    for (_, process) in &mut scene.processes {
        process.signal("-TERM");
        assert!(process.wait().success());
    }
    assert_eq!(scene.sockets(), [""; 0]);
}

#[test]
fn what_a_killed_process_left_is_replaced() {
    let mut scene = Scene::new(Folder::new());
    for (_, process) in &mut scene.processes {
        process.signal("-KILL");
        process.wait();
    }
    assert_eq!(scene.sockets(), ALL);
    let Scene { folder, processes } = scene;
    drop(processes);
    let scene = Scene::new(folder);
    assert_eq!(scene.sockets(), ALL);
}

#[test]
fn a_start_that_fails_leaves_nothing_and_takes_nothing() {
    let mut scene = Scene::new(Folder::new());
    let at = |name| scene.folder.at(name);
    let (control, serial) = (at("new"), format!("unix:{}", at("serial")));
    let kernel = at("no-kernel");
    let nowhere = format!("unix:{}", at("no/folder"));
    let taken = format!("unix:{}", at("m"));
    let run = ["run", "--control", &control, "--memory", "64M"];
    let receive = ["receive", "--control", &control];
    for (first, more, part) in [
        (&run[..], &["--kernel", &kernel][..], "no-kernel"),
        (&run, &["--serial", &serial], "serial: it is in use by another process"),
        (&receive, &["--serial", &serial], "serial: it is in use by another process"),
        (&receive, &["--listen", &nowhere], "cannot listen at"),
        (&receive, &["--listen", &taken], "it is in use by another process"),
    ] {
        let output = martlet(&[first, more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{more:?}: {said}");
        assert!(said.contains(part), "{more:?}: {said}");
        assert_eq!(scene.sockets(), ALL, "{more:?}");
    }
    for (control, process) in &mut scene.processes {
        assert!(process.0.try_wait().expect("a child").is_none());
        assert!(martlet(&["status", "--control", control]).status.success());
    }
}

#[test]
fn a_folder_that_somebody_else_has_locked_is_said() {
    let folder = Folder::new();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let lock = open(&folder.0, flags, Mode::empty()).expect("the folder");
    flock(&lock, FlockOperation::LockExclusive).expect("nobody has it");
    let control = folder.at("c");
    let mut run = command(&["run", "--memory", "64M", "--control", &control]);
    let mut process = Process(run.stderr(Stdio::piped()).spawn().expect("starts"));
    assert_eq!(process.wait().code(), Some(1));
    let said = last_words(&mut process);
    assert!(said.contains("stays locked by another process (flock)"), "{said}");
    assert!(!Path::new(&control).exists());
}

#[test]
fn a_relative_path_is_below_the_folder_of_who_writes_it() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let (here, there) = (elsewhere.at("a"), folder.at("b"));
    let _source = start_guest(&here);
    await_filled(&here);
    let receive = ["receive", "--listen", "unix:m"];
    let mut receiver = command(&receive);
    receiver.current_dir(&folder.0);
    let _destination = start_command(&there, &receive, &mut receiver, Stdio::null());
    status(&there);
    let mut migrate = command(&["migrate", "--control", &here, "unix:m", "--json"]);
    let end = json(&migrate.current_dir(&folder.0).output().expect("starts"));
    assert_eq!(end["outcome"], "completed");
}
