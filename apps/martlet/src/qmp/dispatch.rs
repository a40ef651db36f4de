//! From a command's name and arguments to its result.

use super::schema::{
    self, Capabilities, GiveUpArguments, MigrateArguments, NoArguments, RunHereArguments,
    SetCapabilities,
};
use crate::control::{Control, QuitCause};
use crate::parameters::Parameters;
use martlet_guest_program::{GuestCounters, NicCounters};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;

/// An error as QMP has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QmpError {
    /// `GenericError` or `CommandNotFound`.
    pub(crate) class: &'static str,
    /// One line for people.
    pub(crate) desc: String,
}

impl QmpError {
    pub(crate) fn generic(desc: impl Into<String>) -> QmpError {
        QmpError { class: "GenericError", desc: desc.into() }
    }

    fn not_found(name: &str) -> QmpError {
        let desc = format!("The command {} has not been found", shorten(name));
        QmpError { class: "CommandNotFound", desc }
    }
}

/// Longest part of a client's own text that an error repeats, in characters.
const ECHO_CHARS_MAX: usize = 64;

fn shorten(text: &str) -> String {
    crate::failure::one_line(&text.chars().take(ECHO_CHARS_MAX).collect::<String>())
}

impl From<String> for QmpError {
    fn from(desc: String) -> QmpError {
        QmpError::generic(desc)
    }
}

/// Whether a client has negotiated: before that, only `qmp_capabilities` exists, and after it,
/// everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Right after the greeting.
    Negotiation,
    /// Commands are taken and events sent.
    Command,
}

/// Every command, in order of name; what `query-commands` returns.
pub(crate) const COMMANDS: [&str; 23] = [
    "cont",
    "migrate",
    "migrate-incoming",
    "migrate-set-capabilities",
    "migrate-set-parameters",
    "migrate_cancel",
    "qmp_capabilities",
    "query-commands",
    "query-kvm",
    "query-migrate",
    "query-migrate-capabilities",
    "query-migrate-parameters",
    "query-status",
    "query-version",
    "quit",
    "stop",
    "system_powerdown",
    "system_reset",
    "x-query-guest",
    "x-query-machine",
    "x-resolve",
    "x-resolve-give-up",
    "x-resolve-run-here",
];

/// Carries out one command. Arguments are checked before anything is done.
pub(crate) fn execute(
    control: &Arc<Control>,
    mode: &mut Mode,
    name: &str,
    arguments: Value,
) -> Result<Value, QmpError> {
    let negotiating = *mode == Mode::Negotiation;
    if negotiating != (name == "qmp_capabilities") {
        let mut error = QmpError::not_found(name);
        if negotiating {
            error.desc = "Expecting capabilities negotiation with 'qmp_capabilities'".to_owned();
        }
        return Err(error);
    }
    match name {
        "qmp_capabilities" => {
            let wanted: Capabilities = parse(arguments)?;
            if let Some(name) = wanted.enable.first() {
                let name = shorten(name);
                return Err(QmpError::generic(format!("Capability '{name}' is not available")));
            }
            *mode = Mode::Command;
            done()
        }
        "migrate" => {
            let arguments: MigrateArguments = parse(arguments)?;
            control.migrate(&arguments.address()?, arguments.options()?)?;
            done()
        }
        "quit" => {
            let arguments: schema::QuitArguments = parse(arguments)?;
            control.request_quit(QuitCause::Command, arguments.force)?;
            done()
        }
        "migrate-incoming" => {
            let arguments: MigrateArguments = parse(arguments)?;
            control.receive(&arguments.address_only()?)?;
            done()
        }
        "migrate-set-parameters" => {
            let set: Parameters = parse(arguments)?;
            control.set_options(set.check()?);
            done()
        }
        "migrate-set-capabilities" => {
            let set: SetCapabilities = parse(arguments)?;
            control.set_options(set.parameters()?.check()?);
            done()
        }
        "x-resolve-run-here" => {
            let arguments: RunHereArguments = parse(arguments)?;
            Ok(control.resolve(Some(arguments.confirmed()?))?)
        }
        "x-resolve-give-up" => {
            let arguments: GiveUpArguments = parse(arguments)?;
            Ok(control.resolve(Some(arguments.confirmed()?))?)
        }
        _ => {
            if COMMANDS.contains(&name) {
                let NoArguments {} = parse(arguments)?;
            }
            execute_plain(control, name)
        }
    }
}

/// The commands without arguments.
fn execute_plain(control: &Control, name: &str) -> Result<Value, QmpError> {
    match name {
        "query-status" => {
            let status = control.run_state();
            let mut info = json!({ "status": status, "running": status == "running" });
            if let (Some(reason), Some(fields)) = (control.crash_reason(), info.as_object_mut()) {
                fields.insert("x-reason".to_owned(), reason.into());
            }
            Ok(info)
        }
        "stop" => control.stop().map_err(QmpError::from).and_then(|()| done()),
        "system_reset" => control.reset().map_err(QmpError::from).and_then(|()| done()),
        "system_powerdown" => control.power_down().map_err(QmpError::from).and_then(|()| done()),
        "cont" => control.cont().map_err(QmpError::from).and_then(|()| done()),
        "migrate_cancel" => {
            control.cancel();
            done()
        }
        "query-migrate" => Ok(control.migration_info()),
        "query-migrate-parameters" => Ok(json!(Parameters::from(&control.options()))),
        "query-migrate-capabilities" => Ok(schema::capabilities(&control.options())),
        "query-version" => Ok(schema::version()),
        "query-commands" => {
            Ok(COMMANDS.iter().map(|name| json!({ "name": name })).collect::<Vec<_>>().into())
        }
        "query-kvm" => {
            let enabled =
                control.info().is_ok_and(|info| info.accel == martlet_machine::Accel::Kvm);
            Ok(json!({ "enabled": enabled, "present": crate::vm::kvm_usable().is_ok() }))
        }
        "x-query-machine" => {
            let info = control.info()?;
            Ok(json!({
                "accel": info.accel.to_string(),
                "dirty-tracking": info.tracking,
                "memory-bytes": info.memory.to_bytes().0,
                "vcpus": info.vcpus,
            }))
        }
        "x-query-guest" => {
            let check = control.check()?.ok_or_else(|| {
                QmpError::generic("this guest does not check itself: only the built-in one does")
            })?;
            Ok(guest_counters(&check))
        }
        "x-resolve" => Ok(control.resolve(None)?),
        _ => Err(QmpError::not_found(name)),
    }
}

/// What the built-in guest says of itself. One wrong page, or a clock that went back, is a lost
/// guest.
fn guest_counters(counters: &GuestCounters) -> Value {
    let first_wrong = counters.first_wrong.map(|page| {
        json!({
            "frame": page.frame.0,
            "version": page.version,
            "word": page.word,
            "value": page.value,
        })
    });
    json!({
        "filled": counters.ready,
        "filled-pages": counters.filled_pages,
        "written-pages": counters.written_pages,
        "verified-pages": counters.verified_pages,
        "wrong-pages": counters.wrong_pages,
        "first-wrong-page": first_wrong,
        "heartbeats": counters.heartbeats,
        "clock-steps-back": counters.tsc_backwards,
        "frames": frames(counters),
    })
}

/// What the guest says of its network cards, together; null without any.
fn frames(counters: &GuestCounters) -> Value {
    let cards = counters.nics.get(..usize::from(counters.nic_count)).unwrap_or_default();
    let sum = |value: fn(&NicCounters) -> u64| cards.iter().map(value).fold(0, u64::saturating_add);
    if cards.is_empty() {
        return Value::Null;
    }
    json!({
        "cards": cards.len(),
        "cards-running": cards.iter().filter(|card| card.runs).count(),
        "sent": sum(|card| card.sent),
        "received": sum(|card| card.received),
        "outstanding": sum(NicCounters::outstanding),
        "lost": sum(|card| card.lost),
        "repeated": sum(|card| card.repeated),
        "damaged": sum(|card| card.damaged),
        "index-wraps": sum(|card| card.index_wraps),
        "kicks": sum(|card| card.kicks),
    })
}

fn done() -> Result<Value, QmpError> {
    Ok(json!({}))
}

/// Reads a command's arguments; a key it does not know is an error, as in QEMU.
fn parse<T: DeserializeOwned>(arguments: Value) -> Result<T, QmpError> {
    serde_json::from_value(arguments).map_err(|e| {
        QmpError::generic(format!("Invalid arguments: {}", shorten_long(&e.to_string())))
    })
}

fn shorten_long(text: &str) -> String {
    crate::failure::one_line(&text.chars().take(4 * ECHO_CHARS_MAX).collect::<String>())
}
