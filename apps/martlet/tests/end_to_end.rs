//! Real guests, moved between real processes by the built command. With KVM where there is KVM,
//! else with threads: the command chooses.

#[path = "support/command.rs"]
mod command;

use command::*;
use martlet_test_host::Want;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn a_guest_moves_and_goes_on() {
    let folder = Folder::new();
    let (here, there, mig) = (folder.at("a"), folder.at("b"), folder.at("m"));
    let listen = format!("unix:{mig}");
    let mut source = start_guest(&here);
    let mut destination = start(&there, &["receive", "--listen", &listen]);
    assert_eq!(status(&there)["status"], "inmigrate");
    await_filled(&here);
    let svg = folder.at("timeline.svg");
    let report = json(&martlet(&[
        "migrate",
        "--control",
        &here,
        &listen,
        "--json",
        "--svg",
        &svg,
        "--verify",
        "--channels",
        "2",
    ]));
    assert_eq!(report["outcome"], "completed");
    assert_eq!((&report["memory_equal"], &report["channels"]), (&Value::Bool(true), &2.into()));
    assert_eq!(report["blackout_ms"], Value::Null);
    assert!(report["timeline"].as_array().is_some_and(|rows| !rows.is_empty()));
    assert!(std::fs::read_to_string(&svg).expect("the picture").starts_with("<svg"));
    assert_eq!(status(&here)["status"], "postmigrate");
    let arrived = await_status(&there, "running", |now| now["status"] == "running");
    let before = checked(&arrived);
    let later = await_status(&there, "checking", |now| checked(now) > before + 4096);
    assert_eq!(later["guest"]["wrong-pages"], 0);
    assert_eq!(later["guest"]["clock-steps-back"], 0);
    for (control, process) in [(&here, &mut source), (&there, &mut destination)] {
        assert!(martlet(&["quit", "--control", control]).status.success());
        assert!(process.wait().success());
        assert!(!Path::new(control).exists(), "the socket is removed");
    }
}

/// In a time namespace a boot has another `CLOCK_MONOTONIC`, as another host has.
#[test]
fn clocks_of_two_time_namespaces_are_not_one() {
    let namespace = ["--time", "--monotonic", "1000000"];
    let probe = Command::new("unshare").args(namespace).arg("true").stderr(Stdio::null()).status();
    let can = probe.is_ok_and(|status| status.success());
    if !Want::TimeNamespace.found(&can.then_some(()).ok_or("unshare makes none")) {
        return;
    }
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let listen = format!("unix:{}", folder.at("m"));
    let _source = start_guest(&here);
    let mut elsewhere = Command::new("unshare");
    let arguments = ["receive", "--listen", &listen];
    elsewhere.args(namespace).arg(env!("CARGO_BIN_EXE_martlet")).args(arguments);
    elsewhere.env_remove("RUST_LOG").stdin(Stdio::null());
    let _destination = start_command(&there, &arguments, &mut elsewhere, Stdio::piped());
    await_filled(&here);
    let report = json(&martlet(&["migrate", "--control", &here, &listen, "--json"]));
    let number = |name: &str| report[name].as_f64().expect("a number");
    assert!(number("clock_error_ms") > 0.0, "{report}");
    let limit_ms = LIMIT.as_secs_f64() * 1000.0;
    assert!(number("blackout_ms") > 0.0 && number("blackout_ms") < limit_ms, "{report}");
    // Both have one wall clock; it was looked at twice, and the clocks were compared.
    assert!(number("wall_clock_difference_ms").abs() < limit_ms, "{report}");
    let arrived = await_status(&there, "running", |now| now["status"] == "running");
    let before = checked(&arrived);
    let later = await_status(&there, "checking", |now| checked(now) > before + 4096);
    assert_eq!(later["guest"]["wrong-pages"], 0);
    assert_eq!(later["guest"]["clock-steps-back"], 0);
}

/// The guest boots again in the middle of its migration, and that one arrives.
#[test]
fn a_guest_is_reset_during_its_migration() {
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let listen = format!("unix:{}", folder.at("m"));
    let _source = start_guest(&here);
    let _destination = start(&there, &["receive", "--listen", &listen]);
    await_filled(&here);
    let slowly = ["migrate", "--control", &here, &listen, "--json", "--bandwidth", "40Mbit/s"];
    let mut migrate = command(&slowly);
    let migrate = migrate.stdout(Stdio::piped()).spawn().expect("the command starts");
    await_status(&here, "sending", |now| now["migration"]["ram"]["transferred"].as_u64() > Some(0));
    let before = checked(&status(&here));
    let mut client = BufReader::new(UnixStream::connect(&here).expect("a client"));
    client.get_ref().set_read_timeout(Some(LIMIT)).expect("a timeout");
    for name in ["qmp_capabilities", "system_reset"] {
        writeln!(client.get_mut(), "{{\"execute\": \"{name}\"}}").expect("written");
    }
    let mut lines = client.lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("\"RESET\"")), "{before} pages checked before");
    let report = json(&migrate.wait_with_output().expect("its output"));
    assert_eq!(report["outcome"], "completed", "{report}");
    let arrived = await_status(&there, "filled", |now| now["guest"]["filled"] == true);
    let later = await_status(&there, "checking", |now| checked(now) > checked(&arrived) + 4096);
    assert_eq!(later["guest"]["wrong-pages"], 0);
}

#[test]
fn a_paused_guest_arrives_paused() {
    let folder = Folder::new();
    let (here, there) = (folder.at("a"), folder.at("b"));
    let _source = start_guest(&here);
    let _destination = start(&there, &["receive", "--listen", "tcp:127.0.0.1:0"]);
    let port = status(&there)["migration"]["socket-address"][0]["port"].clone();
    let to = format!("tcp:127.0.0.1:{}", port.as_str().expect("the port that was chosen"));
    await_filled(&here);
    assert!(martlet(&["stop", "--control", &here]).status.success());
    let paused = status(&here);
    assert_eq!(paused["status"], "paused");
    let text = stdout(&martlet(&["migrate", "--control", &here, &to]));
    assert!(text.starts_with("moved in "), "{text}");
    let arrived = await_status(&there, "arrived", |now| now["status"] != "inmigrate");
    assert_eq!(arrived["status"], "paused");
    assert_eq!(checked(&arrived), checked(&paused), "it did nothing on its way");
    assert!(martlet(&["cont", "--control", &there]).status.success());
    await_status(&there, "going on", |now| checked(now) > checked(&arrived));
    let refused = martlet(&["cont", "--control", &here]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(said, "martlet: the guest has moved away\n");
}

#[test]
fn a_cancelled_or_failed_migration_harms_nobody() {
    let folder = Folder::new();
    let (here, there, mig) = (folder.at("a"), folder.at("b"), folder.at("m"));
    let listen = format!("unix:{mig}");
    let _source = start_guest(&here);
    let destination = start(&there, &["receive", "--listen", &listen]);
    await_filled(&here);
    let slowly = ["migrate", "--control", &here, &listen, "--bandwidth", "1MiB/s", "--json"];
    let begin = || {
        let client = Process(command(&slowly).stdout(Stdio::piped()).spawn().expect("starts"));
        await_status(&here, "migrating", |now| now["migration"]["status"] == "active");
        client
    };
    let outcome = |mut client: Process, code: i32| {
        assert_eq!(client.wait().code(), Some(code));
        let stdout = client.0.stdout.take().expect("piped");
        serde_json::from_reader::<_, Value>(stdout).expect("one object")["outcome"].clone()
    };
    // By another command.
    let client = begin();
    assert!(martlet(&["cancel", "--control", &here]).status.success());
    assert_eq!(outcome(client, 3), "cancelled");
    // By Ctrl-C.
    let client = begin();
    client.signal("-INT");
    assert_eq!(outcome(client, 3), "cancelled");
    let now = await_status(&there, "listening on", |now| now["migration"]["status"] == "setup");
    assert!(now["migration"]["error-desc"].is_string(), "{now}");
    // By the death of the destination.
    let client = begin();
    drop(destination);
    assert_eq!(outcome(client, 1), "failed");
    let before = status(&here);
    assert_eq!(before["status"], "running");
    // The next attempt, to the next destination at the same addresses, is as good as the first.
    let _destination = start(&there, &["receive", "--listen", &listen]);
    let again = ["migrate", "--control", &here, &listen, "--verify", "--json"];
    assert_eq!(json(&martlet(&again))["memory_equal"], true);
    let arrived = await_status(&there, "running", |now| now["status"] == "running");
    let later = await_status(&there, "checking", |now| checked(now) > checked(&arrived) + 4096);
    assert_eq!(later["guest"]["wrong-pages"], 0);
}

/// A Unix socket that listens and never accepts: the kernel connects, and nothing comes.
#[test]
fn an_owner_is_heard_while_a_destination_does_not_answer() {
    let folder = Folder::new();
    let (here, mig) = (folder.at("a"), folder.at("m"));
    let _silent = UnixListener::bind(&mig).expect("a listener");
    let to = format!("unix:{mig}");
    let mut source = start_guest(&here);
    for end in ["cancel", "quit"] {
        let migrate = ["migrate", "--control", &here, &to, "--json"];
        let mut client = Process(command(&migrate).stdout(Stdio::piped()).spawn().expect("starts"));
        let now = await_status(&here, "connecting", |now| now["migration"]["status"] == "setup");
        assert_eq!(now["status"], "running");
        assert!(martlet(&[end, "--control", &here]).status.success(), "{end}");
        let code = client.wait().code();
        assert!(end == "quit" || code == Some(3), "{end}: {code:?}");
    }
    assert!(source.wait().success());
}

#[test]
fn a_migration_that_takes_too_long_ends_as_its_owner_said() {
    let folder = Folder::new();
    let (here, there, mig) = (folder.at("a"), folder.at("b"), folder.at("m"));
    let listen = format!("unix:{mig}");
    let _source = start_guest(&here);
    let _destination = start(&there, &["receive", "--listen", &listen]);
    await_filled(&here);
    // No blackout is as short as that, so nothing but the bound ends it.
    let endless = ["migrate", "--control", &here, &listen, "--downtime-limit", "1us", "--json"];
    let within = |then| {
        let bound = ["--within", "1s", "--then", then];
        martlet(&[&endless[..], &bound[..]].concat())
    };
    let cancelled = within("cancel");
    assert_eq!(cancelled.status.code(), Some(3));
    let report: Value = serde_json::from_slice(&cancelled.stdout).expect("one object");
    let why = (&report["outcome"], &report["error"]);
    assert_eq!(why, (&"cancelled".into(), &"the guest could not be moved within 1s".into()));
    assert_eq!(status(&here)["status"], "running");
    assert_eq!(json(&within("stop"))["outcome"], "completed");
}

#[test]
fn signals_end_a_process_in_order() {
    let folder = Folder::new();
    for signal in ["-INT", "-TERM"] {
        let control = folder.at("a");
        let mut process = start_guest(&control);
        let mut client = BufReader::new(UnixStream::connect(&control).expect("a client"));
        client.get_mut().write_all(b"{\"execute\":\"qmp_capabilities\"}\n").expect("written");
        let mut line = String::new();
        client.read_line(&mut line).expect("greeting");
        client.read_line(&mut line).expect("reply");
        process.signal(signal);
        assert!(process.wait().success());
        assert!(!Path::new(&control).exists());
        let rest: Vec<String> = client.lines().map_while(Result::ok).collect();
        assert!(rest.iter().any(|l| l.contains("SHUTDOWN") && l.contains("host-signal")));
    }
}

#[test]
fn the_demo_says_how_it_went() {
    let arguments =
        ["demo", "--memory", "64M", "--program", PROGRAM, "--runs", "3", "--verify", "--json"];
    let total = json(&martlet(&arguments));
    assert_eq!(total["outcome"], "completed");
    assert_eq!((&total["runs"], &total["completed_runs"]), (&3.into(), &3.into()));
    assert_eq!(total["memory_equal"], true);
    assert_eq!(total["blackout"]["p50_ms"], Value::Null);
    assert_eq!(total["guest"]["wrong_pages"], 0);
    assert!(total["guest"]["verified_pages"].as_u64().is_some_and(|pages| pages > 4096));

    let output = martlet(&["demo", "--memory", "64M", "--program", PROGRAM, "--transport", "unix"]);
    let text = stdout(&output);
    for part in ["a guest of 64 MiB and 1 vCPU", "runs on", "moved in ", "stop vCPUs", "0 wrong"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "no colours without a terminal");
}

#[test]
fn the_demo_moves_a_guest_that_is_larger_than_its_host() {
    let told = std::fs::read_to_string("/proc/meminfo").expect("readable");
    let kib = told.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("MemTotal");
    let kib: u64 = kib.trim().trim_end_matches(" kB").parse().expect("a number");
    let memory = format!("{}G", (kib >> 20) + 2);
    let total = json(&martlet(&["demo", "--memory", &memory, "--program", PROGRAM, "--json"]));
    assert_eq!(total["outcome"], "completed", "{total}");
}

#[test]
fn the_demo_goes_by_rdma() {
    for more in [&[][..], &["--rdma-pin-all", "--rdma-chunk", "1M", "--rdma-qps", "2"]] {
        let mut arguments = vec!["demo", "--memory", "64M", "--program", PROGRAM];
        arguments.extend(["--transport", "rdma", "--runs", "2", "--json"]);
        arguments.extend(more);
        let total = json(&martlet(&arguments));
        assert_eq!(total["outcome"], "completed", "{total}");
        assert_eq!(total["rdma"]["device"], "soft", "{total}");
        assert_eq!(total["rdma"]["fell_back"], Value::Null, "{total}");
        assert_eq!(total["guest"]["wrong_pages"], 0);
    }
    let output = martlet(&["demo", "--memory", "64M", "--program", PROGRAM, "--rdma-chunk", "3M"]);
    assert!(!output.status.success());
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    let folder = Folder::new();
    let mut command = command(&["demo", "--memory", "64M", "--program", PROGRAM, "--runs", "1000"]);
    command.env("TMPDIR", &folder.0).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut demo = Process(command.spawn().expect("the command starts"));
    let stdout = demo.0.stdout.take().expect("piped");
    let mut lines = BufReader::new(stdout).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("load"))), "it is under way");
    demo.signal("-INT");
    assert_eq!(demo.wait().code(), Some(3));
    let left: Vec<_> = std::fs::read_dir(&folder.0).expect("the folder").collect();
    assert!(left.is_empty(), "{left:?}");
}
