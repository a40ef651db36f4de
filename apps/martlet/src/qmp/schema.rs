//! Arguments and results of the commands: QEMU's qapi/migration.json as far as martlet has it.

use super::events::status_word;
use crate::control::Verdict;
use crate::parameters::{Parameters, whole_ms};
use crate::report_json::{OutrunJson, ReportJson, fault_word, ms, round_to};
use crate::seen::blackout;
use martlet_engine::{MigrateOptions, Progress, Report, Status};
use martlet_transport::Address;
use martlet_units::PAGE_SIZE;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Arguments of a command that has none.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoArguments {}

/// Arguments of `quit`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QuitArguments {
    /// End now, also in the middle of a migration or while one is undecided.
    #[serde(default, rename = "x-force")]
    pub(crate) force: bool,
}

/// Arguments of `qmp_capabilities`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Capabilities {
    #[serde(default)]
    pub(crate) enable: Vec<String>,
}

/// Arguments of `migrate` and `migrate-incoming`. `detach` is taken and ignored, as in QEMU.
/// `x-parameters` are for `migrate` only: set if it starts, and together with that; what is not
/// among them is then as by default.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct MigrateArguments {
    uri: Option<String>,
    channels: Option<Vec<MigrationChannel>>,
    #[serde(rename = "detach")]
    _detach: Option<bool>,
    x_parameters: Option<Parameters>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MigrationChannel {
    #[serde(rename = "channel-type")]
    channel_type: String,
    addr: MigrationAddress,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MigrationAddress {
    transport: String,
    #[serde(rename = "type")]
    kind: Option<String>,
    host: Option<String>,
    port: Option<String>,
    path: Option<String>,
}

impl MigrateArguments {
    /// The address in either of the two forms.
    pub(crate) fn address(&self) -> Result<Address, String> {
        match (&self.uri, self.channels.as_deref()) {
            (Some(uri), None) => parse_address(uri),
            (None, Some([channel])) if channel.channel_type == "main" => channel.addr.address(),
            (None, Some(_)) => Err("'channels' takes exactly one channel of type 'main'".into()),
            (Some(_), Some(_)) | (None, None) => {
                Err("exactly one of 'uri' and 'channels' must be given".into())
            }
        }
    }

    /// The same for a command that takes nothing else.
    pub(crate) fn address_only(&self) -> Result<Address, String> {
        if self.x_parameters.is_some() {
            return Err("'x-parameters' are the source's".into());
        }
        self.address()
    }

    /// The options that it comes with, checked.
    pub(crate) fn options(&self) -> Result<impl FnOnce(&mut MigrateOptions) + use<>, String> {
        let set = self.x_parameters.as_ref().map(Parameters::check).transpose()?;
        Ok(move |options: &mut MigrateOptions| {
            if let Some(set) = set {
                *options = MigrateOptions::default();
                set(options);
            }
        })
    }
}

impl MigrationAddress {
    fn address(&self) -> Result<Address, String> {
        let is_rdma = match self.transport.as_str() {
            "socket" => false,
            "rdma" => true,
            other => return Err(format!("transport '{other}' is not supported")),
        };
        let text = match (self.kind.as_deref(), &self.host, &self.port, &self.path) {
            (Some("inet"), Some(host), Some(port), None) if !is_rdma && host.contains(':') => {
                format!("tcp:[{host}]:{port}")
            }
            (Some("inet"), Some(host), Some(port), None) if !is_rdma => {
                format!("tcp:{host}:{port}")
            }
            (Some("unix"), None, None, Some(path)) if !is_rdma => format!("unix:{path}"),
            (None, Some(host), Some(port), None) if is_rdma && host.contains(':') => {
                format!("rdma:[{host}]:{port}")
            }
            (None, Some(host), Some(port), None) if is_rdma => format!("rdma:{host}:{port}"),
            _ => {
                return Err(
                    "an address is type 'inet' with host and port, or 'unix' with path, or of the \
                     transport 'rdma' with host and port"
                        .into(),
                );
            }
        };
        parse_address(&text)
    }
}

fn parse_address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|e: martlet_transport::ParseAddressError| e.to_string())
}

/// An address as QEMU's `SocketAddress`.
pub(crate) fn socket_address(address: &Address) -> Value {
    match address {
        Address::Tcp { host, port } => {
            json!({ "type": "inet", "host": host, "port": port.to_string() })
        }
        // QEMU's type has no word for it.
        Address::Rdma { host, port } => {
            json!({ "type": "rdma", "host": host, "port": port.to_string() })
        }
        Address::Unix(path) => json!({ "type": "unix", "path": path.display().to_string() }),
    }
}

/// Arguments of `migrate-set-capabilities`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetCapabilities {
    capabilities: Vec<CapabilityState>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CapabilityState {
    capability: String,
    state: bool,
}

/// Capabilities of QEMU that are how martlet works and can't be switched off.
const ALWAYS_ON: [&str; 4] = ["events", "multifd", "return-path", "switchover-ack"];

impl SetCapabilities {
    /// Those that are parameters of a migration; the others can only be what they are.
    pub(crate) fn parameters(&self) -> Result<Parameters, String> {
        let mut parameters = Parameters::default();
        for CapabilityState { capability, state } in &self.capabilities {
            match (capability.as_str(), state) {
                ("auto-converge", state) => parameters.x_auto_converge = Some(*state),
                ("rdma-pin-all", state) => parameters.x_rdma_pin_all = Some(*state),
                (name, true) if ALWAYS_ON.contains(&name) => {}
                (name, false) if ALWAYS_ON.contains(&name) => {
                    return Err(format!("capability '{name}' can't be switched off"));
                }
                (_, false) => {}
                (name, true) => return Err(format!("capability '{name}' is not supported")),
            }
        }
        Ok(parameters)
    }
}

/// What `query-migrate-capabilities` returns.
pub(crate) fn capabilities(options: &MigrateOptions) -> Value {
    let mut list: Vec<Value> =
        ALWAYS_ON.iter().map(|name| json!({ "capability": name, "state": true })).collect();
    list.push(json!({ "capability": "auto-converge", "state": options.auto_converge }));
    list.push(json!({ "capability": "rdma-pin-all", "state": options.rdma.pin_all }));
    Value::Array(list)
}

/// Arguments of `x-resolve-run-here`. What must be true is said by whoever wants it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RunHereArguments {
    #[serde(default)]
    destination_never_runs_it: bool,
}

/// Arguments of `x-resolve-give-up`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct GiveUpArguments {
    #[serde(default)]
    never_runs_here_again: bool,
}

impl RunHereArguments {
    /// Refuses what was not confirmed.
    pub(crate) fn confirmed(&self) -> Result<Verdict, String> {
        let said = self.destination_never_runs_it.then_some(Verdict::RunHere);
        said.ok_or_else(|| {
            format!("'destination-never-runs-it' must be true: {}", Verdict::RunHere.meaning())
        })
    }
}

impl GiveUpArguments {
    /// Refuses what was not confirmed.
    pub(crate) fn confirmed(&self) -> Result<Verdict, String> {
        let said = self.never_runs_here_again.then_some(Verdict::GiveUp);
        said.ok_or_else(|| {
            format!("'never-runs-here-again' must be true: {}", Verdict::GiveUp.meaning())
        })
    }
}

/// What `x-resolve` returns: what became of the guest, and why.
pub(crate) fn resolution(status: Status, reason: Option<&str>) -> Value {
    let mut answer = json!({ "status": status_word(status) });
    if let (Some(reason), Some(fields)) = (reason, answer.as_object_mut()) {
        fields.insert("error-desc".to_owned(), crate::failure::one_line(reason).into());
    }
    answer
}

/// What `query-migrate` returns at the source.
pub(crate) fn migration_info(
    progress: &Progress,
    setup: Option<Duration>,
    report: Option<&Report>,
) -> Value {
    let mut info = Map::new();
    info.insert("status".to_owned(), status_word(progress.status).into());
    info.insert("total-time".to_owned(), whole_ms(progress.elapsed).into());
    if let Some(setup) = setup {
        info.insert("setup-time".to_owned(), whole_ms(setup).into());
    }
    info.insert("ram".to_owned(), ram_stats(progress));
    match progress.status {
        Status::Active | Status::Device => {
            if let Some(predicted) = progress.predicted_blackout {
                info.insert("expected-downtime".to_owned(), whole_ms(predicted).into());
                info.insert("x-expected-downtime-ms".to_owned(), ms(predicted).into());
            }
        }
        Status::Completed => {
            if let Some(blackout) = report.and_then(blackout) {
                info.insert("downtime".to_owned(), whole_ms(blackout).into());
            }
        }
        Status::Setup
        | Status::Failed
        | Status::Cancelling
        | Status::Cancelled
        | Status::Undecided
        | Status::GivenUp => {}
    }
    if let (Some(outrun), false) = (&progress.outrun, progress.status.is_final()) {
        info.insert("x-outrun".to_owned(), json!(OutrunJson::from(outrun)));
    }
    if progress.throttle_percent > 0 {
        info.insert("cpu-throttle-percentage".to_owned(), progress.throttle_percent.into());
    }
    if let Some(error) = &progress.error {
        info.insert("error-desc".to_owned(), crate::failure::one_line(&error.to_line()).into());
        info.insert("x-fault".to_owned(), fault_word(error.fault()).into());
    }
    if let Some(report) = report {
        let outrun = progress.outrun.as_ref().map(OutrunJson::from);
        let report = ReportJson { outrun, ..ReportJson::from(report) };
        let report = serde_json::to_value(report).unwrap_or(Value::Null);
        info.insert("x-martlet".to_owned(), report);
    }
    Value::Object(info)
}

/// QEMU's `MigrationStats`. Postcopy and XBZRLE do not exist here, so their numbers are 0.
fn ram_stats(progress: &Progress) -> Value {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let bits_per_s = progress.rate.0 as f64 * 8.0;
    json!({
        "transferred": progress.bytes_sent.0,
        "remaining": progress.remaining.to_bytes().0,
        "total": progress.total.to_bytes().0,
        "duplicate": progress.pages.zero,
        "normal": progress.pages.normal,
        "normal-bytes": progress.pages.normal.saturating_mul(PAGE_SIZE),
        "dirty-pages-rate": progress.dirty_pages_per_s,
        "mbps": round_to(bits_per_s / 1e6, 1e3),
        "pages-per-second": progress.rate.0 / PAGE_SIZE,
        "dirty-sync-count": u64::from(progress.round) + 1,
        "page-size": PAGE_SIZE,
        "multifd-bytes": progress.bytes_sent.0,
        "postcopy-requests": 0,
        "x-untouched": progress.pages.untouched,
    })
}

/// QEMU's `VersionInfo`, for `query-version` and the greeting. The numbers are martlet's own.
pub(crate) fn version() -> Value {
    let part = |text: &str| text.parse::<u64>().unwrap_or(0);
    json!({
        "qemu": {
            "major": part(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": part(env!("CARGO_PKG_VERSION_MINOR")),
            "micro": part(env!("CARGO_PKG_VERSION_PATCH")),
        },
        "package": concat!("martlet ", env!("CARGO_PKG_VERSION")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::progress;
    use martlet_engine::Outrun;
    use martlet_units::BytesPerSec;

    fn address(json: Value) -> Result<String, String> {
        let arguments: MigrateArguments =
            serde_json::from_value(json).map_err(|e| e.to_string())?;
        arguments.address().map(|a| a.to_string())
    }

    #[test]
    fn addresses_come_in_two_forms() {
        assert_eq!(address(json!({"uri": "tcp:a:1", "detach": true})).unwrap(), "tcp:a:1");
        let channel = |addr: Value| json!({"channels": [{"channel-type": "main", "addr": addr}]});
        let inet = json!({"transport": "socket", "type": "inet", "host": "::1", "port": "9"});
        assert_eq!(address(channel(inet)).unwrap(), "tcp:[::1]:9");
        let unix = json!({"transport": "socket", "type": "unix", "path": "/s"});
        assert_eq!(address(channel(unix)).unwrap(), "unix:/s");
        for host in ["a", "::1"] {
            let rdma = json!({"transport": "rdma", "host": host, "port": "1"});
            let written = if host == "a" { "rdma:a:1" } else { "rdma:[::1]:1" };
            assert_eq!(address(channel(rdma)).unwrap(), written);
        }
        for bad in [
            json!({}),
            json!({"uri": 1}),
            json!({"uri": "exec:cat"}),
            json!({"uri": "tcp:a:1", "channels": []}),
            json!({"uri": "tcp:a:1", "blk": true}),
            channel(json!({"transport": "exec", "args": ["cat"]})),
            channel(json!({"transport": "rdma", "host": "a"})),
            channel(json!({"transport": "rdma", "type": "inet", "host": "a", "port": "1"})),
            channel(json!({"transport": "rdma", "type": "unix", "path": "/s"})),
            channel(json!({"transport": "socket", "type": "inet", "host": "a"})),
        ] {
            assert!(address(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn capabilities_say_what_martlet_is() {
        let mut options = MigrateOptions::default();
        let set = |name: &str, state: bool, options: &mut MigrateOptions| {
            let json = json!({"capabilities": [{"capability": name, "state": state}]});
            let wanted = serde_json::from_value::<SetCapabilities>(json).unwrap();
            wanted.parameters().map(|parameters| parameters.check().unwrap()(options))
        };
        set("auto-converge", false, &mut options).unwrap();
        assert!(!options.auto_converge);
        set("multifd", true, &mut options).unwrap();
        set("xbzrle", false, &mut options).unwrap();
        assert!(set("multifd", false, &mut options).is_err());
        assert!(set("postcopy-ram", true, &mut options).is_err());
    }

    #[test]
    fn query_migrate_has_qemus_fields() {
        let info =
            migration_info(&progress(Status::Active, 2), Some(Duration::from_micros(1500)), None);
        insta::assert_snapshot!(serde_json::to_string_pretty(&info).unwrap());
    }

    #[test]
    fn a_migration_that_does_not_converge_says_so() {
        let mut progress = progress(Status::Active, 4);
        let outrun = Outrun { dirties: BytesPerSec(400), carries: BytesPerSec(100) };
        progress.outrun = Some(outrun);
        let expected = json!({"dirties_bytes_per_s": 400, "carries_bytes_per_s": 100});
        assert_eq!(migration_info(&progress, None, None)["x-outrun"], expected);
        progress.status = Status::Cancelled;
        let report = crate::report_json::tests::sample();
        let info = migration_info(&progress, None, Some(&report));
        assert_eq!(info["x-martlet"]["outrun"], expected);
        assert_eq!(info.get("x-outrun"), None);
    }

    #[test]
    fn a_finished_migration_carries_its_report() {
        let report = crate::report_json::tests::sample();
        let info = migration_info(&progress(Status::Completed, 3), None, Some(&report));
        assert_eq!(info["downtime"], 1, "0.463 ms are rounded up");
        assert_eq!(info["x-martlet"]["blackout_ms"], 0.463);
    }
}
