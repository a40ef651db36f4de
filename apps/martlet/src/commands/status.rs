//! `status`: how a guest and its migration stand, for people or as JSON.

use super::follow::read;
use crate::cli::StatusArgs;
use crate::failure::{Failure, one_line};
use crate::out;
use crate::output::show_json;
use crate::snapshot::Snapshot;
use crate::view::number::{grouped, millis, plural, size};
use crate::view::progress::does_not_converge;
use crate::view::{Style, summary};
use martlet_qmp::{Client, ClientError};
use martlet_units::ByteCount;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// `martlet status`.
pub(crate) fn run(args: &StatusArgs) -> Result<(), Failure> {
    let end = show(args);
    if let (true, Err(failure)) = (args.json, &end)
        && !matches!(failure, Failure::Output(_))
    {
        show_json(&json!({ "status": null, "error": one_line(&failure.to_string()) }));
    }
    end
}

fn show(args: &StatusArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.control.path)?;
    let status = client.ask("query-status")?;
    let migration = client.ask("query-migrate")?;
    let machine = optional(client.ask("x-query-machine"))?;
    let guest = optional(client.ask("x-query-guest"))?;
    if args.json {
        let object = json!({
            "status": status["status"], "running": status["running"], "reason": status["x-reason"],
            "machine": machine, "guest": guest, "migration": migration,
        });
        out(format_args!("{object}\n"))?;
    } else {
        let snapshot: Snapshot = read(migration, "query-migrate")?;
        out(format_args!("{}", render(&status, &machine, &guest, &snapshot, Style::of_stdout())))?;
    }
    Ok(())
}

/// What a process without a guest, or a guest that says nothing of itself, has not: null.
fn optional(result: Result<Value, ClientError>) -> Result<Value, Failure> {
    match result {
        Ok(value) => Ok(value),
        Err(ClientError::Refused { .. }) => Ok(Value::Null),
        Err(error) => Err(error.into()),
    }
}

/// QEMU's word for a state, and what it means.
fn meaning(status: &str, migration: &Snapshot) -> &'static str {
    match (status, migration.status.as_str()) {
        ("running", _) => "the guest runs here",
        ("paused", _) => "paused by its owner",
        ("inmigrate", "active") => "a guest is on its way to here",
        ("inmigrate", _) => "waiting for a guest",
        ("postmigrate", "x-given-up") => {
            "given up by its operator: it will not run here again, and may run elsewhere"
        }
        ("postmigrate", _) => "the guest has moved away and will not run here again",
        ("finish-migrate", "x-undecided") => {
            "stopped until the destination says who has the guest: see `martlet resolve --help`"
        }
        ("finish-migrate", _) => "in the switchover",
        ("shutdown", _) => "the guest has ended itself",
        ("internal-error", _) => "the guest can't go on",
        _ => "",
    }
}

fn render(
    status: &Value,
    machine: &Value,
    guest: &Value,
    migration: &Snapshot,
    style: Style,
) -> String {
    let mut out = String::new();
    let word = one_line(status["status"].as_str().unwrap_or("unknown"));
    let mut row = |name: &str, text: &str| {
        let _ = writeln!(out, "{name:<10} {text}");
    };
    row("status", format!("{word:<14} {}", meaning(&word, migration)).trim_end());
    if let Some(reason) = status["x-reason"].as_str() {
        row("reason", &one_line(reason));
    }
    if let Some(bytes) = machine["memory-bytes"].as_u64() {
        let text = |name: &str| one_line(machine[name].as_str().unwrap_or("?"));
        let vcpus = plural(machine["vcpus"].as_u64().unwrap_or(0), "vCPU");
        let memory = size(ByteCount(bytes));
        row(
            "machine",
            &format!(
                "{memory}, {vcpus}, {}, dirty pages by {}",
                text("accel"),
                text("dirty-tracking")
            ),
        );
    }
    if let Some(checked) = guest["verified-pages"].as_u64() {
        let number = |name: &str| guest[name].as_u64().unwrap_or(0);
        let wrong = summary::wrong_pages(number("wrong-pages"), style);
        let beats = grouped(number("heartbeats"));
        row(
            "guest",
            &format!("{} checked by itself, {wrong}; {beats} heartbeats", plural(checked, "page")),
        );
    }
    if !migration.status.is_empty() {
        row("migration", &migration_line(migration));
    }
    out
}

fn migration_line(migration: &Snapshot) -> String {
    let mut line = one_line(&migration.status);
    if let Some(address) = migration.socket_address.first() {
        let text = |name: &str| one_line(address[name].as_str().unwrap_or("?"));
        let place = match address["type"].as_str() {
            Some("inet") => format!("tcp:{}:{}", text("host"), text("port")),
            Some("rdma") => format!("rdma:{}:{}", text("host"), text("port")),
            Some(_) | None => format!("unix:{}", text("path")),
        };
        let _ = write!(line, ", in at {place}");
    } else {
        let _ = write!(line, ", {} sent", size(migration.sent()));
        let _ = write!(line, ", round {}", migration.ram.dirty_sync_count);
    }
    if let Some(outrun) = &migration.x_outrun {
        let _ = write!(line, ", {}", does_not_converge(outrun));
    }
    if let Some(blackout) = migration.x_martlet.as_ref().and_then(|r| r.blackout_ms) {
        let _ = write!(line, ", blackout {}", millis(blackout));
    }
    if let Some(error) = &migration.error_desc {
        let _ = write!(line, ": {}", one_line(error));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Colour, Glyphs};

    #[test]
    fn status_is_said_in_words() {
        let style = Style { colour: Colour::Plain, glyphs: Glyphs::Unicode };
        let machine = json!({
            "accel": "kvm", "dirty-tracking": "log", "memory-bytes": 1u64 << 30, "vcpus": 2,
        });
        let guest = json!({"verified-pages": 12345, "wrong-pages": 0, "heartbeats": 99});
        let running = json!({"status": "running", "running": true});
        let text = render(&running, &machine, &guest, &Snapshot::default(), style);
        let expected = "\
status     running        the guest runs here
machine    1 GiB, 2 vCPUs, kvm, dirty pages by log
guest      12 345 pages checked by itself, 0 wrong; 99 heartbeats
";
        assert_eq!(text, expected);

        let listening: Snapshot = serde_json::from_value(json!({
            "status": "setup", "error-desc": "the source went away",
            "socket-address": [{"type": "inet", "host": "0.0.0.0", "port": "4444"}],
        }))
        .unwrap();
        let waiting = json!({"status": "inmigrate", "running": false});
        let text = render(&waiting, &Value::Null, &Value::Null, &listening, style);
        let expected = "\
status     inmigrate      waiting for a guest
migration  setup, in at tcp:0.0.0.0:4444: the source went away
";
        assert_eq!(text, expected);
    }

    #[test]
    fn an_undecided_migration_says_what_to_do() {
        let migration = Snapshot { status: "x-undecided".to_owned(), ..Snapshot::default() };
        assert!(meaning("finish-migrate", &migration).contains("martlet resolve"));
    }
}
