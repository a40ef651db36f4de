//! Machines that wait for a guest, and the factory that builds them.

use crate::MachineError;
#[cfg(not(feature = "threads"))]
use crate::config::NO_THREADS;
use crate::config::{Accel, SerialOut, Tracking};
use crate::devices::Endpoint;
use crate::devices::virtio::Devices;
use crate::machine::{Machine, open_endpoint};
use crate::phase::{Event, Phase};
use crate::saved::{Description, SavedMachine};
use crate::vcpu::lock;
use martlet_engine::{
    BuildRequest, DestinationFactory, DestinationVmm, Error, Fault, GuestObserver, LoadFor,
    RunState,
};
use martlet_protocol::RunPermit;
use martlet_ram::GuestRam;
use martlet_vdpa::VdpaDevice;
use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

fn failed(action: impl Into<Cow<'static, str>>, reason: impl Into<String>) -> Error {
    Error::vmm(action, reason)
}

/// What a destination is willing to build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FactoryConfig {
    /// What executes the guest. Threads only for who asks for them: such a guest is a part of this
    /// process, so whoever sends one has its code run here. It is taken from a process of the same
    /// user over a Unix socket, and over TCP within this host where
    /// [`THREADS_BY_TCP_VARIABLE`](crate::THREADS_BY_TCP_VARIABLE) is set.
    pub accel: Accel,
    /// How dirty pages are found when the guest moves on.
    pub tracking: Tracking,
    /// Where the guest's serial port goes.
    pub serial: SerialOut,
}

/// Builds machines for guests that arrive, and keeps the one that did.
pub struct Factory {
    config: FactoryConfig,
    endpoint: Arc<Endpoint>,
    devices: Devices,
    arrived: Arc<Arrived>,
}

/// The machine whose guest has arrived.
type Arrived = Mutex<Option<Arc<Machine>>>;

impl Factory {
    /// Opens the serial port's endpoint; all attempts share it.
    pub fn new(config: FactoryConfig) -> Result<Factory, MachineError> {
        Factory::with_devices(config, Vec::new())
    }

    /// As [`Factory::new`], with devices for the network cards of guests that arrive, in the order
    /// of their cards. A guest may have fewer. One attempt after the other uses them: each leaves
    /// them reset, and the guest that arrives keeps them.
    pub fn with_devices(
        config: FactoryConfig,
        devices: Vec<Arc<dyn VdpaDevice>>,
    ) -> Result<Factory, MachineError> {
        let endpoint = open_endpoint(&config.serial)?;
        Ok(Factory { config, endpoint, devices: Devices::new(devices), arrived: Arc::default() })
    }

    /// The machine whose guest was started or left paused here.
    pub fn machine(&self) -> Option<Arc<Machine>> {
        lock(&self.arrived).clone()
    }

    fn check(&self, description: &Description, request: &BuildRequest<'_>) -> Result<(), String> {
        let (own, source) = (self.config.accel, description.accel);
        if own != source {
            return Err(format!("the guest runs on {source}, this destination on {own}"));
        }
        if description.memory != request.layout {
            return Err("the description's memory is not the migration's".into());
        }
        match own {
            Accel::Kvm => Ok(()),
            #[cfg(feature = "threads")]
            Accel::Threads => crate::threads::check_peer(request.peer),
            #[cfg(not(feature = "threads"))]
            Accel::Threads => Err(NO_THREADS.into()),
        }
    }
}

impl DestinationFactory for Factory {
    fn build(&self, request: &BuildRequest<'_>) -> Result<Arc<dyn DestinationVmm>, Error> {
        const ACTION: &str = "build the machine";
        let description = Description::decode(request.description)
            .map_err(|why| failed("read the machine's description", why))?;
        self.check(&description, request).map_err(|why| failed(ACTION, why))?;
        request.check_wanted()?;
        let endpoint = Arc::clone(&self.endpoint);
        let lease = self.devices.lend();
        let lease = lease.ok_or_else(|| failed(ACTION, "another guest has the network devices"))?;
        let tracking = self.config.tracking;
        let is_wanted = || request.check_wanted().is_ok();
        let machine = Machine::waiting(&description, tracking, endpoint, lease, &is_wanted);
        let machine = machine.map_err(|error| {
            request.check_wanted().err().unwrap_or_else(|| failed(ACTION, error.to_string()))
        })?;
        let machine = machine.shared();
        machine.serve_resets();
        request.check_wanted()?;
        let arrived = Arc::clone(&self.arrived);
        Ok(Arc::new(Incoming { machine, arrived, resumed: Arc::default() }))
    }
}

/// A machine that waits for its guest.
struct Incoming {
    machine: Arc<Machine>,
    arrived: Arc<Arrived>,
    /// Whether the devices go on, once that is known.
    resumed: Arc<Mutex<Option<Result<(), String>>>>,
}

impl DestinationVmm for Incoming {
    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(self.machine.memory.ram())
    }

    fn load_state(&self, state: &[u8], what_for: LoadFor) -> Result<(), Error> {
        const ACTION: &str = "load the machine's state";
        let machine = &*self.machine;
        let control = lock(&machine.control);
        if control.phase != Phase::Waiting {
            return Err(failed(ACTION, format!("the guest {}", control.phase.describe())));
        }
        let saved = SavedMachine::decode(state).map_err(|why| failed(ACTION, why))?;
        let (has, comes) = (machine.group.len(), saved.vcpus.len());
        if has != comes {
            return Err(failed(ACTION, format!("states of {comes} vCPUs for {has}")));
        }
        if what_for == (LoadFor::Start { source_clock: None }) {
            tracing::warn!("how long the guest stood is not known: its clocks stood as well");
        }
        machine.vm.begin_load();
        machine.group.begin_load(saved.vcpus.into_iter().map(Into::into).collect(), what_for);
        // The rest is loaded while the vCPUs load theirs; they are waited for in any case.
        let vm =
            machine.vm.load(&saved.vm, what_for).map_err(|error| failed(ACTION, error.to_string()));
        let serial = machine.bus.load_serial(&saved.serial).map_err(|why| failed(ACTION, why));
        machine.bus.load_board(saved.board.as_ref());
        let nics = machine.nics.load(saved.nics.as_deref().unwrap_or_default());
        let nics = nics.map_err(|why| failed(ACTION, why));
        let vcpus = machine.group.wait_loaded().map_err(|(number, error)| {
            failed(format!("load the state of vCPU {number}"), error.to_string())
        });
        vm.and(serial).and(nics).and(vcpus)
    }

    fn arm(&self, limit: Duration) {
        let control = lock(&self.machine.control);
        if control.phase == Phase::Waiting {
            self.machine.vm.arm();
            self.machine.group.arm(limit);
        }
    }

    fn start(&self, permit: RunPermit, state: RunState) {
        let machine = &*self.machine;
        {
            let mut control = lock(&machine.control);
            control
                .step("start it", Event::Start(state))
                .expect("a guest starts once, where it was waited for");
            machine.nics.unmute();
            if state == RunState::Paused {
                machine.nics.arrive_paused();
            }
            machine.go_on(&mut control, permit, state);
        }
        // The guest runs; the rest is for those who look at it.
        machine.endpoint.attach(&machine.bus);
        *lock(&self.arrived) = Some(Arc::clone(&self.machine));
    }

    fn begin_resume(&self, wake: &Waker) {
        if self.machine.nics.is_empty() {
            return *lock(&self.resumed) = Some(Ok(()));
        }
        let (resumed, wake) = (Arc::clone(&self.resumed), wake.clone());
        self.machine.aside("devices", move |machine| {
            *lock(&resumed) = Some(machine.nics.resume());
            wake.wake();
        });
    }

    fn poll_resumed(&self) -> Poll<Result<(), Error>> {
        match lock(&self.resumed).take() {
            None => Poll::Pending,
            Some(resumed) => Poll::Ready(
                resumed.map_err(|why| Error::new(Fault::Device, "resume the devices", why)),
            ),
        }
    }

    fn observer(&self) -> Option<&dyn GuestObserver> {
        Some(&*self.machine)
    }
}
