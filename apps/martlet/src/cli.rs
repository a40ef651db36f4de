//! The command line: what may be written, and what is refused before anything is started.

use crate::accelerator::ZeroCheckArg;
use clap::builder::RangedI64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use martlet_policy::admission::OffloadPolicy;
use martlet_transport::{Address, Provider, RdmaOptions};
use martlet_units::{ByteCount, BytesPerSec, parse_duration};
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Longest downtime limit that is accepted. A longer one is a slip of the unit.
pub(crate) const DOWNTIME_LIMIT_MAX: Duration = Duration::from_secs(3600);
/// Most data channels, as in `martlet_wire::control::CHANNELS_MAX`.
pub(crate) const CHANNELS_MAX: u16 = 128;
/// Most runs of a demo.
const RUNS_MAX: u32 = 100_000;

/// Live migration of KVM guests with the shortest blackout that the hardware allows.
#[derive(Debug, Parser)]
#[command(
    name = "martlet",
    version,
    max_term_width = 100,
    after_help = "\
Start here:
  martlet demo                 see a guest move between two processes of this host
  martlet COMMAND --help       options and examples of a command"
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
  martlet run --control /run/vm.sock --memory 2G --kernel vmlinux --cmdline console=ttyS0 \\
              --serial stdio

The control socket speaks QMP. The process stays until `quit`, SIGINT or SIGTERM.")]
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
  martlet migrate --control /run/vm.sock tcp:host2:4444 --json --svg switchover.svg
  martlet migrate --control /run/vm.sock tcp:host2:4444 --zero-check dsa:/dev/dsa/wq0.0
  martlet migrate --control /run/vm.sock rdma:host2:4444 --rdma-pin-all

Ctrl-C cancels: the guest goes on where it was. The exit status is 0 only if the guest moved.")]
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
    /// End the process behind a control socket, and its guest if that is still there.
    #[command(after_help = "Example:\n  martlet quit --control /run/vm.sock")]
    Quit(ControlArgs),
    /// Settle a migration whose connection broke at the commit, by asking the destination.
    #[command(after_help = "\
Example:
  martlet resolve --control /run/vm.sock

The guest stays stopped here until the destination has answered: either it runs there, or it
never will and goes on here.")]
    Resolve(ControlArgs),
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

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Write guest memory by RDMA: one write in flight in each chunk against many, all memory
    /// registered or not; on a modelled 100 Gbit/s NIC, and measured by what this host has.
    #[command(after_help = "\
Examples:
  martlet bench rdma
  martlet bench rdma --rdma-provider ibv --address 10.0.0.1 --json")]
    Rdma(BenchRdmaArgs),
    /// Suspend, resume and map vDPA cards: step by step as in the kernel's patch series, and all
    /// steps at once.
    #[command(after_help = "\
Examples:
  martlet bench vdpa
  martlet bench vdpa --devices 4 --queues 32 --memory 256G --svg vdpa.svg
  martlet bench vdpa --json

The driver is martlet's own; the card is a model with published latencies, in real time.")]
    Vdpa(BenchVdpaArgs),
    /// Look for zero pages by each method that this host has.
    #[command(after_help = "\
Examples:
  martlet bench zero-check
  martlet bench zero-check --method cpu --zero 0,50,90,100 --json")]
    ZeroCheck(BenchZeroCheckArgs),
}

/// What to simulate.
#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Many migrating VMs that share DSA devices: where offloading pays, and where it ends.
    #[command(after_help = "\
Examples:
  martlet sim dsa
  martlet sim dsa --vms 100 --channels 8 --devices 1 --zero 100 --policy block,adaptive
  martlet sim dsa --svg boundary.svg

Time is modelled; constants and their origin stand in docs/dsa.md.")]
    Dsa(SimDsaArgs),
}

/// How a table is shown.
#[derive(Clone, Debug, Args)]
pub(crate) struct TableArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the result to this file as an SVG picture.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// Options of `bench rdma`.
#[derive(Debug, Args)]
pub(crate) struct BenchRdmaArgs {
    /// What provides RDMA: ibv, soft, or auto: ibv if a device has the address.
    #[arg(long, value_name = "NAME", default_value_t = Provider::Auto)]
    pub(crate) rdma_provider: Provider,
    /// An address of this host, by which its two processes find each other.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
    /// Be the side that is written.
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
    #[command(flatten)]
    pub(crate) table: TableArgs,
}

/// Options of `bench vdpa`.
#[derive(Debug, Args)]
pub(crate) struct BenchVdpaArgs {
    /// Cards that suspend and resume together.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::<u16>(VDPA_DEVICES_MAX.into()))]
    pub(crate) devices: u16,
    /// Data queues of each card.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = queues)]
    pub(crate) queues: u16,
    /// Memory of the guest in the rows of a whole migration. It is mapped, not allocated.
    #[arg(long, value_name = "SIZE", default_value = "256G", value_parser = memory)]
    pub(crate) memory: ByteCount,
    #[command(flatten)]
    pub(crate) table: TableArgs,
}

/// Options of `bench zero-check`.
#[derive(Debug, Args)]
pub(crate) struct BenchZeroCheckArgs {
    /// Which methods.
    #[arg(long, value_enum, default_value_t = ZeroMethodArg::All)]
    pub(crate) method: ZeroMethodArg,
    /// Shares of zero pages, in per cent.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "0,50,90,100", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) zero: Vec<u8>,
    #[command(flatten)]
    pub(crate) table: TableArgs,
}

/// How zero pages are looked for in a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ZeroMethodArg {
    /// Everything that this host has, and the model.
    All,
    /// The processor's instructions, each width.
    Cpu,
    /// DSA work queues of this host, and the model.
    Dsa,
}

/// Options of `sim dsa`.
#[derive(Debug, Args)]
pub(crate) struct SimDsaArgs {
    /// Migrating VMs.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,10,100", value_parser = count::<u32>(1000))]
    pub(crate) vms: Vec<u32>,
    /// Channels of each migration.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8", value_parser = count::<u32>(64))]
    pub(crate) channels: Vec<u32>,
    /// DSA devices of the host.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8", value_parser = count::<u32>(16))]
    pub(crate) devices: Vec<u32>,
    /// Shares of zero pages, in per cent.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "0,50,90,100", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) zero: Vec<u8>,
    /// Who checks a page. Default: all policies.
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', value_parser = offload_policy)]
    pub(crate) policy: Vec<OffloadPolicy>,
    #[command(flatten)]
    pub(crate) table: TableArgs,
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

/// Which vDPA network cards a guest gets: `model=mlx5,devices=4,queues=32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VdpaArg {
    /// Who plays the hardware.
    pub(crate) model: VdpaModel,
    /// Cards, 1 to [`VDPA_DEVICES_MAX`].
    pub(crate) devices: u16,
    /// Data queues of each card, an even number from 2 to [`VDPA_QUEUES_MAX`].
    pub(crate) queues: u16,
    /// How long the modelled firmware takes.
    pub(crate) latency: VdpaLatency,
}

/// Most cards of a guest.
pub(crate) const VDPA_DEVICES_MAX: u16 = 8;
/// Most data queues of a card.
pub(crate) const VDPA_QUEUES_MAX: u16 = 64;

/// Who plays the hardware of a vDPA card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VdpaModel {
    /// The software mlx5.
    Mlx5,
}

/// How long a modelled firmware takes for its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VdpaLatency {
    /// As published for a ConnectX-6 Dx.
    Real,
    /// No time.
    None,
}

impl FromStr for VdpaArg {
    type Err = String;

    fn from_str(text: &str) -> Result<VdpaArg, String> {
        let mut arg =
            VdpaArg { model: VdpaModel::Mlx5, devices: 1, queues: 2, latency: VdpaLatency::Real };
        let mut seen = Vec::new();
        for item in text.split(',') {
            let (key, value) = item.split_once('=').unwrap_or((item, ""));
            if seen.contains(&key) {
                return Err(format!("`{key}` is given twice"));
            }
            match (key, value) {
                ("model", "mlx5") => arg.model = VdpaModel::Mlx5,
                ("model", other) => {
                    return Err(format!("there is no model `{other}`; there is mlx5"));
                }
                ("devices", count) => arg.devices = vdpa_count(key, count, VDPA_DEVICES_MAX)?,
                ("queues", count) => arg.queues = vdpa_count(key, count, VDPA_QUEUES_MAX)?,
                ("latency", "real") => arg.latency = VdpaLatency::Real,
                ("latency", "none") => arg.latency = VdpaLatency::None,
                ("latency", _) => return Err("latency is real or none".to_owned()),
                _ => {
                    return Err(format!(
                        "`{item}` is none of model=mlx5, devices=N, queues=N, latency=real|none"
                    ));
                }
            }
            seen.push(key);
        }
        if !seen.contains(&"model") {
            return Err("say who plays the hardware: model=mlx5".to_owned());
        }
        if !arg.queues.is_multiple_of(2) {
            return Err(format!("{} queues: a card has them in pairs", arg.queues));
        }
        Ok(arg)
    }
}

impl std::fmt::Display for VdpaArg {
    /// As it is read.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let model = match self.model {
            VdpaModel::Mlx5 => "mlx5",
        };
        let latency = match self.latency {
            VdpaLatency::Real => "real",
            VdpaLatency::None => "none",
        };
        let VdpaArg { devices, queues, .. } = self;
        write!(f, "model={model},devices={devices},queues={queues},latency={latency}")
    }
}

fn vdpa_count(key: &str, text: &str, max: u16) -> Result<u16, String> {
    match text.parse() {
        Ok(count) if (1..=max).contains(&count) => Ok(count),
        Ok(_) | Err(_) => Err(format!("{key}: `{text}` is not a number from 1 to {max}")),
    }
}

/// Options of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) control: ControlArgs,
    /// Guest memory, e.g. 512M or 4G; a multiple of the page size.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: ByteCount,
    /// Number of vCPUs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = vcpus)]
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
    /// Where the serial port goes: stdio, file:PATH (may be a FIFO), unix:PATH, none.
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
    /// Where the serial port goes: stdio, file:PATH (may be a FIFO), unix:PATH, none.
    #[arg(long, value_name = "WHERE", default_value = "none")]
    pub(crate) serial: SerialArg,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}

/// How this host runs a guest.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// What runs the vCPUs.
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
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// What a migration and a demo share.
#[derive(Clone, Debug, Args)]
pub(crate) struct TuningArgs {
    /// Data channels, 1 to 128. Default: what suits the cores of the source's host.
    #[arg(long, value_name = "N", value_parser = count::<u16>(CHANNELS_MAX.into()))]
    pub(crate) channels: Option<u16>,
    /// Longest blackout to accept, up to 1h. The guest is stopped when the predicted one fits.
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = downtime_limit)]
    pub(crate) downtime_limit: Duration,
    /// Compare both sides' memory before the commit. Lengthens the stop, so that no blackout is
    /// reported.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Who finds zero pages: cpu, dsa:/dev/dsa/wqN.M[,...] (the CPU does what these don't take),
    /// dsa:model, or auto for what this host has.
    #[arg(long, value_name = "WHO", default_value = "cpu")]
    pub(crate) zero_check: ZeroCheckArg,
    #[command(flatten)]
    pub(crate) rdma: RdmaArgs,
}

/// How guest memory goes to an address `rdma:`.
#[derive(Clone, Debug, Args)]
pub(crate) struct RdmaArgs {
    /// What provides RDMA: ibv, soft, or auto for what the destination has.
    #[arg(long, value_name = "NAME", default_value_t = Provider::Auto)]
    pub(crate) rdma_provider: Provider,
    /// Register all guest memory at the start on both sides, not as it is needed.
    #[arg(long)]
    pub(crate) rdma_pin_all: bool,
    /// What is registered at a time: a power of two from 1M to 1G.
    #[arg(long, value_name = "SIZE", default_value = "32M", value_parser = rdma_chunk)]
    pub(crate) rdma_chunk: ByteCount,
    /// Queue pairs, 1 to 64; the destination may grant fewer.
    #[arg(long, value_name = "N", default_value_t = RdmaOptions::default().queues, value_parser = count::<u16>(QUEUES_MAX.into()))]
    pub(crate) rdma_qps: u16,
}

/// Most queue pairs, as in `martlet_wire::rdma::QUEUES_MAX`.
pub(crate) const QUEUES_MAX: u16 = 64;

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
    /// Number of vCPUs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = vcpus)]
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

fn queues(text: &str) -> Result<u16, String> {
    let queues = vdpa_count("queues", text, VDPA_QUEUES_MAX)?;
    if queues.is_multiple_of(2) {
        Ok(queues)
    } else {
        Err(format!("{queues} queues: a card has them in pairs"))
    }
}

fn offload_policy(text: &str) -> Result<OffloadPolicy, String> {
    OffloadPolicy::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = OffloadPolicy::ALL.iter().map(|policy| policy.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
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

/// Refuses chunks that the protocol does not have.
pub(crate) fn check_rdma_chunk(size: ByteCount) -> Result<(), String> {
    let allowed = 1 << 20..=1 << 30;
    if size.0.is_power_of_two() && allowed.contains(&size.0) {
        Ok(())
    } else {
        Err("an RDMA chunk is a power of two from 1M to 1G".to_owned())
    }
}

fn vcpus(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) => Err("a guest needs a vCPU".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("expected a number up to 65535".to_owned()),
    }
}

fn address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|e: martlet_transport::ParseAddressError| e.to_string())
}

fn bandwidth(text: &str) -> Result<BytesPerSec, String> {
    let rate: BytesPerSec = text.parse().map_err(|e| format!("{e}"))?;
    if rate.0 == 0 { Err("nothing moves at a rate of 0".to_owned()) } else { Ok(rate) }
}

fn downtime_limit(text: &str) -> Result<Duration, String> {
    let limit = parse_duration(text).map_err(|e| e.to_string())?;
    check_downtime_limit(limit)?;
    Ok(limit)
}

/// Refuses a limit that no migration can keep, and one above [`DOWNTIME_LIMIT_MAX`].
pub(crate) fn check_downtime_limit(limit: Duration) -> Result<(), String> {
    if limit.is_zero() {
        return Err("a downtime limit of 0 can't be kept".to_owned());
    }
    if limit > DOWNTIME_LIMIT_MAX {
        return Err("a downtime limit above 1h is refused".to_owned());
    }
    Ok(())
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
    fn cards_are_read_as_they_are_written() {
        let text = "model=mlx5,devices=4,queues=32";
        let arg: VdpaArg = text.parse().unwrap();
        assert_eq!((arg.devices, arg.queues, arg.latency), (4, 32, VdpaLatency::Real));
        assert_eq!(arg.to_string().parse(), Ok(arg));
        for (bad, part) in [
            ("", "none of"),
            ("devices=4", "model=mlx5"),
            ("model=e1000", "no model `e1000`"),
            ("model=mlx5,queues=3", "in pairs"),
            ("model=mlx5,queues=66", "1 to 64"),
            ("model=mlx5,devices=0", "1 to 8"),
            ("model=mlx5,devices=1,devices=2", "twice"),
            ("model=mlx5,latency=low", "real or none"),
        ] {
            let error = bad.parse::<VdpaArg>().unwrap_err();
            assert!(error.contains(part), "{bad}: {error}");
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
