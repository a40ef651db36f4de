//! What became of the guest decides the exit status, and --json says it on every path.

use crate::command::*;
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Output, Stdio};
use std::thread::JoinHandle;

/// A standard output that takes nothing.
fn full() -> Stdio {
    Stdio::from(OpenOptions::new().write(true).open("/dev/full").expect("/dev/full"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The one object that was printed, whatever the exit status.
fn object(output: &Output, code: i32) -> Value {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
    let text = std::str::from_utf8(&output.stdout).expect("text");
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(text).expect("one object")
}

#[test]
fn a_guest_that_moved_has_moved_though_nothing_can_be_written() {
    let folder = Folder::new();
    let (mut here, listen) =
        (folder.at("a"), |n: usize| format!("unix:{}", folder.at(&format!("m{n}"))));
    let mut source = start_guest(&here);
    await_filled(&here);
    for (n, more) in [&["--json"][..], &[], &["--json", "--svg", "/dev/full"]].iter().enumerate() {
        let (there, listen) = (folder.at(&format!("b{n}")), listen(n));
        let destination = start(&there, &["receive", "--listen", &listen]);
        let migrate = [&["migrate", "--control", &here, &listen][..], more].concat();
        let stdout = if n == 2 { Stdio::null() } else { full() };
        let output = command(&migrate).stdout(stdout).output().expect("starts");
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let expected =
            if n == 2 { "cannot write /dev/full" } else { "cannot write to standard output" };
        assert!(said.contains(expected), "{said}");
        await_status(&there, "running", |now| now["status"] == "running");
        (here, source) = (there, destination);
    }
    drop(source);
}

#[test]
fn a_demo_goes_on_though_nobody_reads_it() {
    let demo = ["demo", "--memory", "64M", "--program", PROGRAM];
    let output = command(&demo).stdout(full()).output().expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot write to standard output"));
    let mut child = Process(command(&demo).stdout(Stdio::piped()).spawn().expect("starts"));
    drop(child.0.stdout.take());
    assert_eq!(child.wait().code(), Some(0));
}

#[test]
fn a_picture_that_can_not_be_written_is_found_out_before_anything_moves() {
    let folder = Folder::new();
    let here = folder.at("a");
    let _source = start_guest(&here);
    let svg = folder.at("no/folder/picture.svg");
    let arguments = ["migrate", "--control", &here, "tcp:127.0.0.1:1", "--json", "--svg", &svg];
    let end = object(&martlet(&arguments), 2);
    assert_eq!(end["outcome"], "failed");
    assert!(end["error"].as_str().is_some_and(|error| error.contains("no/folder")), "{end}");
    assert_eq!(status(&here)["migration"], serde_json::json!({}), "nothing was begun");
    // One that could be written, of a migration that has none, is not left behind empty.
    let svg = folder.at("picture.svg");
    let arguments = ["migrate", "--control", &here, "tcp:127.0.0.1:1", "--json", "--svg", &svg];
    assert_eq!(object(&martlet(&arguments), 1)["outcome"], "failed");
    assert!(!Path::new(&svg).exists());
    // A pipe that nobody reads is not waited for.
    let fifo = folder.at("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo starts");
    assert!(made.success());
    let arguments = ["migrate", "--control", &here, "tcp:127.0.0.1:1", "--json", "--svg", &fifo];
    assert_eq!(object(&martlet(&arguments), 2)["outcome"], "failed");
    assert!(Path::new(&fifo).exists());
    let demo = ["demo", "--memory", "64M", "--json", "--svg", "/nonexistent/picture.svg"];
    assert_eq!(object(&martlet(&demo), 2)["outcome"], "failed");
}

#[test]
fn json_is_one_object_on_every_path() {
    let folder = Folder::new();
    let (here, nobody) = (folder.at("a"), folder.at("nobody"));
    let migrate =
        |control: &str| martlet(&["migrate", "--control", control, "tcp:127.0.0.1:1", "--json"]);
    let end = object(&migrate(&nobody), 1);
    assert_eq!(end["outcome"], "failed");
    assert!(end["error"].as_str().is_some_and(|error| error.starts_with("no martlet at")), "{end}");
    let _source = start_guest(&here);
    // Nobody listens there.
    let end = object(&migrate(&here), 1);
    assert_eq!((&end["outcome"], &end["blackout_ms"]), (&"failed".into(), &Value::Null));
    assert_eq!(end["fault"], "peer", "{end}");
    assert_eq!(status(&here)["migration"]["x-fault"], "peer");
    // What the control socket refuses.
    let _destination = start(&folder.at("b"), &["receive"]);
    let end = object(&migrate(&folder.at("b")), 1);
    assert!(end["error"].as_str().is_some_and(|error| error.contains("no guest")), "{end}");
    let end = object(&martlet(&["status", "--control", &nobody, "--json"]), 1);
    assert!(end["error"].as_str().is_some_and(|error| error.starts_with("no martlet at")), "{end}");
    let end = object(&martlet(&["demo", "--memory", "64M", "--program", "fill=1G", "--json"]), 2);
    assert_eq!(end["outcome"], "failed");
    // No RDMA device has the loopback address.
    let end = object(&martlet(&["bench", "rdma", "--rdma-provider", "ibv", "--json"]), 1);
    assert!(end["error"].as_str().is_some_and(|error| !error.is_empty()), "{end}");
    let svg = "/nonexistent/picture.svg";
    for measure in [["bench", "vdpa"], ["bench", "zero-check"], ["bench", "rdma"], ["sim", "dsa"]] {
        let end = object(&martlet(&[&measure[..], &["--json", "--svg", svg]].concat()), 2);
        assert!(end["error"].as_str().is_some_and(|error| error.contains(svg)), "{end}");
    }
}

#[test]
fn a_measurement_is_made_though_its_picture_can_not_be_written() {
    let one = ["--vms", "1", "--channels", "1", "--devices", "1", "--zero", "0"];
    let arguments = [&["sim", "dsa", "--json", "--svg", "/dev/full"][..], &one].concat();
    let output = martlet(&arguments);
    assert!(object(&output, 0)["table"].is_array());
    assert!(stderr(&output).contains("cannot write /dev/full"), "{}", stderr(&output));
}

/// Serves so many clients at `path`, one after the other, as QMP does. Each request of a client
/// gets this answer, or none: then its connection ends.
fn fake_server(
    path: &str,
    clients: usize,
    answer: impl Fn(usize, &str) -> Option<&'static str> + Send + 'static,
) -> JoinHandle<()> {
    let listener = UnixListener::bind(path).expect("a socket");
    std::thread::spawn(move || {
        for client in 0..clients {
            let (mut stream, _) = listener.accept().expect("a client");
            stream.write_all(b"{\"QMP\": {}}\n").expect("a greeting");
            let requests = BufReader::new(stream.try_clone().expect("the same socket")).lines();
            for request in requests.map_while(Result::ok) {
                let Some(answer) = answer(client, &request) else { break };
                writeln!(stream, "{{\"return\": {answer}}}").expect("an answer");
            }
        }
    })
}

#[test]
fn a_resolve_that_gets_no_answer_knows_nothing() {
    let folder = Folder::new();
    for (n, verdict) in [&[][..], &["--run-here", "--confirmed"]].iter().enumerate() {
        let path = folder.at(&format!("c{n}"));
        let server =
            fake_server(&path, 1, |_, asked| (!asked.contains("x-resolve")).then_some("{}"));
        let output = martlet(&[&["resolve", "--control", &path][..], verdict].concat());
        assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
        assert!(stderr(&output).contains("is not known here"), "{}", stderr(&output));
        server.join().expect("it ends");
    }
}

#[test]
fn a_migrate_that_gets_no_answer_is_asked_after() {
    let folder = Folder::new();
    let cancelled = "{\"status\": \"cancelled\"}";
    // What is said before it and after it; the outcome that follows.
    for (n, (before, after, outcome, code)) in [
        ("{}", "{}", "undecided", 4),
        // That may be the one before.
        (cancelled, cancelled, "undecided", 4),
        ("{}", cancelled, "cancelled", 3),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.at(&format!("c{n}"));
        let server = fake_server(&path, 2, move |client, asked| match client {
            _ if asked.contains("\"migrate\"") => None,
            0 if asked.contains("query-migrate") => Some(before),
            1 if asked.contains("query-migrate") => Some(after),
            _ => Some("{}"),
        });
        let end = object(&martlet(&["migrate", "--control", &path, "unix:/x", "--json"]), code);
        assert_eq!(end["outcome"], outcome, "{end}");
        server.join().expect("it ends");
    }
}

#[test]
fn a_cancel_that_does_not_end_the_migration_leaves_it_open() {
    let folder = Folder::new();
    let path = folder.at("c");
    let server = fake_server(&path, 1, |_, asked| {
        let asks = asked.contains("query-migrate");
        (!asked.contains("migrate_cancel")).then_some(if asks {
            "{\"status\": \"device\"}"
        } else {
            "{}"
        })
    });
    let output = martlet(&["cancel", "--control", &path]);
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    assert!(stderr(&output).contains("is not known here"), "{}", stderr(&output));
    server.join().expect("it ends");
}
