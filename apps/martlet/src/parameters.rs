//! What a migration is to be like, on its way from the command line and the control socket to the
//! engine: names, units and limits are said here, defaults by [`MigrateOptions`].

use crate::accelerator::ZeroCheckArg;
use crate::cli::{MigrateArgs, ThenArg, TuningArgs};
use martlet_engine::{MigrateOptions, Within};
use martlet_ram::ZeroFinders;
use martlet_units::{ByteCount, BytesPerSec};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Longest downtime limit that is accepted. A longer one is a slip of the unit.
const DOWNTIME_LIMIT_MAX: Duration = Duration::from_secs(3600);
/// Longest time that a migration can be given. A longer one is a slip of the unit.
const WITHIN_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Shortest one; QMP says it in ms.
const WITHIN_MIN: Duration = Duration::from_millis(1);
/// Lowest bandwidth limit that is accepted: a page takes a third of a second then. A lower one is
/// a slip of the unit.
const BANDWIDTH_MIN: BytesPerSec = BytesPerSec(12_500);
/// Most data channels, as in `martlet_wire::control::CHANNELS_MAX`.
pub(crate) const CHANNELS_MAX: u16 = 128;
/// Most queue pairs, as in `martlet_wire::rdma::QUEUES_MAX`.
pub(crate) const QUEUES_MAX: u16 = 64;

/// Some of the parameters of a migration, in the words of `migrate-set-parameters`, or all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Parameters {
    /// 1 to 128; 0 lets the source choose.
    multifd_channels: Option<u64>,
    /// In ms.
    downtime_limit: Option<u64>,
    /// The same in us, for limits that ms can't say. Not together with `downtime-limit`.
    x_downtime_limit_us: Option<u64>,
    /// Bytes a second; 0 lifts the limit.
    max_bandwidth: Option<u64>,
    /// How long the guest may take until it is stopped.
    x_within: Option<WithinParameter>,
    /// Take time from a guest that dirties memory too fast; also the capability `auto-converge`.
    pub(crate) x_auto_converge: Option<bool>,
    /// Compare memory before the commit.
    x_verify: Option<bool>,
    /// Who finds zero pages; as `--zero-check`.
    x_zero_check: Option<String>,
    /// What provides RDMA; as `--rdma-provider`.
    x_rdma_provider: Option<String>,
    /// Register all memory at the start; also the capability `rdma-pin-all`.
    pub(crate) x_rdma_pin_all: Option<bool>,
    /// Bytes that are registered at a time.
    x_rdma_chunk_size: Option<u64>,
    /// Queue pairs.
    x_rdma_queues: Option<u64>,
}

/// A bound on the time until the guest is stopped for its switchover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WithinParameter {
    /// 0 lifts it.
    limit_ms: u64,
    #[serde(default)]
    then: ThenArg,
}

impl From<&TuningArgs> for Parameters {
    fn from(args: &TuningArgs) -> Parameters {
        Parameters {
            multifd_channels: args.channels.map(u64::from),
            // The least that can be said.
            x_downtime_limit_us: args.downtime_limit.map(|limit| whole_us(limit).max(1)),
            x_verify: Some(args.verify),
            x_zero_check: args.zero_check.as_ref().map(ToString::to_string),
            x_rdma_provider: args.rdma.rdma_provider.as_ref().map(ToString::to_string),
            x_rdma_pin_all: Some(args.rdma.rdma_pin_all),
            x_rdma_chunk_size: args.rdma.rdma_chunk.map(|bytes| bytes.0),
            x_rdma_queues: args.rdma.rdma_qps.map(u64::from),
            ..Parameters::default()
        }
    }
}

impl From<&MigrateArgs> for Parameters {
    fn from(args: &MigrateArgs) -> Parameters {
        let then = args.then;
        Parameters {
            max_bandwidth: args.bandwidth.map(|rate| rate.0),
            x_within: args.within.map(|limit| WithinParameter { limit_ms: whole_ms(limit), then }),
            // Who wants a guest slowed down only then wants it at full speed before.
            x_auto_converge: (then == ThenArg::Throttle).then_some(false),
            ..Parameters::from(&args.tuning)
        }
    }
}

impl From<&MigrateOptions> for Parameters {
    /// All of them, as `query-migrate-parameters` says them.
    fn from(options: &MigrateOptions) -> Parameters {
        let within = options.within.map_or_else(WithinParameter::none, |within| WithinParameter {
            limit_ms: whole_ms(within.limit),
            then: within.then.into(),
        });
        Parameters {
            multifd_channels: Some(options.channels.unwrap_or(0).into()),
            downtime_limit: Some(whole_ms(options.downtime_limit)),
            x_downtime_limit_us: Some(whole_us(options.downtime_limit)),
            max_bandwidth: Some(options.bandwidth.map_or(0, |rate| rate.0)),
            x_within: Some(within),
            x_auto_converge: Some(options.auto_converge),
            x_verify: Some(options.verify),
            x_zero_check: Some(options.zero_finders.name().to_owned()),
            x_rdma_provider: Some(options.rdma.provider.to_string()),
            x_rdma_pin_all: Some(options.rdma.pin_all),
            x_rdma_chunk_size: Some(options.rdma.chunk_bytes),
            x_rdma_queues: Some(options.rdma.queues.into()),
        }
    }
}

impl Parameters {
    /// Checks all of it, and opens what has to be opened. What it returns sets what is given, leaves
    /// the rest as it is, and can't fail.
    pub(crate) fn check(&self) -> Result<impl FnOnce(&mut MigrateOptions) + use<>, String> {
        let channels = self.multifd_channels.map(check_channels).transpose()?;
        let downtime_limit = match (self.downtime_limit, self.x_downtime_limit_us) {
            (Some(_), Some(_)) => {
                return Err("downtime-limit and x-downtime-limit-us exclude each other".into());
            }
            (Some(ms), None) => Some(Duration::from_millis(ms)),
            (None, us) => us.map(Duration::from_micros),
        };
        downtime_limit.map_or(Ok(()), check_downtime_limit)?;
        let bandwidth = match self.max_bandwidth {
            Some(0) => Some(None),
            Some(rate) => Some(Some(check_bandwidth(BytesPerSec(rate))?)),
            None => None,
        };
        let within = self.x_within.map(WithinParameter::check).transpose()?;
        let zero_finders = self.x_zero_check.as_deref().map(open_zero_check).transpose()?;
        let provider = self.x_rdma_provider.as_deref().map(str::parse).transpose();
        let provider = provider.map_err(|e: martlet_engine::Error| e.to_string())?;
        self.x_rdma_chunk_size.map_or(Ok(()), |bytes| check_rdma_chunk(ByteCount(bytes)))?;
        let queues = self.x_rdma_queues.map(check_queues).transpose()?;
        let Parameters { x_auto_converge, x_verify, x_rdma_pin_all, x_rdma_chunk_size, .. } = *self;
        Ok(move |options: &mut MigrateOptions| {
            set(&mut options.channels, channels);
            set(&mut options.downtime_limit, downtime_limit);
            set(&mut options.bandwidth, bandwidth);
            set(&mut options.within, within);
            set(&mut options.auto_converge, x_auto_converge);
            set(&mut options.verify, x_verify);
            set(&mut options.zero_finders, zero_finders);
            set(&mut options.rdma.provider, provider);
            set(&mut options.rdma.pin_all, x_rdma_pin_all);
            set(&mut options.rdma.chunk_bytes, x_rdma_chunk_size);
            set(&mut options.rdma.queues, queues);
        })
    }
}

impl WithinParameter {
    fn none() -> WithinParameter {
        WithinParameter { limit_ms: 0, then: ThenArg::default() }
    }

    fn check(self) -> Result<Option<Within>, String> {
        if self.limit_ms == 0 {
            return Ok(None);
        }
        let limit = Duration::from_millis(self.limit_ms);
        check_within(limit).map_err(|e| format!("x-within: {e}"))?;
        Ok(Some(Within { limit, then: self.then.into() }))
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn check_channels(channels: u64) -> Result<Option<u16>, String> {
    let count = u16::try_from(channels).ok().filter(|n| *n <= CHANNELS_MAX);
    let range = || format!("multifd-channels must be 1 to {CHANNELS_MAX}, or 0 for automatic");
    Ok(Some(count.ok_or_else(range)?).filter(|n| *n > 0))
}

fn check_queues(queues: u64) -> Result<u16, String> {
    let queues = u16::try_from(queues).ok().filter(|n| (1..=QUEUES_MAX).contains(n));
    queues.ok_or_else(|| format!("x-rdma-queues must be 1 to {QUEUES_MAX}"))
}

fn open_zero_check(text: &str) -> Result<Arc<dyn ZeroFinders>, String> {
    let arg: ZeroCheckArg = text.parse().map_err(|e| format!("x-zero-check: {e}"))?;
    arg.open()
}

/// Refuses chunks that the protocol does not have.
pub(crate) fn check_rdma_chunk(size: ByteCount) -> Result<(), String> {
    let allowed = 1 << 20..=1 << 30;
    if size.0.is_power_of_two() && allowed.contains(&size.0) {
        Ok(())
    } else {
        Err("an RDMA chunk is a power of two from 1M to 1G".to_owned())
    }
}

/// Refuses a limit so low that it is a slip of the unit.
pub(crate) fn check_bandwidth(rate: BytesPerSec) -> Result<BytesPerSec, String> {
    if rate < BANDWIDTH_MIN {
        return Err(format!(
            "a limit of {} bytes a second is refused: the least is {} (100 kbit/s)",
            rate.0, BANDWIDTH_MIN.0
        ));
    }
    Ok(rate)
}

/// Refuses a time in which nothing can be done, and one that is too long to be meant.
pub(crate) fn check_within(limit: Duration) -> Result<(), String> {
    if limit < WITHIN_MIN {
        return Err("no guest moves within less than 1ms".to_owned());
    }
    if limit > WITHIN_MAX {
        return Err("more than 30 days is refused".to_owned());
    }
    Ok(())
}

/// Refuses a limit that no migration can keep, and one that is too long to be meant.
pub(crate) fn check_downtime_limit(limit: Duration) -> Result<(), String> {
    if limit.is_zero() {
        return Err("a downtime limit of 0 can't be kept".to_owned());
    }
    if limit > DOWNTIME_LIMIT_MAX {
        return Err("a downtime limit above 1h is refused".to_owned());
    }
    Ok(())
}

/// Whole microseconds.
fn whole_us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Whole milliseconds, rounded up: nothing that took time took 0 ms.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::{CommandFactory, Parser};
    use serde_json::{Value, json};

    fn command_line(more: &str) -> Parameters {
        let words = ["martlet", "migrate", "--control", "c", "unix:/y"];
        let cli = Cli::try_parse_from(words.into_iter().chain(more.split_whitespace())).unwrap();
        let Command::Migrate(args) = cli.command else { panic!("{:?}", cli.command) };
        Parameters::from(&args)
    }

    fn as_set(parameters: &Parameters) -> MigrateOptions {
        let mut options = MigrateOptions::default();
        // As it goes over the control socket.
        let sent = serde_json::to_value(parameters).unwrap();
        serde_json::from_value::<Parameters>(sent).unwrap().check().unwrap()(&mut options);
        options
    }

    #[test]
    fn a_command_line_that_says_nothing_changes_no_default() {
        let (set, default) = (as_set(&command_line("")), MigrateOptions::default());
        assert_eq!(format!("{set:?}"), format!("{default:?}"));
    }

    /// What help says of defaults, for people.
    #[test]
    fn help_says_the_defaults() {
        let mut cli = Cli::command();
        let migrate = cli.find_subcommand_mut("migrate").unwrap();
        let help = migrate.render_long_help().to_string().replace('\n', " ");
        let default = MigrateOptions::default();
        let chunk = format!("{}M", default.rdma.chunk_bytes >> 20);
        let limit = format!("{:?}", default.downtime_limit);
        for said in [limit, chunk, default.rdma.queues.to_string()] {
            assert!(help.contains(&format!("Default: {said} ")), "{said}: {help}");
        }
    }

    #[test]
    fn what_the_command_line_says_arrives() {
        let all = "--channels 3 --downtime-limit 500us --bandwidth 1Gbit/s --within 9s \
                   --then throttle --verify --rdma-provider soft --rdma-pin-all --rdma-chunk 1M \
                   --rdma-qps 5";
        let set = as_set(&command_line(all));
        let told = serde_json::to_value(Parameters::from(&set)).unwrap();
        let expected = json!({
            "multifd-channels": 3,
            "downtime-limit": 1,
            "x-downtime-limit-us": 500,
            "max-bandwidth": 125_000_000,
            "x-within": {"limit-ms": 9000, "then": "throttle"},
            "x-auto-converge": false,
            "x-verify": true,
            "x-zero-check": MigrateOptions::default().zero_finders.name(),
            "x-rdma-provider": "soft",
            "x-rdma-pin-all": true,
            "x-rdma-chunk-size": 1 << 20,
            "x-rdma-queues": 5,
        });
        assert_eq!(told, expected);
    }

    #[test]
    fn a_wrong_parameter_changes_none() {
        let mut options = MigrateOptions::default();
        let set = |json: Value, options: &mut MigrateOptions| {
            serde_json::from_value::<Parameters>(json)
                .map_err(|e| e.to_string())
                .and_then(|set| set.check().map(|set| set(options)))
        };
        set(json!({"multifd-channels": 4, "max-bandwidth": 100_000}), &mut options).unwrap();
        assert_eq!((options.channels, options.bandwidth), (Some(4), Some(BytesPerSec(100_000))));
        for bad in [
            json!({"multifd-channels": 1, "downtime-limit": 0}),
            json!({"multifd-channels": 129}),
            json!({"x-verify": true, "max-bandwidth": 1}),
            json!({"x-within": {"limit-ms": 10, "then": "pray"}}),
            json!({"x-within": {"then": "stop"}}),
            json!({"x-within": {"limit-ms": u64::MAX}}),
            json!({"downtime-limit": 3_600_001}),
            json!({"downtime-limit": 5, "x-downtime-limit-us": 5000}),
            json!({"downtime-limit": -1}),
            json!({"downtime-limit": "1s"}),
            json!({"xbzrle-cache-size": 1}),
        ] {
            let before = options.clone();
            assert!(set(bad.clone(), &mut options).is_err(), "{bad}");
            assert_eq!(format!("{options:?}"), format!("{before:?}"), "{bad}");
        }
        set(json!({"multifd-channels": 0, "max-bandwidth": 0}), &mut options).unwrap();
        assert_eq!((options.channels, options.bandwidth), (None, None));
        set(json!({"x-within": {"limit-ms": 9000, "then": "stop"}}), &mut options).unwrap();
        set(json!({"x-within": {"limit-ms": 0}}), &mut options).unwrap();
        assert_eq!(options.within, None);
        set(json!({"x-downtime-limit-us": 500}), &mut options).unwrap();
        assert_eq!(options.downtime_limit, Duration::from_micros(500));
    }
}
