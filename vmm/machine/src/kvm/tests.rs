//! A guest's clocks across a move: they go on by the time that it stood, whatever the hosts' clocks
//! show.

use super::saved::{SavedVcpu, SavedVm, decode, encode};
use crate::clock;
use crate::saved::SavedMachine;
use crate::tests::Waited;
use crate::tests::{destination, has_kvm, moving, program, running};
use crate::{Factory, FactoryConfig};
use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SMM};
use martlet_engine::{LoadFor, RunState, SourceVmm};
use martlet_units::{ClockOffset, Instant};
use std::task::Waker;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;

/// What a guest's clocks showed, and when.
struct Clocks {
    kvmclock_ns: u64,
    kvmclock_at: Instant,
    tsc: u64,
    tsc_at: Instant,
    tsc_offset: Option<u64>,
}

fn clocks(state: &[u8]) -> Clocks {
    let saved = SavedMachine::decode(state).unwrap();
    let vm: SavedVm = decode(&saved.vm).unwrap();
    let vcpu: SavedVcpu = decode(&saved.vcpus[0]).unwrap();
    Clocks {
        kvmclock_ns: vm.clock.clock_ns,
        kvmclock_at: Instant(vm.clock.monotonic_ns.unwrap()),
        tsc: vcpu.tsc,
        tsc_at: Instant(vcpu.monotonic_ns.unwrap()),
        tsc_offset: vcpu.tsc_offset,
    }
}

fn changed(state: &[u8], change: impl Fn(&mut SavedVm, &mut SavedVcpu)) -> Vec<u8> {
    let mut saved = SavedMachine::decode(state).unwrap();
    let mut vm: SavedVm = decode(&saved.vm).unwrap();
    let mut vcpu: SavedVcpu = decode(&saved.vcpus[0]).unwrap();
    change(&mut vm, &mut vcpu);
    saved.vm = encode(&vm);
    saved.vcpus[0] = encode(&vcpu).into();
    saved.encode()
}

/// By how much the clocks of a guest that was moved differ from one that was not, in nanoseconds.
struct Steps {
    kvmclock: i128,
    tsc: i128,
    /// What the clocks may be off by: the guest's were read and set some time during this.
    error: i128,
    /// How long it stood.
    stood: i128,
    tsc_is_the_hosts: bool,
}

impl Steps {
    fn assert_none(&self) {
        for step in [self.kvmclock, self.tsc] {
            assert!(step.abs() <= self.error, "{step} ns, error {} ns", self.error);
        }
    }
}

/// Moves a guest whose state is changed on the way.
fn move_with(
    source_clock: Option<ClockOffset>,
    change: impl Fn(&mut SavedVm, &mut SavedVcpu),
) -> Steps {
    let source = running(&program("fill=1M,ws=1M,rate=1/ms,tick=100us", 16, 1));
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = destination(&factory, &source);
    source.begin_pause(Waker::noop());
    let permit = source.wait_paused().unwrap().permit;
    let saving = clock::now();
    let state = source.take_state().unwrap();
    let saved = clock::now();
    std::thread::sleep(Duration::from_millis(50));
    let loading = clock::now();
    let start = LoadFor::Start { source_clock };
    target.load_state(&changed(&state, change), start).unwrap();
    let loaded = clock::now();
    target.start(permit, RunState::Paused);
    let after = clocks(&factory.machine().unwrap().rehearse().unwrap().unwrap().state);
    let looked = clock::now();
    let before = clocks(&state);
    let khz = i128::from(source.vm.tsc_khz());
    let signed = |later: u64, earlier: u64| i128::from(later) - i128::from(earlier);
    let slack = [(saving, saved), (loading, loaded), (loaded, looked)].map(|(a, b)| b.since(a));
    let drift = looked.since(saving) / 1000;
    Steps {
        kvmclock: signed(after.kvmclock_ns, before.kvmclock_ns)
            - signed(after.kvmclock_at.0, before.kvmclock_at.0),
        tsc: signed(after.tsc, before.tsc) * 1_000_000 / khz
            - signed(after.tsc_at.0, before.tsc_at.0),
        error: i128::try_from((slack.iter().sum::<Duration>() + drift).as_nanos()).unwrap(),
        stood: signed(loading.0, saved.0),
        tsc_is_the_hosts: before.tsc_offset == Some(0),
    }
}

#[test]
fn a_guests_clocks_go_on_by_the_time_it_stood() {
    if has_kvm() {
        move_with(Some(ClockOffset::ONE_CLOCK), |_, _| {}).assert_none();
        // Where KVM does not tell the host's counter.
        move_with(Some(ClockOffset::ONE_CLOCK), |vm, _| vm.clock.host_tsc = None).assert_none();
    }
}

/// Two hosts' wall clocks are set by people.
#[test]
fn another_wall_clock_does_not_move_a_guests_clocks() {
    if !has_kvm() {
        return;
    }
    for seconds in [590, 3, -3, -590] {
        for host_tsc in [true, false] {
            let steps = move_with(Some(ClockOffset::ONE_CLOCK), |vm, vcpu| {
                let ns = seconds * SECOND.cast_signed();
                for realtime_ns in [&mut vm.clock.realtime_ns, &mut vcpu.realtime_ns] {
                    *realtime_ns = realtime_ns.saturating_add_signed(ns);
                }
                vm.clock.host_tsc = vm.clock.host_tsc.filter(|_| host_tsc);
            });
            steps.assert_none();
        }
    }
}

/// Each host's monotonic clock counts from its own boot.
#[test]
fn another_boot_does_not_move_a_guests_clocks() {
    if !has_kvm() {
        return;
    }
    for later in [1000 * SECOND, 1] {
        let ns = later.cast_signed();
        let steps = move_with(Some(ClockOffset { ns, error: Duration::ZERO }), |vm, vcpu| {
            for at in [&mut vm.clock.monotonic_ns, &mut vcpu.monotonic_ns] {
                *at = at.map(|at| at + later);
            }
        });
        steps.assert_none();
    }
}

#[test]
fn a_guests_clocks_stand_while_it_stands_for_an_unknown_time() {
    if !has_kvm() {
        return;
    }
    let steps = move_with(None, |_, _| {});
    let stood = |step: i128| step <= -steps.stood && step >= -steps.stood - steps.error;
    assert!(stood(steps.kvmclock), "{} ns", steps.kvmclock);
    // A KVM without hardware beneath it may give the guest the host's counter.
    assert!(stood(steps.tsc) || steps.tsc_is_the_hosts, "{} ns", steps.tsc);
}

/// Loads a rehearsal's state that was changed on the way; memory is afterwards as it was.
fn rehearse_with(change: impl Fn(&mut SavedVcpu)) {
    if !has_kvm() {
        return;
    }
    let source = running(&program("fill=1M,ws=1M,rate=1/ms,tick=100us", 16, 1));
    let target = destination(&Factory::new(FactoryConfig::default()).unwrap(), &source);
    let state = source.rehearse().unwrap().unwrap().state;
    moving::copy_ram(&source, &target.ram());
    let before = target.ram().digest().unwrap();
    let loaded = target.load_state(&changed(&state, |_, vcpu| change(vcpu)), LoadFor::Rehearsal);
    eprintln!("{loaded:?}");
    assert_eq!(target.ram().digest().unwrap(), before);
    target.load_state(&state, LoadFor::Rehearsal).expect("the machine still takes a good state");
}

/// KVM writes the registers to memory when a vCPU enters its system management mode.
#[test]
fn what_is_pending_in_a_rehearsal_waits_for_the_guest() {
    rehearse_with(|vcpu| {
        vcpu.events.flags |= KVM_VCPUEVENT_VALID_SMM;
        vcpu.events.smi_pending = 1;
    });
    rehearse_with(|vcpu| {
        vcpu.events.flags |= KVM_VCPUEVENT_VALID_NMI_PENDING;
        vcpu.events.nmi_pending = 1;
    });
}

#[test]
fn a_guest_at_the_end_of_all_addresses_is_rehearsed() {
    rehearse_with(|vcpu| {
        (vcpu.sregs.cr0, vcpu.sregs.cr4, vcpu.sregs.efer) = (1 << 4, 0, 0);
        vcpu.sregs.cs.l = 0;
        vcpu.regs.rip = u64::MAX - 15;
    });
}
