//! `bench` and `sim`.

use super::vdpa::{VDPA_DEVICES_MAX, vdpa_queues};
use super::{count, memory};
use clap::{Args, Subcommand, ValueEnum};
use martlet_engine::Provider;
use martlet_policy::admission::OffloadPolicy;
use martlet_units::ByteCount;
use std::net::IpAddr;
use std::path::PathBuf;

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
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = vdpa_queues)]
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

fn offload_policy(text: &str) -> Result<OffloadPolicy, String> {
    OffloadPolicy::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = OffloadPolicy::ALL.iter().map(|policy| policy.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
}
