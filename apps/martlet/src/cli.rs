//! The command line: what may be written, and what is refused before anything is started.

mod measure;
mod vdpa;

pub(crate) use measure::{
    BenchCommand, BenchRdmaArgs, BenchVdpaArgs, BenchZeroCheckArgs, SimCommand, SimDsaArgs,
    TableArgs, ZeroMethodArg,
};
pub(crate) use vdpa::VdpaArg;

use crate::accelerator::ZeroCheckArg;
use crate::control::Verdict;
use crate::failure::EXIT_STATUS_HELP;
use crate::parameters::{
    CHANNELS_MAX, QUEUES_MAX, check_bandwidth, check_downtime_limit, check_rdma_chunk, check_within,
};
use clap::builder::RangedI64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use martlet_engine::{Provider, Then};
use martlet_machine::VCPUS_MAX;
use martlet_transport::Address;
use martlet_units::{ByteCount, BytesPerSec, parse_duration};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Most runs of a demo.
const RUNS_MAX: u32 = 100_000;

const START_HERE: &str = "\
Start here:
  martlet demo                 see a guest move between two processes of this host
  martlet COMMAND --help       options and examples of a command";

/// Live migration of KVM guests with the shortest blackout that the hardware allows.
#[derive(Debug, Parser)]
#[command(
    name = "martlet",
    version,
    after_help = format!("{START_HERE}\n\n{EXIT_STATUS_HELP}")
)]
pub(crate) struct Cli {
    /// What to log on stderr: error, warn, info, debug, trace, or a filter such as
    /// martlet_engine=debug. RUST_LOG says the same; this wins.
    #[arg(long, global = true, value_name = "FILTER")]
    pub(crate) log: Option<String>,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Boot a guest and serve its control socket.
    #[command(after_help = "\
Examples:
  martlet run --control /run/vm.sock --memory 1G
  martlet run --control /run/vm.sock --memory 4G --vcpus 2 --program fill=2G,ws=64M,rate=4/ms
  martlet run --control /run/vm.sock --memory 2G --vcpus 2 --kernel /boot/vmlinuz-6.12.0-amd64 \\
              --initrd initrd.img --cmdline console=ttyS0 --serial stdio

The control socket speaks QMP. The process stays until `quit`, SIGINT or SIGTERM; they wait for a
migration to be settled, and a second signal does not. SIGHUP is ignored.")]
    Run(RunArgs),
    /// Wait for a guest and become it.
    #[command(after_help = "\
Examples:
  martlet receive --control /run/vm2.sock --listen tcp:0.0.0.0:4444
  martlet receive --control /run/vm2.sock --listen unix:/run/migrate.sock
  martlet receive --control /run/vm2.sock --listen rdma:10.0.0.2:4444
  martlet receive --control /run/vm2.sock          then `migrate-incoming` over QMP

A failed attempt is reported on stderr and the next one is awaited.")]
    Receive(ReceiveArgs),
    /// Move the guest behind a control socket to where a `receive` listens.
    #[command(after_help = "\
Examples:
  martlet migrate --control /run/vm.sock tcp:host2:4444
  martlet migrate --control /run/vm.sock tcp:host2:4444 --downtime-limit 5ms --bandwidth 10Gbit/s
  martlet migrate --control /run/vm.sock tcp:host2:4444 --within 10m --then stop
  martlet migrate --control /run/vm.sock tcp:host2:4444 --json --svg switchover.svg
  martlet migrate --control /run/vm.sock tcp:host2:4444 --zero-check dsa:/dev/dsa/wq0.0
  martlet migrate --control /run/vm.sock rdma:host2:4444 --rdma-pin-all

Ctrl-C cancels: the guest goes on where it was. Exit status: 0 the guest moved, 1 it did not, 2 the
command line can't be meant, 3 cancelled, 4 undecided: see `martlet resolve --help`.")]
    Migrate(MigrateArgs),
    /// Show how a guest and its migration stand.
    #[command(after_help = "\
Examples:
  martlet status --control /run/vm.sock
  martlet status --control /run/vm.sock --json")]
    Status(StatusArgs),
    /// Cancel a running migration; the guest goes on where it was.
    #[command(after_help = "Example:\n  martlet cancel --control /run/vm.sock")]
    Cancel(ControlArgs),
    /// Pause the guest.
    #[command(after_help = "\
Example:
  martlet stop --control /run/vm.sock

A paused guest can be migrated, and stays paused.")]
    Stop(ControlArgs),
    /// Continue a paused guest.
    #[command(after_help = "Example:\n  martlet cont --control /run/vm.sock")]
    Cont(ControlArgs),
    /// Press the guest's power button.
    #[command(after_help = "\
Example:
  martlet powerdown --control /run/vm.sock

A kernel that listens to it turns itself off, and the process of `run` or `receive` ends. A guest
that does not is not changed, and the exit status is 1.")]
    Powerdown(ControlArgs),
    /// End the process behind a control socket, and its guest if that is still there.
    #[command(after_help = "\
Examples:
  martlet quit --control /run/vm.sock
  martlet quit --control /run/vm.sock --force

A migration that runs is cancelled first, and if it can't be any more, its end is waited for. While
it is undecided where the guest runs, only --force ends the process; without it the exit status is
4 then.")]
    Quit(QuitArgs),
    /// Settle a migration of which the commit was sent and no answer came, by asking the destination.
    #[command(after_help = "\
Example:
  martlet resolve --control /run/vm.sock

  martlet resolve --control /run/vm.sock --run-here      the destination's host is gone for good

The guest stays stopped here until the destination has answered: either it runs there, or it
never will and goes on here. It is asked again and again; this asks at once. The exit status is 0 if the guest moved, 1 if it is here, and 4 while
that is undecided or nobody answers for it. With --run-here or --give-up it is 0 if that was done,
and 3 if it was not confirmed.")]
    Resolve(ResolveArgs),
    /// Move a real guest between two processes of this host and show where the time went.
    #[command(after_help = "\
Examples:
  martlet demo
  martlet demo --memory 4G --vcpus 2 --channels 2
  martlet demo --runs 100 --json
  martlet demo --transport rdma
  martlet demo --vdpa model=mlx5,devices=4,queues=32
  martlet demo --runs 10 --verify            compare both sides' memory before each commit
  martlet demo --accel threads               without /dev/kvm")]
    Demo(DemoArgs),
    /// Measure one part of a migration by itself.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Ask a simulation what no single host can show.
    #[command(subcommand)]
    Sim(SimCommand),
}

/// What runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AccelArg {
    /// KVM if /dev/kvm can be used, else threads.
    Auto,
    /// KVM.
    Kvm,
    /// Threads of this process. Runs the built-in program only.
    Threads,
}

/// How dirty pages are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrackingArg {
    /// What suits the accelerator.
    Auto,
    /// KVM's dirty log.
    Log,
    /// KVM's dirty ring.
    Ring,
}

/// Where the guest's serial port goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SerialArg {
    /// Nowhere.
    None,
    /// This terminal.
    Stdio,
    /// A file or FIFO.
    File(PathBuf),
    /// A socket that one client may connect to.
    Unix(PathBuf),
}

impl FromStr for SerialArg {
    type Err = String;

    fn from_str(text: &str) -> Result<SerialArg, String> {
        let path = |p: &str| (!p.is_empty()).then(|| PathBuf::from(p));
        match text.split_once(':') {
            None if text == "stdio" => Some(SerialArg::Stdio),
            None if text == "none" => Some(SerialArg::None),
            Some(("file", p)) => path(p).map(SerialArg::File),
            Some(("unix", p)) => path(p).map(SerialArg::Unix),
            Some(_) | None => None,
        }
        .ok_or_else(|| "expected stdio, file:PATH, unix:PATH or none".to_owned())
    }
}

/// Options of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// Guest memory, 16M to 4T, e.g. 512M; a multiple of the page size.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: ByteCount,
    /// Number of vCPUs, 1 to 254.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::<u16>(VCPUS_MAX.into()))]
    pub(crate) vcpus: u16,
    /// The built-in guest and its load: how much memory it fills and checks, its working set,
    /// and the pages it dirties a millisecond. Default: fill=512M,ws=64M,rate=4/ms, with not more
    /// than half of the memory filled.
    #[arg(long, value_name = "fill=SIZE,ws=SIZE,rate=N/ms", conflicts_with = "kernel")]
    pub(crate) program: Option<String>,
    /// Boot this kernel instead: a PVH ELF or a bzImage.
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk of the kernel.
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    /// Command line of the kernel.
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub(crate) cmdline: Option<String>,
    /// Where the serial port goes: stdio, file:PATH (a file or a FIFO, no link),
    /// unix:PATH, none.
    #[arg(long, value_name = "WHERE", default_value = "none")]
    pub(crate) serial: SerialArg,
    /// Leave the guest paused until `cont`.
    #[arg(long)]
    pub(crate) paused: bool,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}

/// Options of `receive`.
#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// Where to wait for the guest: tcp:ADDR:PORT (port 0 lets the host choose), rdma:ADDR:PORT
    /// or unix:PATH. Without it, wait for `migrate-incoming` on the control socket.
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub(crate) listen: Option<Address>,
    /// What provides RDMA at rdma:ADDR:PORT: ibv (the kernel's verbs), soft (over TCP), or auto:
    /// ibv if a device has ADDR, else soft.
    #[arg(long, value_name = "NAME", default_value_t = Provider::Auto)]
    pub(crate) rdma_provider: Provider,
    /// Most memory that a guest may have, with what it boots from, which comes with it: its kernel
    /// and initrd, some MiB for the built-in guest. Default: what this host, or this
    /// process's control group, may have.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory_max: Option<ByteCount>,
    /// Where the serial port goes: stdio, file:PATH (a file or a FIFO, no link),
    /// unix:PATH, none.
    #[arg(long, value_name = "WHERE", default_value = "none")]
    pub(crate) serial: SerialArg,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}

/// How this host runs a guest.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// What runs the vCPUs. A guest on threads is a part of its process: `receive` takes one only
    /// with `threads`, over a Unix socket, and from the same user.
    #[arg(long, value_enum, default_value_t = AccelArg::Auto)]
    pub(crate) accel: AccelArg,
    /// How dirty pages are found.
    #[arg(long, value_enum, default_value_t = TrackingArg::Auto)]
    pub(crate) dirty_tracking: TrackingArg,
    /// vDPA network cards: model=mlx5 is martlet's mlx5 driver on a software card. At a
    /// destination, the cards that guests may have when they come.
    #[arg(long, value_name = "model=mlx5,devices=N,queues=N")]
    pub(crate) vdpa: Option<VdpaArg>,
    /// Ends this process when its parent, which must be this one, has died.
    #[arg(long, value_name = "PID", hide = true)]
    pub(crate) parent: Option<u32>,
}

/// Options of `migrate`.
#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// Where the destination listens: tcp:HOST:PORT, rdma:HOST:PORT or unix:PATH.
    #[arg(value_name = "ADDRESS", value_parser = address)]
    pub(crate) to: Address,
    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
    /// Limit of the pre-copy rounds, e.g. 10Gbit/s or 500MiB/s. The blackout has none.
    #[arg(long, value_name = "RATE", value_parser = bandwidth)]
    pub(crate) bandwidth: Option<BytesPerSec>,
    /// How long the guest may take until it is stopped for its switchover, up to 30 days, e.g. 10m.
    #[arg(long, value_name = "TIME", value_parser = within)]
    pub(crate) within: Option<Duration>,
    /// What is done when that has passed. With throttle, no time is taken from the guest before.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = ThenArg::Cancel, requires = "within")]
    pub(crate) then: ThenArg,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// What is done about a migration that takes too long.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ThenArg {
    /// Cancel it: the guest goes on where it was.
    #[default]
    Cancel,
    /// Take time from the guest until the rest fits the downtime limit.
    Throttle,
    /// Stop the guest for as long as the rest takes, whatever the downtime limit.
    Stop,
}

impl From<ThenArg> for Then {
    fn from(arg: ThenArg) -> Then {
        match arg {
            ThenArg::Cancel => Then::Cancel,
            ThenArg::Throttle => Then::Throttle,
            ThenArg::Stop => Then::Stop,
        }
    }
}

impl From<Then> for ThenArg {
    fn from(then: Then) -> ThenArg {
        match then {
            Then::Cancel => ThenArg::Cancel,
            Then::Throttle => ThenArg::Throttle,
            Then::Stop => ThenArg::Stop,
        }
    }
}

/// What a migration and a demo share.
#[derive(Clone, Debug, Args)]
pub(crate) struct TuningArgs {
    /// Data channels, 1 to 128. Default: what suits the cores of the source's host.
    #[arg(long, value_name = "N", value_parser = count::<u16>(CHANNELS_MAX.into()))]
    pub(crate) channels: Option<u16>,
    /// Longest blackout to accept, up to 1h. The guest is stopped when the predicted one fits.
    /// Default: 300ms.
    #[arg(long, value_name = "TIME", value_parser = downtime_limit)]
    pub(crate) downtime_limit: Option<Duration>,
    /// Compare both sides' memory before the commit. Lengthens the stop, so that no blackout is
    /// reported.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Who finds zero pages: cpu (the default), dsa:/dev/dsa/wqN.M[,...] (the CPU does what these
    /// don't take), dsa:model, or auto for what this host has.
    #[arg(long, value_name = "WHO")]
    pub(crate) zero_check: Option<ZeroCheckArg>,
    #[command(flatten)]
    pub(crate) rdma: RdmaArgs,
}

/// How guest memory goes to an address `rdma:`.
#[derive(Clone, Debug, Args)]
pub(crate) struct RdmaArgs {
    /// What provides RDMA: ibv, soft, or auto (the default) for what the destination has.
    #[arg(long, value_name = "NAME")]
    pub(crate) rdma_provider: Option<Provider>,
    /// Register all guest memory at the start on both sides, not as it is needed.
    #[arg(long)]
    pub(crate) rdma_pin_all: bool,
    /// What is registered at a time: a power of two from 1M to 1G. Default: 32M.
    #[arg(long, value_name = "SIZE", value_parser = rdma_chunk)]
    pub(crate) rdma_chunk: Option<ByteCount>,
    /// Queue pairs, 1 to 64; the destination may grant fewer. Default: 4.
    #[arg(long, value_name = "N", value_parser = count::<u16>(QUEUES_MAX.into()))]
    pub(crate) rdma_qps: Option<u16>,
}

/// How a result is shown.
#[derive(Clone, Debug, Args)]
pub(crate) struct OutputArgs {
    /// Print the result as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the switchover's timeline to this file as an SVG picture.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// Options of `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which guest.
#[derive(Clone, Debug, Args)]
pub(crate) struct ControlArgs {
    /// Control socket of the guest's process.
    #[arg(long = "control", value_name = "SOCK")]
    pub(crate) path: PathBuf,
}

/// Options of `quit`.
#[derive(Debug, Args)]
pub(crate) struct QuitArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// End it now, even if that may lose its guest.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Options of `resolve`.
#[derive(Debug, Args)]
pub(crate) struct ResolveArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// If the destination does not answer, run the guest here again. Only for a destination that
    /// is gone for good: two copies of the guest run if it is not.
    #[arg(long, group = "verdict")]
    pub(crate) run_here: bool,
    /// If the destination does not answer, never run the guest here again. Only if it runs there,
    /// or if nobody needs it any more.
    #[arg(long, group = "verdict")]
    pub(crate) give_up: bool,
    /// Say that what --run-here or --give-up needs is true, instead of being asked.
    #[arg(long, requires = "verdict")]
    pub(crate) confirmed: bool,
}

impl ResolveArgs {
    /// What is to be done without an answer.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        match (self.run_here, self.give_up) {
            (true, _) => Some(Verdict::RunHere),
            (_, true) => Some(Verdict::GiveUp),
            (false, false) => None,
        }
    }
}

/// How the two processes of a demo are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportArg {
    /// TCP over loopback.
    Tcp,
    /// A Unix socket.
    Unix,
    /// RDMA: a device that has the loopback address (there is none), else in software.
    Rdma,
}

/// Options of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Guest memory.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory)]
    pub(crate) memory: ByteCount,
    /// Number of vCPUs, 1 to 254.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::<u16>(VCPUS_MAX.into()))]
    pub(crate) vcpus: u16,
    /// The guest's load. Default: 512 MiB filled, but not more than half of the memory; in 64 MiB
    /// of it 4 pages rewritten a millisecond.
    #[arg(long, value_name = "fill=SIZE,ws=SIZE,rate=N/ms")]
    pub(crate) program: Option<String>,
    /// Move the guest this often, from process to process, and print medians and percentiles.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::<u32>(RUNS_MAX.into()))]
    pub(crate) runs: u32,
    /// How the two processes are connected.
    #[arg(long, value_enum, default_value_t = TransportArg::Tcp)]
    pub(crate) transport: TransportArg,
    /// What runs the vCPUs.
    #[arg(long, value_enum, default_value_t = AccelArg::Auto)]
    pub(crate) accel: AccelArg,
    /// How dirty pages are found.
    #[arg(long, value_enum, default_value_t = TrackingArg::Auto)]
    pub(crate) dirty_tracking: TrackingArg,
    /// Give the guest vDPA network cards, on which it sends itself numbered frames.
    #[arg(long, value_name = "model=mlx5,devices=N,queues=N")]
    pub(crate) vdpa: Option<VdpaArg>,
    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// A number from 1 to `max`.
fn count<T: Clone + Send + Sync + TryFrom<i64, Error: std::error::Error + Send + Sync>>(
    max: i64,
) -> RangedI64ValueParser<T> {
    RangedI64ValueParser::new().range(1..=max)
}

fn memory(text: &str) -> Result<ByteCount, String> {
    let size: ByteCount = text.parse().map_err(|e| format!("{e}"))?;
    if size.0 == 0 {
        return Err("a guest needs memory".to_owned());
    }
    if size.to_whole_pages().is_none() {
        return Err(format!("{} bytes is not a multiple of the page size, 4096", size.0));
    }
    Ok(size)
}

fn rdma_chunk(text: &str) -> Result<ByteCount, String> {
    let size: ByteCount = text.parse().map_err(|e| format!("{e}"))?;
    check_rdma_chunk(size)?;
    Ok(size)
}

fn address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|e: martlet_transport::ParseAddressError| e.to_string())
}

fn bandwidth(text: &str) -> Result<BytesPerSec, String> {
    let rate: BytesPerSec = text.parse().map_err(|e| format!("{e}"))?;
    if rate.0 == 0 { Err("nothing moves at a rate of 0".to_owned()) } else { check_bandwidth(rate) }
}

fn within(text: &str) -> Result<Duration, String> {
    let limit = parse_duration(text).map_err(|e| e.to_string())?;
    check_within(limit)?;
    Ok(limit)
}

fn downtime_limit(text: &str) -> Result<Duration, String> {
    let limit = parse_duration(text).map_err(|e| e.to_string())?;
    check_downtime_limit(limit)?;
    Ok(limit)
}

/// A clap error as one line, without its `error: `, usage and tips.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let paragraph: Vec<&str> =
        text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let line = paragraph.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example() {
        let cli = Cli::command();
        let leaves = cli.get_subcommands().flat_map(|command| {
            let below: Vec<_> = command.get_subcommands().collect();
            if below.is_empty() { vec![command] } else { below }
        });
        for command in leaves {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("martlet "), "{} has no example", command.get_name());
        }
    }

    #[test]
    fn serial_ports_go_somewhere_or_are_refused() {
        assert_eq!("stdio".parse(), Ok(SerialArg::Stdio));
        assert_eq!("file:/a:b".parse(), Ok(SerialArg::File("/a:b".into())));
        assert_eq!("unix:x".parse(), Ok(SerialArg::Unix("x".into())));
        for bad in ["", "file:", "tty", "tcp:1", "stdio:"] {
            assert!(bad.parse::<SerialArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn errors_take_one_line() {
        let error = Cli::try_parse_from(["martlet", "run"]).unwrap_err();
        let line = one_line(&error);
        assert!(!line.contains('\n') && line.contains("--control <SOCK>"), "{line}");
        assert!(!line.starts_with("error"), "{line}");
    }
}
