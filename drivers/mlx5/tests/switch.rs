//! Start, suspend, resume, prepare: on the model, in virtual time.
#![allow(clippy::unwrap_used, reason = "tests")]

mod rig;

use martlet_mlx5::Options;
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_model::{Latencies, ModelConfig};
use martlet_vdpa::{QueueIndex, VdpaDevice};
use rig::Rig;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn series(queues: u16) -> ModelConfig {
    let latencies = Latencies::connectx6dx_from_series();
    ModelConfig { queues, latencies, ..ModelConfig::default() }
}

#[test]
fn frames_flow_and_go_on_after_each_suspend() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 4, 65_500);
    rig.assert_frames_flow();
    for _ in 0..5 {
        // With frames on their way.
        rig.guest.offer(4);
        rig.suspend().unwrap();
        let states = rig.states();
        for (queue, state) in (0..8).zip(states) {
            assert_eq!(state, rig.guest.at(queue));
        }
        let sent = rig.model.stats().frames_sent;
        rig.exchange(3);
        assert_eq!(rig.model.stats().frames_sent, sent, "a suspended device does nothing");
        rig.resume().unwrap();
        rig.assert_frames_flow();
    }
}

#[test]
fn a_guest_moves_to_another_device() {
    let source = Rig::running(ModelConfig::default(), Options::MARTLET, 4, 65_530);
    let mut source = source;
    source.assert_frames_flow();
    source.suspend().unwrap();
    let states = source.states();
    let Rig { guest, stage, device, .. } = source;
    drop(device);
    let mut there = Rig::on(&stage, ModelConfig::default(), Options::MARTLET, guest);
    there.device.prepare().unwrap();
    for (queue, state) in (0..8).zip(states) {
        there.device.set_queue_state(QueueIndex(queue), state).unwrap();
    }
    let before = there.device.command_stats();
    there.resume().unwrap();
    let after = there.device.command_stats();
    let modify = Opcode::MODIFY_GENERAL_OBJECT;
    assert_eq!(after.of(modify).issued - before.of(modify).issued, 8, "one command a queue");
    assert_eq!(after.issued() - before.issued(), 9, "and the link");
    assert!(there.notified.iter().take(8).all(|count| count.load(Ordering::Relaxed) >= 1));
    assert_eq!(there.config_changes.load(Ordering::Relaxed), 1);
    there.assert_frames_flow();
}

#[test]
fn it_takes_as_long_as_the_series_measured() {
    let run = |options: Options| {
        let rig = Rig::running(series(32), options, 16, 0);
        let suspend = rig.time(|rig| rig.suspend().unwrap()).1;
        let resume = rig.time(|rig| rig.resume().unwrap()).1;
        (suspend, resume)
    };
    let serial = run(Options::LINUX_6_11);
    let batched = run(Options::LINUX_6_12);
    let ours = run(Options::MARTLET);
    eprintln!("{serial:?} {batched:?} {ours:?}");
    let ms = Duration::from_secs_f64;
    assert!(serial.0.abs_diff(ms(0.037)) < ms(0.001), "{serial:?}");
    assert!(serial.1.abs_diff(ms(0.016)) < ms(0.001), "{serial:?}");
    assert!(batched.0 < ms(0.0027) && batched.1 < ms(0.005), "{batched:?}");
    assert!(ours.0 < ms(0.0025) && ours.1 < ms(0.005), "{ours:?}");
}

#[test]
fn everything_is_gone_with_the_device() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, 2, 0);
    rig.assert_frames_flow();
    let Rig { device, model, bus, stage, .. } = rig;
    drop(device);
    let stats = model.stats();
    assert_eq!((stats.keys, stats.queues.len()), (0, 0));
    assert_eq!(bus.entries(), 0, "nothing is pinned, nothing allocated");
    drop(stage);
}
