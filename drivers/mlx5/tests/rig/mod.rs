//! A device on the model, in virtual time, with a guest that sends frames.
#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod guest;
pub(crate) mod memory;

use guest::Guest;
use martlet_device_io::{Dma, Registers, Waiter};
use martlet_mlx5::{Mlx5Device, Options, Platform};
use martlet_mlx5_model::{Model, ModelConfig};
use martlet_soft_bus::{Addressing, Seat, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use martlet_vdpa::virtio::feature;
use martlet_vdpa::{Access, Iova, MapRun, QueueIndex, QueueState, VdpaDevice, VdpaError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longer than anything here may take, in virtual time.
const LONG: Duration = Duration::from_secs(200);

pub(crate) struct Rig {
    pub(crate) bus: Arc<SoftBus>,
    pub(crate) stage: Arc<Stage>,
    pub(crate) seat: Arc<Seat>,
    pub(crate) model: Arc<Model>,
    pub(crate) device: Mlx5Device,
    pub(crate) guest: Guest,
    pub(crate) pairs: usize,
    pub(crate) notified: Vec<Arc<AtomicU32>>,
    pub(crate) config_changes: Arc<AtomicU32>,
}

pub(crate) fn platform(model: &Arc<Model>, bus: &Arc<SoftBus>, seat: &Arc<Seat>) -> Platform {
    Platform {
        registers: model.registers(),
        dma: Arc::clone(bus) as Arc<dyn Dma>,
        waiter: Arc::clone(seat) as Arc<dyn Waiter>,
        vectors: model.vectors(),
    }
}

impl Rig {
    /// A device that is open and set up for a guest, but does not run.
    pub(crate) fn new(config: ModelConfig, options: Options, pairs: usize, start: u16) -> Rig {
        let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
        Rig::on(&stage, config, options, Guest::new(pairs, start))
    }

    pub(crate) fn on(
        stage: &Arc<Stage>,
        config: ModelConfig,
        options: Options,
        guest: Guest,
    ) -> Rig {
        let bus = SoftBus::new(Addressing::Scattered { run_bytes: 1 << 18 });
        let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
        Rig::at(stage, model, bus, options, guest)
    }

    /// Opens a device that is there.
    pub(crate) fn at(
        stage: &Arc<Stage>,
        model: Arc<Model>,
        bus: Arc<SoftBus>,
        options: Options,
        guest: Guest,
    ) -> Rig {
        let registers = model.registers();
        Rig::through(stage, model, bus, registers, options, guest)
    }

    /// Opens a device that is there, by these registers.
    pub(crate) fn through(
        stage: &Arc<Stage>,
        model: Arc<Model>,
        bus: Arc<SoftBus>,
        registers: Arc<dyn Registers>,
        options: Options,
        guest: Guest,
    ) -> Rig {
        let seat = stage.seat(Arc::clone(&model) as _);
        let platform = Platform { registers, ..platform(&model, &bus, &seat) };
        let device = Mlx5Device::open(platform, options).unwrap();
        let pairs = usize::from(guest.queues() / 2);
        let queues = device.identity().queues;
        let notified = (0..queues).map(|_| Arc::default()).collect();
        let mut rig = Rig {
            bus,
            stage: Arc::clone(stage),
            seat,
            model,
            device,
            guest,
            pairs,
            notified,
            config_changes: Arc::default(),
        };
        rig.set_up();
        rig
    }

    pub(crate) fn map(&self) -> Vec<MapRun> {
        let memory = self.guest.memory.host();
        vec![MapRun { iova: Iova(0), memory, access: Access::ReadWrite }]
    }

    /// Everything before `start` or `prepare`.
    pub(crate) fn set_up(&mut self) {
        let device = &self.device;
        let wanted = feature::VERSION_1 | feature::NET_MAC | feature::ACCESS_PLATFORM;
        device.set_features(wanted).unwrap();
        device.set_map(&self.map()).unwrap();
        for queue in 0..self.guest.queues() {
            device.set_queue(QueueIndex(queue), self.guest.config(queue)).unwrap();
            device.set_queue_state(QueueIndex(queue), self.guest.at(queue)).unwrap();
            let count = Arc::clone(&self.notified[usize::from(queue)]);
            let notify = move || {
                count.fetch_add(1, Ordering::Relaxed);
            };
            device.on_queue_used(QueueIndex(queue), Arc::new(notify));
        }
        let count = Arc::clone(&self.config_changes);
        device.on_config_change(Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        device.set_queue_pairs(u16::try_from(self.pairs).unwrap()).unwrap();
    }

    /// A running device.
    pub(crate) fn running(config: ModelConfig, options: Options, pairs: usize, start: u16) -> Rig {
        let rig = Rig::new(config, options, pairs, start);
        rig.device.start().unwrap();
        rig
    }

    pub(crate) fn now(&self) -> Instant {
        self.stage.clock().now()
    }

    /// Waits for a suspend or a resume that was begun.
    fn wait(&self, poll: impl Fn() -> Option<Result<(), VdpaError>>) -> Result<(), VdpaError> {
        let end = self.now().after(LONG);
        loop {
            if let Some(outcome) = poll() {
                return outcome;
            }
            assert!(self.now() < end, "it ends");
            self.seat.wait(Some(self.now().after(Duration::from_micros(100))));
        }
    }

    /// Suspends and waits for it.
    pub(crate) fn suspend(&self) -> Result<(), VdpaError> {
        self.device.begin_suspend()?;
        self.wait(|| self.device.poll_suspend())
    }

    /// Resumes and waits for it.
    pub(crate) fn resume(&self) -> Result<(), VdpaError> {
        self.device.begin_resume()?;
        self.wait(|| self.device.poll_resume())
    }

    /// How long something takes in virtual time.
    pub(crate) fn time<T>(&self, body: impl FnOnce(&Rig) -> T) -> (T, Duration) {
        let begin = self.now();
        let value = body(self);
        (value, self.now().since(begin))
    }

    /// Lets the guest send and receive for some rounds.
    pub(crate) fn exchange(&mut self, rounds: u32) -> u32 {
        let mut received = 0;
        for _ in 0..rounds {
            self.guest.offer(self.pairs);
            for queue in 0..self.pairs * 2 {
                self.device.kick(QueueIndex(u16::try_from(queue).unwrap()));
            }
            self.stage.turn_all();
            received += self.guest.receive();
        }
        received
    }

    /// Frames flow on all pairs, and none is missing but those that a function may have lost that
    /// was made anew.
    pub(crate) fn assert_frames_flow(&mut self) {
        let rounds = 10;
        let errors = |rig: &Rig| (rig.model.stats().access_errors, rig.model.stats().ring_errors);
        // A function that told a wrong number for a memory key may have missed before it began anew.
        let before = if self.guest.takes_repeats { errors(self) } else { (0, 0) };
        // What waited in the rings comes first.
        self.exchange(2);
        let received = self.exchange(rounds);
        assert_eq!(received, rounds * u32::try_from(self.pairs).unwrap(), "frames flow");
        let lost = self.device.recoveries().frames_in_flight;
        assert!(u64::from(self.guest.missing()) <= lost, "{} of {lost}", self.guest.missing());
        assert_eq!(errors(self), before);
    }

    /// Time passes, with service as often as the device wants it.
    pub(crate) fn pass(&self, time: Duration) {
        let end = self.now().after(time);
        while self.now() < end {
            let until = self.device.service().map_or(end, |until| until.min(end));
            self.seat.wait(Some(until.max(Instant(self.now().0 + 1_000))));
        }
    }

    pub(crate) fn states(&self) -> Vec<QueueState> {
        let queues = 0..u16::try_from(self.pairs * 2).unwrap();
        queues.map(|queue| self.device.queue_state(QueueIndex(queue)).unwrap()).collect()
    }
}
