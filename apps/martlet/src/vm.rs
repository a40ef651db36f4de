//! Where the control socket's idea of a guest meets the machine and the engine.

use crate::cli::{AccelArg, HostArgs, ReceiveArgs, RunArgs, SerialArg, TrackingArg};
use crate::failure::{Failure, chain};
use crate::guest::{Attempt, Guest, Incoming, Listen};
use crate::log::note;
use crate::vdpa;
use martlet_engine::{
    DestinationFactory, Error, MigrateOptions, Migration, OperatorOverride, Progress, Provider,
    RdmaAccept, ReceiveOptions, ReceiveStatus, Receiver, Report, SourceVmm, Status,
};
use martlet_guest_program::{GuestCounters, ProgramParams};
use martlet_machine::{
    Accel, Boot, Factory, FactoryConfig, GuestStatus, KernelConfig, Machine, MachineConfig,
    MachineError, MachineInfo, SerialOut, Tracking, kvm_is_usable,
};
use martlet_transport::Address;
use martlet_units::{ByteCount, BytesPerSec, PAGE_SIZE};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Whether KVM can be used here; `Err` says why not, in a few words.
pub(crate) fn kvm_usable() -> Result<(), String> {
    kvm_is_usable().map_err(|error| chain(&error))
}

/// What `run` is asked to build, checked as far as that goes without building it.
pub(crate) fn run_config(args: &RunArgs) -> Result<MachineConfig, Failure> {
    let boot = match &args.kernel {
        Some(kernel) => Boot::Kernel(KernelConfig {
            kernel: kernel.clone(),
            initrd: args.initrd.clone(),
            cmdline: args.cmdline.clone().unwrap_or_default(),
        }),
        None => Boot::Program(program(args.program.as_deref(), args.memory)?),
    };
    let config = MachineConfig {
        memory: args.memory,
        vcpus: args.vcpus,
        accel: choose_accel(&args.host),
        tracking: tracking(&args.host),
        boot,
        serial: serial(&args.serial),
    };
    config.validate().map_err(|error| failure(&error))?;
    Ok(config)
}

/// The built-in guest's load as it is written on the command line; else the default one, with not
/// more than half of the memory filled.
pub(crate) fn program(text: Option<&str>, memory: ByteCount) -> Result<ProgramParams, Failure> {
    if let Some(text) = text {
        return text.parse().map_err(|e| Failure::Usage(format!("--program {text}: {e}")));
    }
    let default = ProgramParams::default();
    let half = ByteCount((memory.0 / 2).next_multiple_of(PAGE_SIZE));
    let fill = default.fill.min(half);
    Ok(ProgramParams { fill, working_set: default.working_set.min(fill), ..default })
}

/// Refuses a guest of the built-in program that can't be: too small, too large, too many vCPUs.
pub(crate) fn check_program(
    program: &ProgramParams,
    memory: ByteCount,
    vcpus: u16,
) -> Result<(), Failure> {
    let config = MachineConfig {
        memory,
        vcpus,
        accel: Accel::Threads,
        tracking: Tracking::Auto,
        boot: Boot::Program(program.clone()),
        serial: SerialOut::None,
    };
    config.validate().map_err(|error| failure(&error))
}

/// What executes the guest of a demo, for its processes: all of them the same.
pub(crate) fn settle_accel(arg: AccelArg) -> AccelArg {
    match arg {
        AccelArg::Auto if kvm_usable().is_err() => AccelArg::Threads,
        settled => settled,
    }
}

/// KVM if it can be used; otherwise threads, and a line that says so.
fn choose_accel(args: &HostArgs) -> Accel {
    match args.accel {
        AccelArg::Kvm => Accel::Kvm,
        AccelArg::Threads => Accel::Threads,
        AccelArg::Auto => match kvm_usable() {
            Ok(()) => Accel::Kvm,
            Err(reason) => {
                note(format_args!("no KVM, so vCPUs are threads of this process: {reason}"));
                Accel::Threads
            }
        },
    }
}

fn tracking(args: &HostArgs) -> Tracking {
    match args.dirty_tracking {
        TrackingArg::Auto => Tracking::Auto,
        TrackingArg::Log => Tracking::Log,
        TrackingArg::Ring => Tracking::Ring,
    }
}

fn serial(arg: &SerialArg) -> SerialOut {
    match arg {
        SerialArg::None => SerialOut::None,
        SerialArg::Stdio => SerialOut::Stdio,
        SerialArg::File(path) => SerialOut::File(path.clone()),
        SerialArg::Unix(path) => SerialOut::Unix(path.clone()),
    }
}

/// What can't be meant is the command line's fault; everything else is the host's.
fn failure(error: &MachineError) -> Failure {
    match error {
        MachineError::Config { reason } => Failure::Usage(reason.clone()),
        error => Failure::Failed(chain(error)),
    }
}

/// Builds the machine. Its guest is paused at its first instruction.
pub(crate) fn boot(config: &MachineConfig, args: &HostArgs) -> Result<Arc<dyn Guest>, Failure> {
    let cards = vdpa::open(args.vdpa.as_ref()).map_err(Failure::Failed)?;
    let machine = Machine::with_devices(config, cards).map_err(|error| failure(&error))?;
    Ok(Arc::new(MachineGuest(machine)))
}

/// What builds machines for guests that arrive.
pub(crate) fn listener(args: &ReceiveArgs) -> Result<Arc<dyn Listen>, Failure> {
    let accel = match args.host.accel {
        // A guest on threads would be a part of this process: not without being asked for.
        AccelArg::Auto | AccelArg::Kvm => Accel::Kvm,
        AccelArg::Threads => Accel::Threads,
    };
    let config =
        FactoryConfig { accel, tracking: tracking(&args.host), serial: serial(&args.serial) };
    let cards = vdpa::open(args.host.vdpa.as_ref()).map_err(Failure::Failed)?;
    let factory = Factory::with_devices(config, cards).map_err(|error| failure(&error))?;
    let rdma = RdmaAccept { provider: args.rdma_provider, ..RdmaAccept::default() };
    let own = ReceiveOptions::default();
    let memory_max = args.memory_max.unwrap_or(own.memory_max);
    let options = ReceiveOptions { rdma, memory_max };
    Ok(Arc::new(MachineListen { factory: Arc::new(factory), options }))
}

struct MachineGuest(Arc<Machine>);

impl Guest for MachineGuest {
    fn status(&self) -> GuestStatus {
        self.0.status()
    }

    fn stop(&self) -> Result<(), String> {
        self.0.pause_by_owner().map_err(|error| error.to_string())
    }

    fn cont(&self) -> Result<(), String> {
        self.0.continue_by_owner().map_err(|error| error.to_string())
    }

    fn reset(&self) -> Result<(), String> {
        self.0.reset_by_owner().map_err(|error| error.to_string())
    }

    fn press_power_button(&self) -> Result<(), String> {
        self.0.press_power_button().map_err(|error| error.to_string())
    }

    fn resets(&self) -> (u64, u64) {
        self.0.resets()
    }

    fn info(&self) -> MachineInfo {
        self.0.info()
    }

    fn check(&self) -> Option<GuestCounters> {
        self.0.guest_counters()
    }

    fn migrate(&self, to: &Address, options: MigrateOptions) -> io::Result<Arc<dyn Attempt>> {
        let vmm: Arc<dyn SourceVmm> = Arc::clone(&self.0) as _;
        Ok(Arc::new(EngineAttempt(Migration::start(vmm, to, options)?)))
    }

    fn quit(&self) {
        self.0.quit();
        let lost = self.0.serial_bytes_dropped();
        if lost > 0 {
            tracing::warn!(lost, "bytes of serial output could not be written at once");
        }
    }
}

struct EngineAttempt(Migration);

impl Attempt for EngineAttempt {
    fn progress(&self) -> Progress {
        self.0.progress()
    }

    fn wait(&self, timeout: Duration) -> Option<Report> {
        self.0.wait(timeout)
    }

    fn cancel(&self) {
        self.0.cancel();
    }

    fn guest_ended(&self, how: &str) {
        self.0.guest_ended(how);
    }

    fn set_downtime_limit(&self, limit: Duration) {
        self.0.set_downtime_limit(limit);
    }

    fn set_bandwidth(&self, bandwidth: Option<BytesPerSec>) {
        self.0.set_bandwidth(bandwidth);
    }

    fn resolve(&self) -> Result<Status, Error> {
        self.0.resolve()
    }

    fn override_undecided(&self, by: OperatorOverride) -> Result<Status, Error> {
        self.0.override_undecided(by)
    }
}

struct MachineListen {
    factory: Arc<Factory>,
    options: ReceiveOptions,
}

/// Settles what provides RDMA, and says so where it is not what one would hope for.
fn settle_rdma(accept: &RdmaAccept, address: &Address) -> io::Result<RdmaAccept> {
    let Address::Rdma { host, .. } = address else { return Ok(*accept) };
    let (provider, why) = accept.provider.settle(host).map_err(io::Error::other)?;
    if let (Provider::Soft, Some(why)) = (provider, why) {
        note(format_args!("no RDMA device for {host}, so RDMA goes over TCP, in software: {why}"));
    }
    Ok(RdmaAccept { provider, ..*accept })
}

impl Listen for MachineListen {
    fn listen(&self, address: &Address) -> io::Result<Arc<dyn Incoming>> {
        let factory: Arc<dyn DestinationFactory> = Arc::clone(&self.factory) as _;
        let rdma = settle_rdma(&self.options.rdma, address)?;
        let options = ReceiveOptions { rdma, ..self.options };
        let receiver = Receiver::start(address, factory, options)?;
        Ok(Arc::new(EngineIncoming { receiver, factory: Arc::clone(&self.factory) }))
    }
}

struct EngineIncoming {
    receiver: Receiver,
    factory: Arc<Factory>,
}

impl Incoming for EngineIncoming {
    fn address(&self) -> Address {
        self.receiver.address()
    }

    fn status(&self) -> ReceiveStatus {
        self.receiver.status()
    }

    fn failures(&self) -> (u64, Option<String>) {
        self.receiver.failures()
    }

    fn wait(&self, timeout: Duration) -> ReceiveStatus {
        self.receiver.wait(timeout)
    }

    fn stop(&self) {
        self.receiver.stop();
    }

    fn stop_unless_arrived(&self) {
        self.receiver.stop_unless_arrived();
    }

    fn guest(&self) -> Option<Arc<dyn Guest>> {
        let machine = self.factory.machine()?;
        Some(Arc::new(MachineGuest(machine)))
    }
}
