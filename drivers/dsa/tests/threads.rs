//! Channels on threads of their own, in real time, on one work queue.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Guest, OpenGate, PlainCheck, fill_some};
use martlet_device_io::Portal;
use martlet_dsa::{
    CompletionWait, EngineConfig, QueueLimits, SeatWait, SharedMemory, WorkQueue, ZeroEngine,
};
use martlet_dsa_model::{DeviceConfig, DsaModel, Fault, FaultPoint, Faults, QueueConfig};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use std::sync::Arc;
use std::time::Duration;

/// Four channels, two jobs deep, on a queue of eight entries; then an engine of the device hangs.
#[test]
fn channels_share_a_queue_and_its_trouble() {
    let bus = SoftBus::new(Addressing::Process);
    let stage = Stage::new(SoftClock::real());
    let queues = vec![QueueConfig::shared(8)];
    let config = DeviceConfig { queues, ..DeviceConfig::sapphire_rapids() };
    let clock = Arc::clone(stage.clock());
    let model = DsaModel::new(config, bus.clone(), clock, Faults::default()).unwrap();
    let wait: Arc<dyn CompletionWait> = Arc::new(SeatWait::new(stage.seat(model.clone())));
    let portal: Box<dyn Portal> = Box::new(model.portal(0).unwrap());
    let limits = QueueLimits { batch_max: 32, transfer_bytes_max: 2 << 20, credits: None };
    let queue = WorkQueue::new("wq0.0", portal, wait, limits);
    let guest = Guest::new(512);
    fill_some(&guest, 512);
    let memory = SharedMemory::pin(&*bus, &[guest.host_memory()]).unwrap();
    let gate = Arc::new(OpenGate::new(1, 3));
    let truth: Vec<bool> = (0..512).map(|page| guest.is_zero(page)).collect();

    let channel = |number: u16| {
        let config = EngineConfig {
            channel: number,
            deadline: Duration::from_millis(200),
            ..Default::default()
        };
        let (queues, gate, memory) = (vec![queue.clone()], gate.clone(), memory.clone());
        let mut engine = ZeroEngine::new(config, queues, gate, memory, &*bus, PlainCheck).unwrap();
        let halves = [guest.run(0, 256), guest.run(256, 256)];
        for round in 0..40 {
            if round == 30 && number == 0 {
                let hang = Faults::once(FaultPoint::Batch, 0, Fault::Hang);
                model.set_faults(hang);
            }
            engine.begin(&halves[..1]);
            engine.begin(&halves[1..]);
            for half in truth.chunks(256) {
                let zero = engine.collect().unwrap();
                let told = (0..zero.pages()).map(|page| zero.is_zero(page));
                assert!(told.eq(half.iter().copied()), "channel {number}, round {round}");
            }
        }
        engine.stats()
    };
    let stats: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || channel(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(stats.iter().all(|stats| stats.device_pages + stats.cpu_pages == 40 * 512));
    assert!(stats.iter().map(|stats| stats.device_pages).sum::<u64>() > 0, "{stats:?}");
}
