//! Machines under a real KVM. Without one these tests say so and pass.

mod elf;
mod guests;
mod hostile;
mod hypervisor_pages;
mod kernels;
pub(crate) mod loopback;
mod lost;
pub(crate) mod moving;
mod nics;
mod resets;
mod stopping;
mod timers;
mod tracking;
mod userfault;

use crate::memory::GuestMemory;
use crate::{Accel, Boot, Machine, MachineConfig, Observed, SerialOut, Tracking, kvm_is_usable};
use martlet_engine::{
    BuildRequest, DestinationFactory, DestinationVmm, Error, GuestObserver, LoadFor, Paused, Peer,
    SourceVmm,
};
use martlet_ram::DirtySource;
use martlet_test_host::Want;
use martlet_units::{ByteCount, ClockOffset, Gpa, PAGE_SIZE, PageRange};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// Bytes of a page, as a length.
const PAGE_BYTES: usize = 4096;

/// How long anything may take on a busy host.
const PATIENCE: Duration = Duration::from_secs(180);

/// What a state is loaded for at the end of a move within one host.
pub(crate) const START_HERE: LoadFor =
    LoadFor::Start { source_clock: Some(ClockOffset::ONE_CLOCK) };

/// What a migration asks for again and again, waited for.
pub(crate) trait Waited: SourceVmm {
    fn wait_suspended(&self) -> Result<(), Error> {
        wait(|| self.poll_suspended())
    }

    fn wait_paused(&self) -> Result<Paused, Error> {
        wait(|| self.poll_paused())
    }

    fn take_state(&self) -> Result<Vec<u8>, Error> {
        wait(|| self.poll_state())
    }
}

impl<T: SourceVmm + ?Sized> Waited for T {}

/// Sets the devices of a guest that has arrived going.
fn resume(target: &dyn DestinationVmm) -> Result<(), Error> {
    target.begin_resume(Waker::noop());
    wait(|| target.poll_resumed())
}

/// What was seen of a guest.
fn observed(observer: Option<&dyn GuestObserver>) -> Observed {
    let report = observer.expect("a machine observes").report();
    Observed::decode(&report).expect("a report of a machine")
}

fn wait<T>(poll: impl Fn() -> Poll<T>) -> T {
    let began = Instant::now();
    loop {
        if let Poll::Ready(done) = poll() {
            return done;
        }
        assert!(began.elapsed() < PATIENCE, "it comes to an end");
        std::thread::yield_now();
    }
}

/// Whether these tests can run; says so if not.
pub(crate) fn has_kvm() -> bool {
    Want::Kvm.found(&kvm_is_usable())
}

/// A guest of threads is at one address of its process: there is one at a time.
fn one_threads_guest() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    crate::vcpu::lock(&ONE)
}

pub(crate) fn program(text: &str, memory_mib: u64, vcpus: u16) -> MachineConfig {
    MachineConfig {
        memory: ByteCount(memory_mib << 20),
        vcpus,
        accel: Accel::Kvm,
        tracking: Tracking::Auto,
        boot: Boot::Program(text.parse().expect("parameters")),
        serial: SerialOut::None,
    }
}

pub(crate) fn running(config: &MachineConfig) -> Arc<Machine> {
    let machine = Machine::new(config).expect("a machine");
    machine.continue_by_owner().expect("a new guest starts");
    machine
}

/// Waits until `is_so`.
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn heartbeats(machine: &Machine) -> u64 {
    machine.guest_counters().expect("the built-in program").heartbeats
}

/// Waits until the guest has filled its memory and beaten once more.
fn wait_ready(machine: &Machine) {
    wait_for("the guest to fill its memory", || {
        assert_eq!(machine.group.ended_because(), None);
        machine.guest_counters().expect("the built-in program").ready
    });
    let now = heartbeats(machine);
    wait_for("a heartbeat", || heartbeats(machine) > now);
}

/// Asserts that the guest lives on and finds nothing wrong.
fn assert_sound(machine: &Machine) {
    let before = machine.guest_counters().expect("the built-in program");
    wait_for("heartbeats and checks", || {
        assert_eq!(machine.group.ended_because(), None);
        let now = machine.guest_counters().expect("the built-in program");
        now.heartbeats > before.heartbeats + 10 && now.verified_pages > before.verified_pages + 50
    });
    let now = machine.guest_counters().expect("the built-in program");
    assert_eq!((now.wrong_pages, now.first_wrong), (0, None));
    assert_eq!(now.tsc_backwards, 0);
}

/// What a source of the same user asks for.
pub(crate) fn request<'a>(description: &'a [u8], layout: &'a [PageRange]) -> BuildRequest<'a> {
    static CANCELLED: AtomicBool = AtomicBool::new(false);
    BuildRequest { description, layout, peer: Peer::SameUser, is_cancelled: &CANCELLED }
}

/// Builds a destination for `source`'s guest.
pub(crate) fn destination(
    factory: &dyn DestinationFactory,
    source: &Machine,
) -> Arc<dyn DestinationVmm> {
    let layout = source.memory.ram().layout();
    factory.build(&request(&source.machine_description(), &layout)).expect("a destination")
}
