//! The device as a VMM uses it: link, dirty log, queue pairs, maps, several devices, other users of
//! the same function.
#![allow(clippy::unwrap_used, reason = "tests")]

mod rig;

use martlet_fault_plan::{FOR_EVER, FaultPlan, Rule};
use martlet_mlx5::options::{Barrier, LinkNotifier, Options, Pace, Prepare, Umems};
use martlet_mlx5::{DeviceState, Mlx5Device, Recoveries};
use martlet_mlx5_abi::{CommandStatus, Opcode};
use martlet_mlx5_model::{Class, Fault, Latencies, Model, ModelConfig, Point};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use martlet_vdpa::virtio::net_config;
use martlet_vdpa::{Iova, QueueIndex, VdpaDevice, VdpaError};
use rig::Rig;
use rig::guest::Guest;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MODIFY: Opcode = Opcode::MODIFY_GENERAL_OBJECT;
const QUERY: Opcode = Opcode::QUERY_GENERAL_OBJECT;

fn ms(count: f64) -> Duration {
    Duration::from_secs_f64(count / 1000.0)
}

fn series(queues: u16) -> ModelConfig {
    let latencies = Latencies::connectx6dx_from_series();
    ModelConfig { queues, latencies, ..ModelConfig::default() }
}

fn link(rig: &Rig) -> u16 {
    let mut status = [0; 2];
    rig.device.read_config(u32::try_from(net_config::STATUS).unwrap(), &mut status);
    u16::from_le_bytes(status)
}

#[test]
fn the_configuration_space_is_what_the_device_says() {
    let rig = Rig::new(ModelConfig { queues: 8, ..ModelConfig::default() }, Options::MARTLET, 1, 0);
    let mut config = [0xff; 16];
    rig.device.read_config(0, &mut config);
    assert_eq!(config[..6], ModelConfig::default().mac);
    assert_eq!(config[6..12], [1, 0, 4, 0, 0xdc, 5], "link, pairs, MTU");
    assert_eq!(config[12..], [0; 4], "nothing beyond the end");
    rig.device.write_config(0, &[1; 12]);
    let mut again = [0; 16];
    rig.device.read_config(0, &mut again);
    assert_eq!(again, config, "all of it is read-only");
    rig.device.read_config(u32::MAX, &mut again);
    assert_eq!(again, [0; 16]);
}

#[test]
fn what_the_link_does_during_a_suspend_is_told_once_at_the_resume() {
    let rig = Rig::running(ModelConfig::default(), Options::MARTLET, 1, 0);
    let changes = || rig.config_changes.swap(0, Ordering::Relaxed);
    rig.model.set_link(false);
    rig.pass(ms(1.0));
    assert_eq!((link(&rig), changes()), (0, 1));
    rig.model.set_link(true);
    rig.pass(ms(1.0));
    assert_eq!((link(&rig), changes()), (1, 1));
    rig.suspend().unwrap();
    for up in [false, true, false] {
        rig.model.set_link(up);
        rig.pass(ms(1.0));
    }
    assert_eq!((link(&rig), changes()), (1, 0), "swallowed");
    rig.resume().unwrap();
    assert_eq!((link(&rig), changes()), (0, 1), "told");
    rig.pass(ms(1.0));
    assert_eq!(changes(), 0);
    rig.model.set_link(true);
    rig.pass(ms(1.0));
    rig.suspend().unwrap();
    changes();
    rig.resume().unwrap();
    assert_eq!(changes(), 1, "always, also without news");
}

#[test]
fn each_step_of_the_series_is_worth_what_it_says() {
    let suspend = |options: Options| {
        let rig = Rig::running(series(32), options, 16, 0);
        rig.time(|rig| rig.suspend().unwrap()).1
    };
    let unregistered = LinkNotifier::Unregistered;
    let batched = Options::LINUX_6_12;
    let with_notifier = suspend(Options { link_notifier: unregistered, ..batched });
    let without = suspend(batched);
    let chained = suspend(Options { barrier: Barrier::EachStopped, ..batched });
    let serial = suspend(Options { queues: Pace::Serial, ..batched });
    assert!(with_notifier.abs_diff(ms(13.0)) < ms(0.3), "{with_notifier:?}");
    assert!(without.abs_diff(ms(2.5)) < ms(0.1), "{without:?}");
    assert!(chained < without, "{chained:?}");
    assert!(serial.abs_diff(ms(26.5)) < ms(0.3), "{serial:?}");
}

#[test]
fn reading_indices_costs_nothing_after_a_suspend() {
    for (options, queries) in [(Options::MARTLET, 0), (Options::LINUX_6_12, 8)] {
        let rig = Rig::running(ModelConfig::default(), options, 4, 7);
        rig.suspend().unwrap();
        let before = rig.device.command_stats().of(QUERY).issued;
        let states = rig.states();
        assert!(states.iter().all(|state| (state.avail_index, state.used_index) == (7, 7)));
        let after = rig.device.command_stats().of(QUERY).issued;
        assert_eq!(after - before, queries);
    }
}

#[test]
fn what_is_prepared_decides_what_is_left_for_the_switchover() {
    // 4 queues: fields, start.
    for (prepare, modifies) in [(Prepare::Suspended, 4), (Prepare::Created, 8)] {
        let options = Options { prepare, ..Options::MARTLET };
        let mut rig = Rig::new(ModelConfig::default(), options, 2, 0);
        rig.device.prepare().unwrap();
        // Indices come with the guest.
        let guest = Guest::new(2, 1000);
        rig.guest = guest;
        rig.device.set_map(&rig.map()).unwrap();
        for queue in 0..4 {
            rig.device.set_queue_state(QueueIndex(queue), rig.guest.at(queue)).unwrap();
        }
        let before = rig.device.command_stats();
        rig.resume().unwrap();
        let after = rig.device.command_stats();
        let issued = |opcode| after.of(opcode).issued - before.of(opcode).issued;
        assert_eq!(issued(Opcode::CREATE_GENERAL_OBJECT), 0, "{prepare:?}");
        assert_eq!(issued(MODIFY), modifies, "{prepare:?}");
        rig.assert_frames_flow();
    }
}

#[test]
fn preparing_again_builds_only_what_has_changed() {
    let rig = Rig::new(ModelConfig::default(), Options::MARTLET, 2, 0);
    rig.device.prepare().unwrap();
    let before = rig.device.command_stats().issued();
    rig.device.prepare().unwrap();
    assert_eq!(rig.device.command_stats().issued(), before);
    // Another size means another queue; addresses come with the resume.
    let config = rig.guest.config(1);
    let smaller = martlet_vdpa::QueueConfig { size: config.size / 2, ..config };
    rig.device.set_queue(QueueIndex(1), smaller).unwrap();
    let before = rig.device.command_stats().of(Opcode::CREATE_GENERAL_OBJECT).issued;
    rig.device.prepare().unwrap();
    let after = rig.device.command_stats().of(Opcode::CREATE_GENERAL_OBJECT).issued;
    assert_eq!(after - before, 1);
}

#[test]
fn umems_are_one_or_three_a_queue() {
    for (umems, commands) in [(Umems::Shared, 1), (Umems::PerQueue, 12)] {
        let options = Options { umems, ..Options::MARTLET };
        let mut rig = Rig::running(ModelConfig::default(), options, 2, 0);
        rig.assert_frames_flow();
        let issued = |opcode| rig.device.command_stats().of(opcode).issued;
        assert_eq!(issued(Opcode::CREATE_UMEM), commands);
    }
}

#[test]
fn pages_that_the_device_writes_are_logged() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 2, 65_530);
    let taken = |rig: &Rig| {
        let mut pages = BTreeSet::new();
        rig.device.take_dirty(&mut |first, word| {
            assert_ne!(word, 0);
            assert!(first.is_multiple_of(64));
            pages.extend((0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| first + bit));
        });
        pages
    };
    rig.assert_frames_flow();
    assert_eq!(taken(&rig), BTreeSet::new(), "not before it is asked for");
    rig.device.set_dirty_log(true).unwrap();
    rig.assert_frames_flow();
    let pages = taken(&rig);
    // Each queue has 64 pages: its device ring is the fourth, buffers begin with the fifth. Both
    // rings of a pair are written, and the buffers of the receive queue.
    for queue in 0..4 {
        assert!(pages.contains(&(queue * 64 + 3)), "the ring of queue {queue}: {pages:?}");
        let buffers = pages.range(queue * 64 + 4..queue * 64 + 64).count();
        assert_eq!(buffers > 0, queue % 2 == 0, "queue {queue}");
    }
    assert_eq!(taken(&rig), BTreeSet::new(), "each once");
    // What was written until a suspend is in the log after it.
    rig.guest.offer(2);
    rig.suspend().unwrap();
    taken(&rig);
    rig.resume().unwrap();
    rig.assert_frames_flow();
    assert!(!taken(&rig).is_empty(), "it goes on after a resume");
    // A map that reaches further up makes the log longer.
    let mut map = rig.map();
    let mut above = map[0].clone();
    above.iova = Iova(1 << 33);
    map.push(above);
    rig.device.set_map(&map).unwrap();
    rig.assert_frames_flow();
    assert!(!taken(&rig).is_empty());
    assert_eq!(rig.model.stats().pages_beyond_log, 0);
    rig.device.set_dirty_log(false).unwrap();
    taken(&rig);
    rig.assert_frames_flow();
    assert_eq!(taken(&rig), BTreeSet::new());
}

#[test]
fn queue_pairs_come_and_go_while_frames_flow() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 4, 65_520);
    rig.assert_frames_flow();
    for pairs in [1, 3, 2, 4, 4, 1, 4] {
        rig.device.set_queue_pairs(pairs).unwrap();
        rig.pairs = usize::from(pairs);
        rig.assert_frames_flow();
    }
    let error = rig.device.set_queue_pairs(0).unwrap_err();
    assert!(matches!(error, VdpaError::Invalid { .. }));
    assert!(rig.device.set_queue_pairs(33).is_err());
    // The table shrinks before queues stop, and grows after they run: one command each.
    let before = rig.device.command_stats();
    rig.device.set_queue_pairs(2).unwrap();
    rig.device.set_queue_pairs(4).unwrap();
    let after = rig.device.command_stats();
    let issued = |opcode| after.of(opcode).issued - before.of(opcode).issued;
    assert_eq!((issued(Opcode::MODIFY_RQT), issued(MODIFY), issued(QUERY)), (2, 8, 4));
    // And a suspended device has all of them.
    rig.suspend().unwrap();
    rig.device.set_queue_pairs(1).unwrap();
    rig.resume().unwrap();
    rig.pairs = 1;
    rig.assert_frames_flow();
}

#[test]
fn a_map_changes_while_frames_flow() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 2, 0);
    rig.assert_frames_flow();
    let mut map = rig.map();
    let mut above = map[0].clone();
    above.iova = Iova(1 << 32);
    map.push(above);
    for map in [map.clone(), rig.map(), map] {
        rig.device.set_map(&map).unwrap();
        rig.assert_frames_flow();
    }
    let error = rig.device.set_map(&[]).unwrap_err();
    assert!(matches!(error, VdpaError::Invalid { .. }), "not under frames: {error}");
    rig.assert_frames_flow();
    // Keys that nobody uses go later; the pages behind them with them.
    rig.pass(Duration::from_secs(3));
    let counters = rig.device.memory_counters();
    assert_eq!((counters.backlog_keys, counters.maps_held), (0, 1));
    rig.assert_frames_flow();
    rig.suspend().unwrap();
    rig.device.set_map(&rig.map()).unwrap();
    rig.resume().unwrap();
    rig.assert_frames_flow();
}

#[test]
fn several_devices_stop_and_start_together() {
    let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
    let rigs: Vec<Rig> =
        (0..4).map(|_| Rig::on(&stage, series(32), Options::MARTLET, Guest::new(16, 0))).collect();
    rigs.iter().for_each(|rig| rig.device.start().unwrap());
    let together = |begin: &dyn Fn(&Rig), poll: &dyn Fn(&Rig) -> bool| {
        let start = stage.clock().now();
        rigs.iter().for_each(begin);
        let mut left: Vec<&Rig> = rigs.iter().collect();
        while !left.is_empty() {
            left.retain(|rig| !poll(rig));
            if !left.is_empty() {
                let next = stage.turn_all();
                let soon = stage.clock().now().after(Duration::from_micros(10));
                stage.clock().advance_to(next.map_or(soon, |next| next.min(soon)));
            }
        }
        stage.clock().now().since(start)
    };
    let suspend = together(&|rig| rig.device.begin_suspend().unwrap(), &|rig| {
        rig.device.poll_suspend().inspect(|outcome| assert_eq!(outcome, &Ok(()))).is_some()
    });
    let resume = together(&|rig| rig.device.begin_resume().unwrap(), &|rig| {
        rig.device.poll_resume().inspect(|outcome| assert_eq!(outcome, &Ok(()))).is_some()
    });
    // As long as one, not as long as four.
    assert!(suspend < ms(2.6) && resume < ms(5.0), "{suspend:?} {resume:?}");
    assert!(rigs.iter().all(|rig| rig.device.state() == DeviceState::Running));
}

#[test]
fn the_first_queue_passes_frames_before_the_last_one_runs() {
    let rig = Rig::new(series(32), Options::MARTLET, 16, 0);
    rig.device.prepare().unwrap();
    rig.device.begin_resume().unwrap();
    let mut first = None;
    let begin = rig.now();
    while rig.device.poll_resume().is_none() {
        let count = |queue: usize| rig.notified[queue].load(Ordering::Relaxed);
        if first.is_none() && count(0) == 1 && count(1) == 1 {
            assert_eq!(count(31), 0);
            first = Some(rig.now().since(begin));
        }
        rig.stage.clock().advance(Duration::from_micros(20));
        rig.stage.turn_all();
    }
    let all = rig.now().since(begin);
    assert!(first.unwrap() < ms(1.0) && all > ms(4.0), "{first:?} of {all:?}");
}

#[test]
fn after_a_command_without_an_answer_they_go_one_by_one_for_a_while() {
    let mut rig = Rig::running(series(8), Options::MARTLET, 4, 0);
    let fault = Fault::Lost { executed: false };
    let at = Point::Class(Class::QueueSuspend);
    rig.model.with_faults(|faults| *faults = FaultPlan::once(at, 2, fault));
    let error = rig.suspend().unwrap_err();
    assert!(matches!(error, VdpaError::Timeout { waited_ms: 20, .. }), "{error}");
    rig.guest.takes_repeats = true;
    rig.pass(ms(1.0));
    assert_eq!(rig.device.recoveries().count, 1);
    rig.assert_frames_flow();
    let serial = rig.time(|rig| rig.suspend().unwrap()).1;
    rig.resume().unwrap();
    rig.pass(Duration::from_secs(11));
    let batched = rig.time(|rig| rig.suspend().unwrap()).1;
    assert!(serial > ms(6.0) && batched < ms(1.5), "{serial:?} {batched:?}");
}

/// Everything on a function goes with it, in four commands however much there is.
#[test]
fn a_reset_begins_the_function_anew() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 2, 0);
    rig.assert_frames_flow();
    let (entries, before) = (rig.bus.entries(), rig.device.command_stats());
    rig.device.reset().unwrap();
    let after = rig.device.command_stats();
    let issued = |opcode| after.of(opcode).issued - before.of(opcode).issued;
    let once = [Opcode::TEARDOWN_HCA, Opcode::DISABLE_HCA, Opcode::ENABLE_HCA, Opcode::INIT_HCA];
    assert_eq!(once.map(issued), [1; 4]);
    assert_eq!(issued(Opcode::DESTROY_GENERAL_OBJECT), 0);
    assert!(rig.model.stats().queues.is_empty() && rig.bus.entries() < entries);
    rig.set_up();
    rig.device.start().unwrap();
    rig.assert_frames_flow();
    assert_eq!(rig.device.recoveries(), Recoveries::default());
}

#[test]
fn the_firmware_gets_pages_and_gives_them_back() {
    let rig = Rig::running(ModelConfig::default(), Options::MARTLET, 1, 0);
    let held = |rig: &Rig| rig.model.stats().firmware_pages;
    let before = held(&rig);
    // More than a command can carry.
    for (pages, after) in [(1300, before + 1300), (-1200, before + 100), (-100, before)] {
        let fault = Fault::PageRequest(pages);
        rig.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, 0, fault));
        rig.suspend().unwrap();
        rig.resume().unwrap();
        rig.pass(ms(5.0));
        assert_eq!(held(&rig), after);
    }
}

/// A VMM has a thread that services the device and vCPUs that kick it, while a third switches.
#[test]
fn threads_don_t_hinder_each_other() {
    let stage = Stage::new(SoftClock::real());
    let rig = Rig::on(&stage, ModelConfig::default(), Options::MARTLET, Guest::new(2, 0));
    let device = &rig.device;
    device.start().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = |body: &(dyn Fn() + Sync)| {
            while !over.load(Ordering::Relaxed) {
                body();
                std::thread::yield_now();
            }
        };
        scope.spawn(move || busy(&|| _ = device.service()));
        scope.spawn(move || busy(&|| (0..4).for_each(|queue| device.kick(QueueIndex(queue)))));
        scope.spawn(move || busy(&|| _ = device.counters()));
        for _ in 0..30 {
            rig.suspend().unwrap();
            device.set_map(&rig.map()).unwrap();
            rig.resume().unwrap();
            device.set_queue_pairs(1).unwrap();
            device.set_queue_pairs(2).unwrap();
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(device.state(), DeviceState::Running);
}

#[test]
fn without_room_for_more_keys_the_old_map_stays() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 2, 0);
    rig.assert_frames_flow();
    let fault = Fault::Status { status: CommandStatus::NO_RESOURCES, syndrome: 1 };
    let at = Point::Class(Class::KeyCreate);
    let rule = Rule { at, skip: 1, times: FOR_EVER, fault };
    rig.model.with_faults(|faults| *faults = FaultPlan::script([rule]));
    let mut map = rig.map();
    for place in 1..4 {
        let mut run = map[0].clone();
        run.iova = Iova(place << 31);
        map.push(run);
    }
    let error = rig.device.set_map(&map).unwrap_err();
    assert!(error.to_string().contains("NO_RESOURCES"), "{error}");
    rig.assert_frames_flow();
    rig.model.with_faults(FaultPlan::clear);
    rig.device.set_map(&map).unwrap();
    rig.assert_frames_flow();
}

#[test]
fn a_device_of_one_slot_and_little_memory_works_all_the_same() {
    // Two entries: one for pages, one for everything else.
    let config = ModelConfig { log_command_entries: 1, queues: 8, ..ModelConfig::default() };
    let options = Options { mailbox_bytes_max: 64 << 10, ..Options::MARTLET };
    let mut rig = Rig::running(config, options, 2, 0);
    rig.assert_frames_flow();
    rig.suspend().unwrap();
    rig.resume().unwrap();
    rig.assert_frames_flow();
}

#[test]
fn what_is_out_of_order_is_an_error_and_changes_nothing() {
    let mut rig = Rig::new(ModelConfig::default(), Options::MARTLET, 1, 0);
    let is_invalid = |result: Result<(), VdpaError>| {
        assert!(matches!(result, Err(VdpaError::Invalid { .. })), "{result:?}");
    };
    is_invalid(rig.device.begin_suspend());
    is_invalid(rig.device.begin_resume());
    is_invalid(rig.device.set_features(1 << 60));
    is_invalid(rig.device.set_features(0));
    let config = rig.guest.config(0);
    let bad = |change: &dyn Fn(&mut martlet_vdpa::QueueConfig)| {
        let mut config = config;
        change(&mut config);
        is_invalid(rig.device.set_queue(QueueIndex(0), config));
    };
    bad(&|config| config.size = 3);
    bad(&|config| config.size = 0);
    bad(&|config| config.size = 32_768);
    bad(&|config| config.descriptors = Iova(8));
    bad(&|config| config.driver = Iova(1));
    bad(&|config| config.device = Iova(2));
    bad(&|config| config.device = Iova(!0xf));
    is_invalid(rig.device.set_queue(QueueIndex(999), config));
    is_invalid(rig.device.set_queue_state(QueueIndex(999), rig.guest.at(0)));
    rig.device.start().unwrap();
    is_invalid(rig.device.start());
    is_invalid(rig.device.prepare());
    is_invalid(rig.device.set_queue(QueueIndex(0), config));
    is_invalid(rig.device.set_queue_state(QueueIndex(0), rig.guest.at(0)));
    assert!(rig.device.queue_state(QueueIndex(0)).is_err());
    is_invalid(rig.device.poll_suspend().unwrap());
    is_invalid(rig.device.poll_resume().unwrap());
    rig.device.kick(QueueIndex(999));
    rig.assert_frames_flow();
    // A kick that comes while the device stands is made up for.
    rig.suspend().unwrap();
    rig.guest.offer(1);
    rig.device.kick(QueueIndex(1));
    rig.stage.turn_all();
    rig.resume().unwrap();
    rig.stage.turn_all();
    assert_eq!(rig.guest.receive(), 1);
    let counters = rig.device.counters();
    assert_eq!(counters.frames_sent, counters.frames_received);
    assert!(counters.frames_sent > 10 && counters.last_frame_ns.is_some());
}

/// Cards of which only queue pairs tell about used descriptors are refused with a name.
#[test]
fn a_card_without_the_msix_event_mode_is_refused() {
    let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
    let bus = SoftBus::new(Addressing::Iommu);
    // None and QP.
    let config = ModelConfig { event_modes: 0b011, ..ModelConfig::default() };
    let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
    let seat = stage.seat(Arc::clone(&model) as _);
    let opened = Mlx5Device::open(rig::platform(&model, &bus, &seat), Options::MARTLET);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("MSI-X event mode"), "{error}");
    assert_eq!(bus.entries(), 0, "nothing is left on the bus");
}

/// Mailboxes carry no signatures: whatever a card tells about them, none are asked for.
#[test]
fn a_card_is_told_that_mailboxes_carry_no_signatures() {
    for cmdif_checksum in [0, 1, 3] {
        let config = ModelConfig { cmdif_checksum, ..ModelConfig::default() };
        let mut rig = Rig::running(config, Options::MARTLET, 1, 0);
        rig.assert_frames_flow();
        assert_eq!(rig.model.stats().commands_failed, 0);
    }
}
