//! The control socket as clients see it, with a pretended guest behind it.

use super::clients::{CLIENTS_MAX, Clients};
use super::server::serve_client;
use crate::cli::{Cli, Command};
use crate::commands::follow::{self, Request};
use crate::control::{Control, QuitCause};
use crate::fake::{FakeGuest, FakeListen};
use crate::guest::Guest;
use crate::view::progress::{Kind, MigrationProgress};
use clap::Parser;
use martlet_engine::{ReceiveStatus, Status};
use martlet_machine::{EndCause, GuestStatus};
use martlet_qmp::{Client, ClientError, VALUE_BYTES_MAX};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// Longer than anything takes.
const LIMIT: Duration = Duration::from_secs(10);

/// A raw connection: what goes over the wire.
struct Wire(BufReader<UnixStream>);

impl Wire {
    /// Connects and takes the greeting.
    fn new(control: &Arc<Control>, clients: &Arc<Clients>) -> Wire {
        let mut wire = Wire::silent(control, clients);
        let greeting = wire.read();
        assert!(greeting["QMP"]["version"]["package"].as_str().unwrap().starts_with("martlet "));
        assert_eq!(greeting["QMP"]["capabilities"], json!([]));
        wire
    }

    fn silent(control: &Arc<Control>, clients: &Arc<Clients>) -> Wire {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        serve_client(theirs, control, clients);
        Wire(BufReader::new(ours))
    }

    fn ready(control: &Arc<Control>, clients: &Arc<Clients>) -> Wire {
        let mut wire = Wire::new(control, clients);
        assert_eq!(wire.ask(r#"{"execute":"qmp_capabilities"}"#), json!({"return": {}}));
        wire
    }

    fn write(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.ends_with("\r\n") && line.is_ascii(), "{line:?}");
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, text: &str) -> Value {
        self.write(text);
        self.write("\n");
        self.read()
    }

    /// Runs a command and skips events before its reply.
    fn run(&mut self, command: &str, arguments: &Value) -> Value {
        self.write(&json!({"execute": command, "arguments": arguments}).to_string());
        self.write("\r\n");
        self.reply()
    }

    /// The next line that is no event.
    fn reply(&mut self) -> Value {
        loop {
            let object = self.read();
            if object.get("event").is_none() {
                return object;
            }
        }
    }

    fn event(&mut self) -> (String, Value) {
        let object = self.read();
        assert!(object["timestamp"]["seconds"].as_i64().unwrap() > 0);
        (object["event"].as_str().unwrap().to_owned(), object["data"].clone())
    }

    fn status(&mut self) -> String {
        let reply = self.run("query-status", &json!({}));
        reply["return"]["status"].as_str().unwrap().to_owned()
    }
}

fn with_guest() -> (Arc<FakeGuest>, Arc<Control>, Arc<Clients>) {
    let guest = FakeGuest::new();
    let control = Control::with_guest(Arc::clone(&guest) as _);
    (guest, control, Arc::new(Clients::default()))
}

fn await_that(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "not {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn class(reply: &Value) -> &str {
    reply["error"]["class"].as_str().unwrap_or("none")
}

#[test]
fn negotiation_comes_first_and_once() {
    let (_, control, clients) = with_guest();
    let mut wire = Wire::new(&control, &clients);
    let reply = wire.ask(r#"{"execute": "query-status", "id": 7}"#);
    assert_eq!((class(&reply), &reply["id"]), ("CommandNotFound", &json!(7)));
    let oob = wire.ask(r#"{"execute":"qmp_capabilities","arguments":{"enable":["oob"]}}"#);
    assert_eq!(class(&oob), "GenericError");
    let reply =
        wire.ask(r#"{"execute":"qmp_capabilities","arguments":{"enable":[]},"id":{"a":1}}"#);
    assert_eq!(reply, json!({"return": {}, "id": {"a": 1}}));
    assert_eq!(class(&wire.ask(r#"{"execute":"qmp_capabilities"}"#)), "CommandNotFound");
    assert_eq!(wire.status(), "running");
}

#[test]
fn wrong_input_is_answered_and_survived() {
    let (_, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    for bad in [
        "nonsense",
        "{\"execute\": }",
        "[]",
        "3",
        "{}",
        r#"{"execute": 5}"#,
        r#"{"exec-oob": "stop"}"#,
        r#"{"execute": "stop", "arguments": []}"#,
        r#"{"execute": "stop", "arguments": {"now": true}}"#,
        r#"{"execute": "stop", "extra": 1}"#,
        r#"{"execute": "migrate"}"#,
        r#"{"execute": "migrate", "arguments": {"uri": "exec:cat"}}"#,
        r#"{"execute": "migrate-set-parameters", "arguments": {"downtime-limit": 0}}"#,
        "\u{7f}\u{1}",
    ] {
        let reply = wire.ask(bad);
        assert_eq!(class(&reply), "GenericError", "{bad}: {reply}");
        assert!(!reply["error"]["desc"].as_str().unwrap().contains('\n'));
    }
    assert_eq!(class(&wire.ask(r#"{"execute": "device_add"}"#)), "CommandNotFound");
    assert_eq!(wire.status(), "running", "nothing of this has stopped the guest");
    // An empty line is nothing, and several objects on a line are answered in order.
    wire.write("\r\n\n");
    wire.write("{\"execute\":\"query-version\",\"id\":1} {\"execute\":\"query-kvm\",\"id\":2}\n");
    assert_eq!((wire.read()["id"].clone(), wire.read()["id"].clone()), (json!(1), json!(2)));
}

#[test]
fn commands_are_a_stream_of_values_not_lines() {
    let (_, control, clients) = with_guest();
    let mut wire = Wire::new(&control, &clients);
    // In two writes, without a line end.
    wire.write(r#"{"execute":"qmp_"#);
    wire.write(r#"capabilities"}"#);
    assert_eq!(wire.read(), json!({"return": {}}));
    for byte in r#"{"execute":"query-status","id":1}"#.chars() {
        wire.write(&byte.to_string());
    }
    assert_eq!(wire.read()["id"], 1);
    wire.write("{\n  \"execute\": \"query-status\",\n  \"id\": 2\n}");
    assert_eq!(wire.read()["id"], 2);
    wire.write(r#"{"execute":"query-kvm","id":3}{"execute":"query-kvm","id":4}"#);
    assert_eq!((wire.read()["id"].clone(), wire.read()["id"].clone()), (json!(3), json!(4)));
    // What is broken is answered once, and the next command is a command.
    assert_eq!(class(&wire.ask("help {\"execute\"")), "GenericError");
    wire.write(":\"query-kvm\",\"id\":5}");
    assert_eq!(wire.read()["id"], 5);
}

#[test]
fn a_command_without_end_is_cut_off() {
    let (_, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    let junk = vec![b'x'; VALUE_BYTES_MAX + 1];
    // The server may close before it has read all of it.
    let _ = wire.0.get_mut().write_all(&junk);
    assert_eq!(class(&wire.read()), "GenericError");
    let mut rest = Vec::new();
    let _ = wire.0.read_to_end(&mut rest);
    assert!(rest.is_empty());
}

#[test]
fn one_client_more_takes_the_place_of_the_idlest() {
    let (_, control, clients) = with_guest();
    let mut wires: Vec<Wire> = (0..CLIENTS_MAX).map(|_| Wire::ready(&control, &clients)).collect();
    let mut idle = wires.remove(1);
    for wire in &mut wires {
        assert_eq!(wire.status(), "running");
    }
    let mut owner = Wire::ready(&control, &clients);
    assert_eq!(owner.status(), "running");
    assert!(idle.read()["error"]["desc"].as_str().unwrap().starts_with("disconnected"));
    assert_eq!(idle.0.read(&mut [0]).unwrap(), 0);
    for wire in &mut wires {
        assert_eq!(wire.status(), "running");
    }
}

#[test]
fn one_client_more_is_taken_in_though_all_are_busy() {
    let (guest, control, clients) = with_guest();
    let mut first = Wire::ready(&control, &clients);
    let uri = json!({"uri": "tcp:127.0.0.1:4444"});
    first.run("migrate", &uri);
    let attempt = guest.last_attempt();
    attempt.reach(Status::Undecided, 3);
    let silence = attempt.unanswered.lock().unwrap();
    let mut busy = vec![first];
    busy.extend((1..CLIENTS_MAX).map(|_| Wire::ready(&control, &clients)));
    for (nth, wire) in busy.iter_mut().enumerate() {
        wire.write("{\"execute\": \"x-resolve\"}");
        await_that("asked", || attempt.asked.lock().unwrap().len() > nth);
    }
    let mut owner = Wire::ready(&control, &clients);
    assert_eq!(owner.status(), "finish-migrate");
    drop(silence);
    // Whoever made room gets the answer that it waited for.
    let mut left = busy.remove(0);
    assert_eq!(left.reply()["return"]["status"], "failed");
    assert!(left.reply()["error"]["desc"].as_str().unwrap().starts_with("disconnected"));
    for wire in &mut busy {
        assert_eq!(wire.reply()["return"]["status"], "failed");
    }
}

#[test]
fn every_listed_command_exists() {
    let (_, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    let list = wire.run("query-commands", &json!({}))["return"].as_array().unwrap().clone();
    for command in &list {
        let name = command["name"].as_str().unwrap();
        if !["qmp_capabilities", "quit"].contains(&name) {
            assert_ne!(class(&wire.run(name, &json!({}))), "CommandNotFound", "{name}");
        }
    }
    for wanted in [
        "migrate",
        "migrate_cancel",
        "migrate-incoming",
        "migrate-set-parameters",
        "query-migrate",
        "query-migrate-parameters",
        "query-status",
        "stop",
        "cont",
        "system_powerdown",
        "system_reset",
        "quit",
        "query-version",
    ] {
        assert!(list.contains(&json!({"name": wanted})), "{wanted}");
    }
}

#[test]
fn stop_and_cont_are_told_to_everybody() {
    let (_, control, clients) = with_guest();
    let mut owner = Wire::ready(&control, &clients);
    let mut other = Wire::ready(&control, &clients);
    assert_eq!(owner.run("stop", &json!({})), json!({"return": {}}));
    assert_eq!(other.event(), ("STOP".to_owned(), Value::Null));
    assert_eq!(owner.status(), "paused");
    owner.run("stop", &json!({}));
    owner.run("cont", &json!({}));
    assert_eq!(other.event().0, "RESUME", "stopping a paused guest is no event");
    assert_eq!(owner.status(), "running");
}

#[test]
fn a_migration_is_started_followed_and_over() {
    let (guest, control, clients) = with_guest();
    let mut owner = Wire::ready(&control, &clients);
    let mut other = Wire::ready(&control, &clients);
    assert_eq!(owner.run("query-migrate", &json!({})), json!({"return": {}}));
    let parameters = json!({"multifd-channels": 2, "downtime-limit": 20, "max-bandwidth": 50000});
    owner.run("migrate-set-parameters", &parameters);
    let uri = json!({"uri": "tcp:host:4444"});
    assert_eq!(owner.run("migrate", &uri), json!({"return": {}}));
    let (to, options, attempt) = {
        let attempts = guest.attempts.lock().unwrap();
        attempts[0].clone()
    };
    assert_eq!(to.to_string(), "tcp:host:4444");
    assert_eq!((options.channels, options.downtime_limit), (Some(2), Duration::from_millis(20)));
    assert_eq!(class(&owner.run("migrate", &uri)), "GenericError", "one at a time");
    attempt.reach(Status::Active, 0);
    assert_eq!(other.event(), ("MIGRATION".to_owned(), json!({"status": "setup"})));
    assert_eq!(other.event(), ("MIGRATION".to_owned(), json!({"status": "active"})));
    assert_eq!(other.event(), ("MIGRATION_PASS".to_owned(), json!({"pass": 1})));
    let info = owner.run("query-migrate", &json!({}))["return"].clone();
    assert_eq!((&info["status"], &info["ram"]["page-size"]), (&json!("active"), &json!(4096)));
    owner.run("migrate-set-parameters", &json!({"max-bandwidth": 0, "downtime-limit": 30}));
    assert_eq!(*attempt.asked.lock().unwrap(), ["limit 30ms", "bandwidth None"]);
    attempt.reach(Status::Completed, 1);
    let told: Vec<String> = (0..4).map(|_| other.event().0).collect();
    assert_eq!(told, ["MIGRATION_PASS", "STOP", "MIGRATION", "MIGRATION"]);
    assert_eq!(owner.status(), "postmigrate");
    let info = owner.run("query-migrate", &json!({}))["return"].clone();
    assert_eq!(info["x-martlet"]["outcome"], "completed");
    for command in ["cont", "stop", "migrate"] {
        let arguments = if command == "migrate" { uri.clone() } else { json!({}) };
        let reply = owner.run(command, &arguments);
        assert_eq!(reply["error"]["desc"], "the guest has moved away", "{command}");
    }
}

#[test]
fn a_refused_command_changes_nothing() {
    let (guest, control, clients) = with_guest();
    let mut owner = Wire::ready(&control, &clients);
    let limits = json!({"max-bandwidth": 5_000_000, "downtime-limit": 20});
    owner.run("migrate", &json!({"uri": "unix:/x", "x-parameters": limits}));
    let attempt = guest.last_attempt();
    let set =
        |owner: &mut Wire| owner.run("query-migrate-parameters", &json!({}))["return"].clone();
    let before = set(&mut owner);
    assert_eq!(
        (&before["max-bandwidth"], &before["downtime-limit"]),
        (&json!(5_000_000), &20.into())
    );
    // Another client's whole command, as `martlet migrate` sends it.
    let dir = crate::scratch::ScratchDir::create().unwrap();
    let path = dir.path().join("c");
    super::server::serve(UnixListener::bind(&path).unwrap(), Arc::clone(&control));
    let cli = Cli::try_parse_from(["martlet", "migrate", "--control", "c", "unix:/y"]).unwrap();
    let Command::Migrate(args) = cli.command else { panic!("{:?}", cli.command) };
    let mut second = Client::connect(&path).unwrap();
    let progress = &mut MigrationProgress::new(Kind::Quiet);
    let refused = follow::migrate(&mut second, &Request::of(&args), progress, &AtomicU32::new(0));
    assert_eq!(refused.unwrap_err().to_string(), "a migration is running already");
    // Others that are refused for one part of what they set.
    for (command, arguments) in [
        ("migrate", json!({"uri": "unix:/y", "x-parameters": {"x-rdma-pin-all": true}})),
        ("migrate", json!({"uri": "nowhere", "x-parameters": {"downtime-limit": 7}})),
        ("migrate-set-parameters", json!({"downtime-limit": 7, "multifd-channels": 9999})),
        ("migrate-set-parameters", json!({"max-bandwidth": 0, "x-rdma-queues": 0})),
        ("migrate-set-parameters", json!({"downtime-limit": 7, "max-bandwidth": 1})),
        (
            "migrate-set-capabilities",
            json!({"capabilities": [
                {"capability": "rdma-pin-all", "state": true},
                {"capability": "multifd", "state": false},
            ]}),
        ),
    ] {
        assert_eq!(class(&owner.run(command, &arguments)), "GenericError", "{command} {arguments}");
    }
    assert_eq!(set(&mut owner), before);
    assert!(!control.options().rdma.pin_all);
    assert!(attempt.asked.lock().unwrap().is_empty(), "the first one keeps its limits");
    // And one that is not refused.
    owner.run("migrate-set-parameters", &json!({"max-bandwidth": 0}));
    assert_eq!(*attempt.asked.lock().unwrap(), ["bandwidth None"]);
}

#[test]
fn a_name_that_is_not_found_holds_up_nobody_else() {
    let listen = Arc::new(FakeListen::default());
    let control = Control::waiting(Arc::clone(&listen) as _);
    let clients = Arc::new(Clients::default());
    let mut slow = Wire::ready(&control, &clients);
    let mut other = Wire::ready(&control, &clients);
    slow.write(r#"{"execute":"migrate-incoming","arguments":{"uri":"tcp:slow:2"}}"#);
    let again = json!({"uri": "tcp:other:3"});
    let refusal = loop {
        // Until the first one is on its way, this one would be taken.
        std::thread::yield_now();
        if control.is_opening() {
            break other.run("migrate-incoming", &again);
        }
    };
    let said = refusal["error"]["desc"].as_str().unwrap();
    assert_eq!(said, "about to wait for a guest at tcp:slow:2");
    assert_eq!(other.status(), "inmigrate");
    assert_eq!(other.run("query-migrate", &json!({})), json!({"return": {}}));
    assert_eq!(other.run("migrate_cancel", &json!({})), json!({"return": {}}));
    assert_eq!(other.run("quit", &json!({})), json!({"return": {}}));
    assert_eq!(control.wait_for_quit().unwrap(), QuitCause::Command);
    listen.answer();
    let late = loop {
        let object = slow.read();
        if object.get("event").is_none() {
            break object;
        }
    };
    assert_eq!(late["error"]["desc"], "this process is ending");
    assert_eq!(*listen.opened.lock().unwrap()[0].status.lock().unwrap(), ReceiveStatus::Stopped);
}

#[test]
fn a_cancelled_migration_leaves_the_guest() {
    let (guest, control, clients) = with_guest();
    let mut owner = Wire::ready(&control, &clients);
    assert_eq!(owner.run("migrate_cancel", &json!({})), json!({"return": {}}));
    owner.run("migrate", &json!({"uri": "unix:/x"}));
    owner.run("migrate_cancel", &json!({}));
    assert_eq!(owner.status(), "running");
    let status =
        |owner: &mut Wire| owner.run("query-migrate", &json!({}))["return"]["status"].clone();
    assert_eq!(status(&mut owner), "cancelled");
    owner.run("migrate", &json!({"uri": "unix:/x"}));
    assert_eq!(guest.attempts.lock().unwrap().len(), 2, "the next attempt may begin");
    guest.last_attempt().reach(Status::Failed, 0);
    let info = owner.run("query-migrate", &json!({}))["return"].clone();
    assert_eq!(info["error-desc"], "the link broke");
}

#[test]
fn an_undecided_migration_must_be_settled() {
    let (guest, control, clients) = with_guest();
    let mut owner = Wire::ready(&control, &clients);
    assert_eq!(class(&owner.run("x-resolve", &json!({}))), "GenericError");
    owner.run("migrate", &json!({"uri": "unix:/x"}));
    *guest.state.lock().unwrap() = GuestStatus::Paused;
    guest.last_attempt().reach(Status::Undecided, 0);
    assert_eq!(owner.status(), "finish-migrate");
    for command in ["cont", "stop"] {
        assert_eq!(class(&owner.run(command, &json!({}))), "GenericError");
    }
    assert_eq!(class(&owner.run("migrate", &json!({"uri": "unix:/x"}))), "GenericError");
    let attempt = guest.last_attempt();
    *attempt.unanswered.lock().unwrap() = Some("nobody\nanswers".to_owned());
    let reply = owner.run("x-resolve", &json!({}));
    let open = json!({"status": "x-undecided", "error-desc": "nobody answers"});
    assert_eq!(reply["return"], open);
    assert_eq!(owner.status(), "finish-migrate");
    *attempt.unanswered.lock().unwrap() = None;
    let settled = json!({"return": {"status": "failed", "error-desc": "the link broke"}});
    assert_eq!(owner.run("x-resolve", &json!({})), settled);
    assert_eq!(owner.status(), "running");
    assert_eq!(owner.run("x-resolve", &json!({})), settled, "the same for who asks later");
}

#[test]
fn an_operator_must_say_what_they_know_before_they_decide() {
    for (command, key, end, state) in [
        ("x-resolve-run-here", "destination-never-runs-it", "failed", "running"),
        ("x-resolve-give-up", "never-runs-here-again", "x-given-up", "postmigrate"),
    ] {
        let (guest, control, clients) = with_guest();
        let mut owner = Wire::ready(&control, &clients);
        let sure = json!({ key: true });
        assert_eq!(class(&owner.run(command, &sure)), "GenericError", "there was no migration");
        owner.run("migrate", &json!({"uri": "unix:/x"}));
        assert_eq!(class(&owner.run(command, &sure)), "GenericError", "it is under way");
        *guest.state.lock().unwrap() = GuestStatus::Paused;
        let attempt = guest.last_attempt();
        attempt.reach(Status::Undecided, 0);
        for unsure in [json!({}), json!({ key: false })] {
            let refused = owner.run(command, &unsure);
            let desc = refused["error"]["desc"].as_str().unwrap();
            assert!(desc.starts_with(&format!("'{key}' must be true: the guest")), "{desc}");
        }
        assert!(attempt.asked.lock().unwrap().is_empty());
        assert_eq!(owner.status(), "finish-migrate");
        assert_eq!(owner.run(command, &sure)["return"]["status"], end);
        assert_eq!(owner.status(), state);
    }
}

#[test]
fn a_guest_arrives() {
    let listen = Arc::new(FakeListen::default());
    let control = Control::waiting(Arc::clone(&listen) as _);
    let clients = Arc::new(Clients::default());
    let mut owner = Wire::ready(&control, &clients);
    let mut other = Wire::ready(&control, &clients);
    assert_eq!(owner.status(), "inmigrate");
    for command in ["stop", "cont", "x-query-guest"] {
        assert_eq!(class(&owner.run(command, &json!({}))), "GenericError", "{command}");
    }
    let taken = owner.run("migrate-incoming", &json!({"uri": "tcp:127.0.0.1:1"}));
    assert!(taken["error"]["desc"].as_str().unwrap().starts_with("cannot listen at"));
    owner.run("migrate-incoming", &json!({"uri": "tcp:127.0.0.1:4444"}));
    assert_eq!(other.event().1["status"], "setup");
    let again = owner.run("migrate-incoming", &json!({"uri": "tcp:127.0.0.1:5555"}));
    assert_eq!(class(&again), "GenericError");
    let info = owner.run("query-migrate", &json!({}))["return"].clone();
    let address = json!([{"type": "inet", "host": "127.0.0.1", "port": "4444"}]);
    assert_eq!((&info["status"], &info["socket-address"]), (&json!("setup"), &address));

    let incoming = Arc::clone(&listen.opened.lock().unwrap()[0]);
    let set = |status| *incoming.status.lock().unwrap() = status;
    set(ReceiveStatus::Active);
    assert_eq!(other.event().1["status"], "active");
    incoming.fail("the source\nwent away");
    assert_eq!(other.event().1["status"], "failed");
    let info = owner.run("query-migrate", &json!({}))["return"].clone();
    assert_eq!(info["error-desc"], "the source went away");
    assert_eq!(owner.status(), "inmigrate");
    set(ReceiveStatus::Arrived);
    assert_eq!(other.event().1["status"], "active");
    assert_eq!(other.event().1["status"], "completed");
    assert_eq!(other.event().0, "RESUME");
    assert_eq!(owner.status(), "running");
    assert_eq!(owner.run("x-query-guest", &json!({}))["return"]["verified-pages"], 10);
    assert_eq!(class(&owner.run("migrate-incoming", &json!({"uri": "unix:/y"}))), "GenericError");
}

#[test]
fn a_guest_that_ends_itself_ends_the_process() {
    let (guest, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    *guest.state.lock().unwrap() = GuestStatus::Ended(EndCause::Reset);
    assert_eq!(control.wait_for_quit().unwrap(), QuitCause::Guest(EndCause::Reset));
    assert_eq!(wire.event().0, "RESET");
    let (name, data) = wire.event();
    assert_eq!((name.as_str(), &data["reason"]), ("SHUTDOWN", &json!("guest-reset")));
}

#[test]
fn a_reset_is_told_and_the_process_goes_on() {
    let (guest, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    assert_eq!(wire.run("system_reset", &json!({})), json!({"return": {}}));
    let (name, data) = wire.event();
    assert_eq!((name.as_str(), &data["guest"]), ("RESET", &json!(false)));
    assert_eq!(guest.resets(), (0, 1));
    assert_eq!(wire.status(), "running");
}

#[test]
fn a_guest_whose_power_button_is_pressed_turns_itself_off() {
    let (_, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    wire.write("{\"execute\": \"system_powerdown\"}\n");
    assert_eq!(wire.event().0, "POWERDOWN");
    assert_eq!(wire.reply(), json!({"return": {}}));
    assert_eq!(control.wait_for_quit().unwrap(), QuitCause::Guest(EndCause::Shutdown));
    let (name, data) = wire.event();
    assert_eq!((name.as_str(), &data["reason"]), ("SHUTDOWN", &json!("guest-shutdown")));
}

#[test]
fn a_guest_that_ends_itself_during_its_migration_is_not_cancelled() {
    let (guest, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    wire.run("migrate", &json!({"uri": "unix:/x"}));
    *guest.state.lock().unwrap() = GuestStatus::Ended(EndCause::Shutdown);
    assert_eq!(control.wait_for_quit().unwrap(), QuitCause::Guest(EndCause::Shutdown));
    assert_eq!(
        *guest.last_attempt().asked.lock().unwrap(),
        ["the guest has ended: it shut itself down"]
    );
}

#[test]
fn a_crashed_guest_stays_to_be_looked_at() {
    let (guest, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    *guest.state.lock().unwrap() = GuestStatus::Ended(EndCause::Crash("triple fault".to_owned()));
    assert_eq!(wire.event().0, "STOP");
    let reply = wire.run("query-status", &json!({}));
    assert_eq!(reply["return"]["status"], "internal-error");
    assert_eq!(reply["return"]["x-reason"], "triple fault");
}

#[test]
fn quit_cancels_a_migration_and_says_goodbye() {
    let (guest, control, clients) = with_guest();
    let mut wire = Wire::ready(&control, &clients);
    wire.run("migrate", &json!({"uri": "unix:/x"}));
    assert_eq!(wire.run("quit", &json!({})), json!({"return": {}}));
    assert_eq!(control.wait_for_quit().unwrap(), QuitCause::Command);
    assert_eq!(*guest.last_attempt().asked.lock().unwrap(), ["cancel"]);
    clients.finish(LIMIT);
    let mut rest = String::new();
    wire.0.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"SHUTDOWN\"") && rest.contains("host-qmp-quit"), "{rest}");
}

#[test]
fn our_client_speaks_to_our_server() {
    let dir = crate::scratch::ScratchDir::create().unwrap();
    let path = dir.path().join("c");
    assert!(matches!(Client::connect(&path), Err(ClientError::NoServer { .. })));
    let (_, control, _) = with_guest();
    let clients = super::server::serve(UnixListener::bind(&path).unwrap(), Arc::clone(&control));
    let mut client = Client::connect(&path).unwrap();
    assert_eq!(client.ask("query-status").unwrap()["running"], true);
    let refused = client.ask("x-resolve").unwrap_err();
    assert_eq!(refused.to_string(), "there was no migration");
    client.ask("stop").unwrap();
    assert_eq!(client.next_event(LIMIT).unwrap().unwrap().name, "STOP");
    assert_eq!(client.next_event(Duration::from_millis(5)).unwrap(), None);
    clients.finish(LIMIT);
    let gone = client.ask("query-status").unwrap_err();
    assert!(matches!(gone, ClientError::Gone { .. }), "{gone}");
}

#[test]
fn a_socket_that_speaks_something_else_is_named() {
    let dir = crate::scratch::ScratchDir::create().unwrap();
    let path = dir.path().join("c");
    let listener = UnixListener::bind(&path).unwrap();
    let speaker = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail ready\r\n").unwrap();
        stream
    });
    let error = Client::connect(&path).unwrap_err();
    assert!(matches!(error, ClientError::Foreign { .. }), "{error}");
    drop(speaker.join().unwrap());
}
