//! A machine: memory, vCPUs and devices under one roof, and the order in which they are used.

use crate::boot;
#[cfg(not(feature = "threads"))]
use crate::config::NO_THREADS;
use crate::config::{Accel, Boot, MachineConfig, Tracking};
use crate::devices::board::SCI_LINE;
use crate::devices::virtio::{Devices, Lease, Nics, SavedNic};
use crate::devices::{Bus, Endpoint, PulseIrq, SavedSerial};
use crate::kvm::{self, BuildOptions};
use crate::memory::GuestMemory;
use crate::phase::{Event, Phase};
use crate::power_on;
use crate::reset::{Resets, Wish};
use crate::saved::{Description, PowerOnKind, SavedMachine};
use crate::vcpu::backend::{BackendError, Built, VmBackend, check_wanted};
use crate::vcpu::{Group, lock};
use crate::{MachineError, SerialOut};
use martlet_engine::RunState::{self, Paused, Running};
use martlet_guest_program::{GuestCounters, read_counters};
use martlet_protocol::RunPermit;
use martlet_ram::GuestRam;
use martlet_units::{Gpa, Instant, PageCount, PageRange};
use martlet_vdpa::VdpaDevice;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::Waker;

/// Why a guest stopped for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndCause {
    /// It asked to be reset, and what it boots from is not here: it came from an older martlet.
    Reset,
    /// It shut itself down.
    Shutdown,
    /// It could not go on; why, in one line.
    Crash(String),
}

impl std::fmt::Display for EndCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EndCause::Reset => {
                f.write_str("it asked to be reset, and what it boots from is not at this host")
            }
            EndCause::Shutdown => f.write_str("it shut itself down"),
            EndCause::Crash(reason) => f.write_str(reason),
        }
    }
}

/// How a guest stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestStatus {
    /// A destination whose guest has not arrived.
    Waiting,
    /// vCPUs run.
    Running,
    /// Paused by its owner.
    Paused,
    /// Stopped for a switchover that is not decided yet.
    Switchover,
    /// It stopped for good.
    Ended(EndCause),
    /// It was moved away, or the machine was quit.
    Gone,
}

/// What a machine is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineInfo {
    /// What executes the guest.
    pub accel: Accel,
    /// How its dirty pages are found, for people.
    pub tracking: &'static str,
    /// All memory.
    pub memory: PageCount,
    /// vCPUs.
    pub vcpus: u16,
}

/// Why an owner's wish could not be met now. One line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {wish}: the guest {state}")]
pub struct OwnerError {
    wish: &'static str,
    state: String,
}

/// One machine with one guest, or waiting for one. Implements the engine's `SourceVmm` and
/// `DestinationVmm`. Its owner may ask and order at any time, from any thread; an order that does
/// not fit to what the engine is doing is refused.
pub struct Machine {
    // Before the memory and the devices: its drop ends the threads that use them.
    pub(crate) group: Group,
    pub(crate) vm: Arc<dyn VmBackend>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) nics: Arc<Nics>,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) control: Mutex<Control>,
    pub(crate) resets: Resets,
    /// Itself, for threads that finish what nobody waits for.
    me: OnceLock<Weak<Machine>>,
}

/// What changes of a machine. The lock is held while orders are given and waited for: a fraction
/// of a millisecond.
pub(crate) struct Control {
    pub(crate) phase: Phase,
    /// The permit of a guest that is paused by its owner.
    pub(crate) permit: Option<RunPermit>,
    /// vCPUs were told to save themselves and nobody has collected that yet.
    pub(crate) is_saving: bool,
    /// What was read for a state while they save themselves.
    pub(crate) early: Option<Early>,
    /// A stop that has yet to begin, and who waits for it: the guest is reset first.
    pub(crate) stop_wanted: Option<Waker>,
    /// The stop that the vCPUs were told is not wanted any more: they go on when all are out.
    pub(crate) is_withdrawn: bool,
}

/// What of a state is not the vCPUs'.
pub(crate) struct Early {
    vm: Result<Vec<u8>, String>,
    nics: Result<Vec<SavedNic>, String>,
}

impl Control {
    /// Moves to the next phase, or says why the wish can't be met.
    pub(crate) fn step(&mut self, wish: &'static str, event: Event) -> Result<Phase, OwnerError> {
        let was = self.phase;
        let next = was.next(event);
        let state = was.describe().to_owned();
        self.phase = next.ok_or(OwnerError { wish, state })?;
        Ok(was)
    }
}

impl Machine {
    /// Makes a machine with a new guest, which is paused at its first instruction:
    /// [`Machine::continue_by_owner`] starts it.
    pub fn new(config: &MachineConfig) -> Result<Arc<Machine>, MachineError> {
        Machine::with_devices(config, Vec::new())
    }

    /// As [`Machine::new`], with a network card for each of these devices, at most 8. Nobody else
    /// uses the devices while the machine lives; its end resets them.
    pub fn with_devices(
        config: &MachineConfig,
        devices: Vec<Arc<dyn VdpaDevice>>,
    ) -> Result<Arc<Machine>, MachineError> {
        config.validate()?;
        let lease = Devices::new(devices).lend().expect("nobody else has them");
        let endpoint = open_endpoint(&config.serial)?;
        let mut layout = config.layout();
        let image = power_on::image_range(config, &layout);
        layout.extend(image);
        let parts = Parts {
            accel: config.accel,
            tracking: config.tracking,
            vcpus: config.vcpus,
            layout: &layout,
            has_image: image.is_some(),
            description: None,
            is_wanted: &|| true,
        };
        let (memory, built) = build(&parts)?;
        let nics = Nics::new(lease, &memory)?;
        let starts = boot::prepare(config, &memory, &*built.vm, &nics.places())?;
        let prepare = move |number: usize, vcpu: &mut dyn crate::vcpu::backend::VcpuBackend| {
            starts.get(number).map_or(Ok(()), |start| vcpu.set_start(start))
        };
        let machine = Machine::assemble(memory, built, nics, Arc::clone(&endpoint), prepare)?;
        let machine = machine.shared();
        machine
            .keep_power_on()
            .map_err(|reason| MachineError::Host { reason: format!("save its start: {reason}") })?;
        machine.serve_resets();
        {
            let mut control = lock(&machine.control);
            control.permit = Some(RunPermit::for_new_guest());
            control.phase = Phase::Here(Paused);
        }
        // A kernel that can't go on wants to be booted again, by the oldest way there is; of the
        // built-in program that is a fault to be seen.
        if matches!(config.boot, Boot::Kernel(_)) {
            machine.group.reset_at_triple_fault();
        }
        endpoint.attach(&machine.bus);
        Ok(machine)
    }

    /// Makes a machine that waits for the guest of this description; an error when it finds,
    /// between two steps, that nobody wants it any more.
    pub(crate) fn waiting(
        description: &Description,
        tracking: Tracking,
        endpoint: Arc<Endpoint>,
        devices: Lease,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Machine, MachineError> {
        let parts = Parts {
            accel: description.accel,
            tracking,
            vcpus: description.vcpus,
            layout: &description.memory,
            has_image: description.power_on.is_some(),
            description: Some(&description.backend),
            is_wanted,
        };
        let (memory, built) = build(&parts)?;
        let nics = Nics::waiting(devices, &memory, &description.nics)?;
        check_wanted(is_wanted)?;
        let machine = Machine::assemble(memory, built, nics, endpoint, |_, vcpu| vcpu.warm_up())?;
        if description.power_on == Some(PowerOnKind::Kernel) {
            machine.group.reset_at_triple_fault();
        }
        Ok(machine)
    }

    /// Shares it, as its own threads may.
    pub(crate) fn shared(self) -> Arc<Machine> {
        let machine = Arc::new(self);
        let _ = machine.me.set(Arc::downgrade(&machine));
        machine
    }

    /// Does what may take long on a thread of its own; at once if there is none.
    pub(crate) fn aside(&self, name: &str, work: impl FnOnce(&Machine) + Send + 'static) {
        let Some(machine) = self.me.get().and_then(Weak::upgrade) else { return work(self) };
        let work = Arc::new(Mutex::new(Some(work)));
        let theirs = Arc::clone(&work);
        let body = move || {
            let work = lock(&theirs).take();
            work.into_iter().for_each(|work| work(&machine));
        };
        if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(body) {
            tracing::warn!(%error, name, "there is no thread for it");
            let work = lock(&work).take();
            work.into_iter().for_each(|work| work(self));
        }
    }

    fn assemble(
        memory: Arc<GuestMemory>,
        built: Built,
        nics: Nics,
        endpoint: Arc<Endpoint>,
        prepare: impl Fn(usize, &mut dyn crate::vcpu::backend::VcpuBackend) -> Result<(), BackendError>
        + Send
        + Sync
        + 'static,
    ) -> Result<Machine, MachineError> {
        let bus = Arc::new(Bus::new(Arc::clone(&endpoint)));
        let vm = built.vm;
        let irqs = Arc::downgrade(&vm);
        let set_irq = move |line, is_high| {
            if let Some(vm) = irqs.upgrade() {
                vm.set_irq(line, is_high);
            }
        };
        let set_sci = set_irq.clone();
        let sci = Arc::new(move |is_high| set_sci(SCI_LINE, is_high));
        let pulse: PulseIrq = Arc::new(move |line| {
            set_irq(line, true);
            set_irq(line, false);
        });
        let nics = Arc::new(nics);
        nics.connect(&pulse);
        bus.connect(pulse, sci);
        bus.plug(Arc::clone(&nics));
        let group = Group::start(built.vcpus, Arc::clone(&bus), prepare)?;
        let control = Control {
            phase: Phase::Waiting,
            permit: None,
            is_saving: false,
            early: None,
            stop_wanted: None,
            is_withdrawn: false,
        };
        let (control, resets) = (Mutex::new(control), Resets::default());
        let me = OnceLock::new();
        Ok(Machine { group, vm, memory, bus, nics, endpoint, control, resets, me })
    }

    /// How the guest stands.
    pub fn status(&self) -> GuestStatus {
        let phase = lock(&self.control).phase;
        match (phase, self.ended()) {
            (Phase::Gone, _) => GuestStatus::Gone,
            (_, Some(cause)) => GuestStatus::Ended(cause),
            (Phase::Waiting, None) => GuestStatus::Waiting,
            (Phase::Here(Running) | Phase::Resetting(Running), None) => GuestStatus::Running,
            (Phase::Here(Paused) | Phase::Resetting(Paused), None) => GuestStatus::Paused,
            (Phase::Stopping(_) | Phase::Switchover(_), None) => GuestStatus::Switchover,
        }
    }

    /// What the machine is made of.
    pub fn info(&self) -> MachineInfo {
        MachineInfo {
            accel: self.vm.accel(),
            tracking: self.vm.tracking_name(),
            memory: PageCount(self.memory.guest().iter().map(|region| region.pages()).sum()),
            vcpus: u16::try_from(self.group.len()).expect("checked when it was made"),
        }
    }

    /// Pauses the guest until it is continued; returns when no vCPU runs and no device that can be
    /// suspended moves frames. Allowed during a migration's rounds: the guest then arrives paused.
    /// Paused already is fine.
    pub fn pause_by_owner(&self) -> Result<(), OwnerError> {
        let mut control = self.owner("pause it")?;
        let was = control.step("pause it", Event::Pause)?;
        if matches!(was, Phase::Here(Running) | Phase::Resetting(Running)) {
            self.nics.set_paused(true);
        }
        if was == Phase::Here(Running) {
            self.group.begin_leave();
            control.permit = self.group.wait_out();
        }
        Ok(())
    }

    /// Lets a paused guest go on. Running already is fine.
    pub fn continue_by_owner(&self) -> Result<(), OwnerError> {
        let mut control = self.owner("continue it")?;
        let was = control.step("continue it", Event::Continue)?;
        if was == Phase::Here(Paused) {
            let permit = control.permit.take().expect("a paused guest's permit is here");
            self.run(permit);
        }
        if matches!(was, Phase::Here(Paused) | Phase::Resetting(Paused)) {
            self.nics.set_paused(false);
        }
        Ok(())
    }

    /// Boots the guest again, as its own wish to be reset does, and lets it run or stay paused as
    /// it was. Allowed during a migration's rounds. Returns when that is done: memory is cleared,
    /// which takes a second for some GiB; at once if one is under way. A guest that came from an older martlet has nothing to
    /// boot from here.
    pub fn reset_by_owner(&self) -> Result<(), OwnerError> {
        const WISH: &str = "reset it";
        let control = self.owner(WISH)?;
        let state = match control.phase {
            Phase::Here(_) if self.can_reset() => {
                self.reset(control, Wish::Owner);
                return Ok(());
            }
            Phase::Resetting(_) => return Ok(()),
            Phase::Here(_) => "came from an older martlet, which kept what it boots from",
            phase => phase.describe(),
        };
        Err(OwnerError { wish: WISH, state: state.to_owned() })
    }

    /// Presses the guest's power button, upon which a kernel turns itself off, if it wants to. A
    /// guest that does not listen to it is told so.
    pub fn press_power_button(&self) -> Result<(), OwnerError> {
        const WISH: &str = "press its power button";
        let control = self.owner(WISH)?;
        let state = match control.phase {
            Phase::Here(_) if self.bus.press_power_button() => return Ok(()),
            Phase::Here(_) => "does not listen to it",
            phase => phase.describe(),
        };
        Err(OwnerError { wish: WISH, state: state.to_owned() })
    }

    /// How often the guest was reset here: by itself, and by its owner.
    pub fn resets(&self) -> (u64, u64) {
        self.resets.get()
    }

    /// Ends the vCPUs; the guest never runs again here. Any number of times.
    pub fn quit(&self) {
        let mut control = lock(&self.control);
        // A switchover in progress finds its machine gone; its saves are waited for.
        self.forget_saves(&mut control);
        control.step("quit", Event::Quit).expect("quitting is always possible");
        control.permit = None;
        self.group.end();
        self.endpoint.detach();
        drop(control);
        self.nics.shut_down();
    }

    /// What the guest says of itself, if it is the built-in program. Any time.
    pub fn guest_counters(&self) -> Option<GuestCounters> {
        read_counters(|gpa: Gpa, bytes: &mut [u8]| self.memory.read(gpa, bytes))
    }

    /// The last sign of life, on `CLOCK_MONOTONIC`: a byte to the debug or the serial port.
    pub fn last_heartbeat(&self) -> Option<Instant> {
        self.bus.heartbeat().last()
    }

    /// The first sign of life in this process.
    pub fn first_heartbeat(&self) -> Option<Instant> {
        self.bus.heartbeat().first()
    }

    /// Bytes of serial output that could not be written at once and are lost.
    pub fn serial_bytes_dropped(&self) -> u64 {
        self.endpoint.dropped()
    }

    fn owner(&self, wish: &'static str) -> Result<MutexGuard<'_, Control>, OwnerError> {
        let control = lock(&self.control);
        match self.ended() {
            Some(cause) => Err(OwnerError { wish, state: format!("has ended ({cause})") }),
            None => Ok(control),
        }
    }

    pub(crate) fn description(&self) -> Description {
        let info = self.info();
        Description {
            accel: info.accel,
            vcpus: info.vcpus,
            memory: self.memory.ram().layout(),
            backend: self.vm.description(),
            nics: self.nics.kinds(),
            power_on: self.can_reset().then(|| {
                let is_kernel = self.group.resets_at_triple_fault();
                if is_kernel { PowerOnKind::Kernel } else { PowerOnKind::Program }
            }),
        }
    }

    /// Lets the guest go on as the engine or the owner left it.
    pub(crate) fn go_on(&self, control: &mut Control, permit: RunPermit, state: RunState) {
        match state {
            Running => self.run(permit),
            Paused => control.permit = Some(permit),
        }
    }

    fn run(&self, permit: RunPermit) {
        self.vm.begin_run();
        self.group.run(permit);
    }

    /// Collects what the vCPUs saved and adds the rest. In a rehearsal devices go on meanwhile.
    pub(crate) fn collect(
        &self,
        control: &mut Control,
        is_rehearsal: bool,
    ) -> Result<SavedMachine, String> {
        // Read while the vCPUs still save theirs.
        let early = control.early.take().unwrap_or_else(|| self.collect_early(is_rehearsal));
        let Early { vm, nics } = early;
        control.is_saving = false;
        let vcpus = self.group.wait_saved();
        let vcpus = vcpus.map_err(|(number, error)| format!("vCPU {number}: {error}"))?;
        let serial: SavedSerial = self.bus.save_serial();
        let nics = Some(nics?).filter(|nics| !nics.is_empty());
        let vcpus = vcpus.into_iter().map(Into::into).collect();
        let board = Some(self.bus.save_board());
        Ok(SavedMachine { vcpus, vm: vm?, serial, nics, board })
    }

    /// What can be read while the vCPUs save themselves.
    pub(crate) fn collect_early(&self, is_rehearsal: bool) -> Early {
        let vm = self.vm.save().map_err(|error| error.to_string());
        Early { vm, nics: self.nics.save(is_rehearsal) }
    }

    /// Waits for saves that nobody wants, so that the next order finds all vCPUs idle.
    pub(crate) fn forget_saves(&self, control: &mut Control) {
        control.early = None;
        if std::mem::take(&mut control.is_saving) {
            let _ = self.group.wait_saved();
        }
    }
}

/// What a backend is built from.
struct Parts<'a> {
    accel: Accel,
    tracking: Tracking,
    vcpus: u16,
    layout: &'a [PageRange],
    /// Whether its last range is for what the guest boots from.
    has_image: bool,
    description: Option<&'a [u8]>,
    /// Asked between the steps, each of which may take the host a while.
    is_wanted: &'a dyn Fn() -> bool,
}

fn build(parts: &Parts<'_>) -> Result<(Arc<GuestMemory>, Built), MachineError> {
    let with = if parts.has_image { GuestMemory::with_image } else { GuestMemory::new };
    match parts.accel {
        Accel::Kvm => {
            let ram = GuestRam::create(parts.layout).map_err(MachineError::Memory)?;
            let memory = Arc::new(with(Arc::new(ram)));
            check_wanted(parts.is_wanted)?;
            let options = BuildOptions {
                vcpus: parts.vcpus,
                tracking: parts.tracking,
                description: parts.description,
                is_wanted: parts.is_wanted,
            };
            let built = kvm::build(&memory, &options)?;
            Ok((memory, built))
        }
        #[cfg(feature = "threads")]
        Accel::Threads => {
            let ram = Arc::new(crate::threads::create_ram(parts.layout)?);
            check_wanted(parts.is_wanted)?;
            let built = crate::threads::build(&ram, parts.vcpus, parts.description)?;
            Ok((Arc::new(with(ram)), built))
        }
        #[cfg(not(feature = "threads"))]
        Accel::Threads => Err(MachineError::Config { reason: NO_THREADS.into() }),
    }
}

/// Whether this process can use KVM; the error says in one line why not.
pub fn kvm_is_usable() -> Result<(), MachineError> {
    Ok(kvm::is_usable()?)
}

/// Opens where a serial port goes.
pub(crate) fn open_endpoint(serial: &SerialOut) -> Result<Arc<Endpoint>, MachineError> {
    Endpoint::open(serial).map_err(|source| {
        let path = match serial {
            SerialOut::File(path) | SerialOut::Unix(path) => path.as_path(),
            SerialOut::Stdio | SerialOut::None => Path::new("standard output"),
        };
        MachineError::File { what: "serial port", path: path.to_owned(), source }
    })
}
