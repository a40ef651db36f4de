use super::*;
use crate::devices::Endpoint;
use crate::devices::virtio::Devices;
use crate::tests::Waited;
use crate::{Factory, FactoryConfig, GuestStatus};
use martlet_engine::RunState;
use rustix::fs::SeekFrom;
use std::cell::Cell;
use std::task::Waker;

/// Moves the guest of `source` to a new machine of this process.
fn move_guest(source: &Machine, config: FactoryConfig) -> Arc<Machine> {
    move_guest_to(source, &Factory::new(config).unwrap())
}

/// Moves it to a machine that `factory` makes.
pub(super) fn move_guest_to(source: &Machine, factory: &Factory) -> Arc<Machine> {
    let destination = destination(factory, source);
    let rehearsal = source.rehearse().unwrap().unwrap();
    destination.load_state(&rehearsal.state, LoadFor::Rehearsal).unwrap();
    destination.arm(Duration::from_millis(100));
    source.begin_suspend(Waker::noop());
    source.wait_suspended().unwrap();
    source.begin_pause(Waker::noop());
    let paused = source.wait_paused().unwrap();
    let state = source.take_state().unwrap();
    let target_ram = destination.ram();
    copy_ram(source, &target_ram);
    destination.load_state(&state, START_HERE).unwrap();
    assert!(factory.machine().is_none());
    assert_eq!(observed(destination.observer()).first_heartbeat_ns, None);
    destination.start(paused.permit, paused.was);
    resume(&*destination).unwrap();
    source.moved_away();
    factory.machine().expect("it arrived")
}

pub(crate) fn copy_ram(source: &Machine, target: &Arc<martlet_ram::GuestRam>) {
    let memory = crate::memory::GuestMemory::new(Arc::clone(target));
    let mut page = [0; PAGE_BYTES];
    // An older target has no place for what the guest boots from.
    for (region, _) in source.memory.ram().regions().iter().zip(target.regions()) {
        let mut at = 0;
        // Holes of the file are zero at both ends.
        while let Ok(data) = rustix::fs::seek(region.file().unwrap().fd, SeekFrom::Data(at)) {
            let end = rustix::fs::seek(region.file().unwrap().fd, SeekFrom::Hole(data)).unwrap();
            for offset in (data..end).step_by(page.len()) {
                let gpa = Gpa(region.range().start().0 * PAGE_SIZE + offset);
                assert!(source.memory.read(gpa, &mut page));
                assert!(memory.write(gpa, &page));
            }
            at = end;
        }
    }
}

#[test]
fn a_guest_moves_on_and_on() {
    if !has_kvm() {
        return;
    }
    for vcpus in [1, 3] {
        let mut machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, vcpus));
        wait_ready(&machine);
        for _ in 0..8 {
            let before = heartbeats(&machine);
            let next = move_guest(&machine, FactoryConfig::default());
            assert_eq!(machine.status(), GuestStatus::Gone);
            machine = next;
            assert_sound(&machine);
            assert!(heartbeats(&machine) > before);
            assert_eq!(machine.status(), GuestStatus::Running);
        }
    }
}

#[test]
fn a_paused_guest_arrives_paused() {
    if !has_kvm() {
        return;
    }
    let source = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2));
    wait_ready(&source);
    source.pause_by_owner().unwrap();
    let machine = move_guest(&source, FactoryConfig::default());
    assert_eq!(machine.status(), GuestStatus::Paused);
    assert_eq!(machine.first_heartbeat(), None);
    let stopped_at = heartbeats(&machine);
    std::thread::sleep(Duration::from_millis(3));
    assert_eq!(heartbeats(&machine), stopped_at);
    machine.continue_by_owner().unwrap();
    assert_sound(&machine);
}

#[test]
fn memory_above_the_hole_is_the_guests_too() {
    if !has_kvm() {
        return;
    }
    // 328 MiB are above 4 GiB. The program never writes there, but checks samples for zero.
    let source = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 3400, 1));
    wait_ready(&source);
    assert_sound(&source);
    let regions: Vec<_> = source.memory.guest().iter().map(|r| r.range()).collect();
    assert_eq!((regions.len(), regions[1].start().0), (2, 1 << 20));
    let machine = move_guest(&source, FactoryConfig::default());
    assert_sound(&machine);
    for gfn in regions[1].start().0..regions[1].end().0 {
        assert!(machine.memory.write(Gpa(gfn * PAGE_SIZE), &[1]));
    }
    wait_for("a sample above the hole", || machine.guest_counters().unwrap().wrong_pages > 0);
}

/// A large machine takes its host a while.
#[test]
fn a_machine_that_nobody_wants_is_not_built_to_its_end() {
    const VCPUS: u16 = 3;
    if !has_kvm() {
        return;
    }
    let description = running(&program("fill=1M,ws=1M,rate=1/ms", 16, VCPUS)).description();
    let endpoint = Endpoint::open(&SerialOut::None).unwrap();
    let built_while_wanted = |times: u32| {
        let left = Cell::new(times);
        let is_wanted = || left.replace(left.get().saturating_sub(1)) > 0;
        let lease = Devices::new(Vec::new()).lend().unwrap();
        let endpoint = Arc::clone(&endpoint);
        Machine::waiting(&description, Tracking::Auto, endpoint, lease, &is_wanted)
    };
    // With the memory, with the VM, before each vCPU, and before the threads.
    let steps = 3 + u32::from(VCPUS);
    for times in 0..steps {
        let error = built_while_wanted(times).err().expect("it is not wanted").to_string();
        assert_eq!(error, "nobody wants it any more");
    }
    built_while_wanted(steps).expect("it is wanted to the end");
}

#[test]
fn a_failed_attempt_leaves_the_source_as_it_was() {
    if !has_kvm() {
        return;
    }
    let source = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 1));
    wait_ready(&source);
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    for _ in 0..3 {
        let abandoned = destination(&factory, &source);
        abandoned
            .load_state(&source.rehearse().unwrap().unwrap().state, LoadFor::Rehearsal)
            .unwrap();
        abandoned.arm(Duration::from_secs(1));
        source.begin_pause(Waker::noop());
        let paused = source.wait_paused().unwrap();
        drop(abandoned);
        source.resume(Some(paused));
        assert_sound(&source);
    }
    let machine = move_guest(&source, FactoryConfig::default());
    assert_sound(&machine);
}

#[test]
fn the_way_into_the_guest_is_short() {
    if !has_kvm() {
        return;
    }
    let mut machine = running(&program("fill=16M,ws=4M,rate=1/tick,tick=50us", 64, 1));
    wait_ready(&machine);
    let mut gaps = Vec::new();
    let mut lines = Vec::new();
    for _ in 0..12 {
        let factory = Factory::new(FactoryConfig::default()).unwrap();
        let destination = destination(&factory, &machine);
        let rehearsal = machine.rehearse().unwrap().unwrap();
        destination.load_state(&rehearsal.state, LoadFor::Rehearsal).unwrap();
        copy_ram(&machine, &destination.ram());
        destination.arm(Duration::from_millis(200));
        let tracker = machine.track().unwrap();
        machine.begin_pause(Waker::noop());
        let begin = Instant::now();
        let paused = machine.wait_paused().unwrap();
        let out = begin.elapsed();
        let state = machine.take_state().unwrap();
        let saved = begin.elapsed();
        copy_ram(&machine, &destination.ram());
        let copied = Instant::now();
        destination.load_state(&state, START_HERE).unwrap();
        let loaded = copied.elapsed();
        let started_at = crate::clock::now();
        assert_eq!(paused.was, RunState::Running);
        destination.start(paused.permit, paused.was);
        wait_for("a heartbeat", || observed(destination.observer()).first_heartbeat_ns.is_some());
        let first = observed(destination.observer()).first_heartbeat_ns.unwrap();
        let gap = martlet_units::Instant(first).since(started_at);
        gaps.push(gap);
        lines.push(format!("out {out:?} saved {saved:?} loaded {loaded:?} first beat {gap:?}"));
        drop(tracker);
        machine.moved_away();
        machine = factory.machine().unwrap();
    }
    gaps.sort();
    eprintln!("{}\nfirst heartbeat after start, median {:?}", lines.join("\n"), gaps[6]);
    // A tenth of a millisecond where nobody else wants the processors.
    assert!(gaps[0] < Duration::from_millis(50));
}
