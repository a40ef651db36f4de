//! vDPA cards: `--vdpa`, from the words to devices. martlet's own driver, and behind the binary
//! interface a model of the hardware.

use crate::cli::VdpaArg;
use martlet_mlx5::options::Options;
use martlet_mlx5::{Mlx5Device, Platform};
use martlet_mlx5_model::{Hardware, Latencies, Model, ModelConfig};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use martlet_vdpa::{
    Counters, Identity, MapRun, Notify, QueueConfig, QueueIndex, QueueState, VdpaDevice, VdpaError,
};
use std::sync::Arc;

/// First bytes of the cards' addresses: of the range that everybody may assign (IEEE 802c), so
/// that a card's address looks the same on each host, as its guest knows it.
const MAC: [u8; 5] = [0x02, 0x6d, 0x61, 0x72, 0x74];

/// The cards that the command line asks for; none if it does not.
pub(crate) fn open(arg: Option<&VdpaArg>) -> Result<Vec<Arc<dyn VdpaDevice>>, String> {
    let Some(arg) = arg else { return Ok(Vec::new()) };
    let stage = Stage::new(SoftClock::real());
    let bus = SoftBus::new(Addressing::Iommu);
    let models: Vec<Arc<Model>> = (0..arg.devices)
        .map(|number| {
            let config = ModelConfig {
                queues: arg.queues,
                mac: mac(number),
                latencies: Latencies::connectx6dx_from_series(),
                ..ModelConfig::default()
            };
            Model::new(config, Arc::clone(&bus) as _, stage.clock())
        })
        .collect();
    let hardware = Hardware::start(&models).map_err(|e| format!("no thread for the cards: {e}"))?;
    let hardware = Arc::new(hardware);
    (0..arg.devices)
        .zip(models)
        .map(|(number, model)| {
            let platform = Platform {
                registers: model.registers(),
                dma: Arc::clone(&bus) as _,
                waiter: stage.seat(Arc::clone(&model) as _),
                vectors: model.vectors(),
            };
            let driver =
                Mlx5Device::open(platform, Options { mac: mac(number), ..Options::MARTLET })
                    .map_err(|error| format!("card {number}: {}", crate::failure::chain(&error)))?;
            Ok(Arc::new(Card { driver, model, _hardware: Arc::clone(&hardware) }) as _)
        })
        .collect()
}

fn mac(number: u16) -> [u8; 6] {
    let [a, b, c, d, e] = MAC;
    [a, b, c, d, e, u8::try_from(number & 0xff).unwrap_or(0)]
}

/// A driver on a model. All it does is the driver's; only when frames were served is the model's to
/// say, as the hardware tells nobody.
struct Card {
    // Before what it drives.
    driver: Mlx5Device,
    model: Arc<Model>,
    _hardware: Arc<Hardware>,
}

impl VdpaDevice for Card {
    fn identity(&self) -> &Identity {
        self.driver.identity()
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.driver.read_config(offset, into);
    }

    fn write_config(&self, offset: u32, from: &[u8]) {
        self.driver.write_config(offset, from);
    }

    fn on_config_change(&self, notify: Notify) {
        self.driver.on_config_change(notify);
    }

    fn set_features(&self, features: u64) -> Result<(), VdpaError> {
        self.driver.set_features(features)
    }

    fn set_map(&self, runs: &[MapRun]) -> Result<(), VdpaError> {
        self.driver.set_map(runs)
    }

    fn set_queue(&self, queue: QueueIndex, config: QueueConfig) -> Result<(), VdpaError> {
        self.driver.set_queue(queue, config)
    }

    fn on_queue_used(&self, queue: QueueIndex, notify: Notify) {
        self.driver.on_queue_used(queue, notify);
    }

    fn set_queue_state(&self, queue: QueueIndex, state: QueueState) -> Result<(), VdpaError> {
        self.driver.set_queue_state(queue, state)
    }

    fn queue_state(&self, queue: QueueIndex) -> Result<QueueState, VdpaError> {
        self.driver.queue_state(queue)
    }

    fn set_queue_pairs(&self, pairs: u16) -> Result<(), VdpaError> {
        self.driver.set_queue_pairs(pairs)
    }

    fn prepare(&self) -> Result<(), VdpaError> {
        self.driver.prepare()
    }

    fn start(&self) -> Result<(), VdpaError> {
        self.driver.start()
    }

    fn kick(&self, queue: QueueIndex) {
        self.driver.kick(queue);
    }

    fn begin_suspend(&self) -> Result<(), VdpaError> {
        self.driver.begin_suspend()
    }

    fn poll_suspend(&self) -> Option<Result<(), VdpaError>> {
        self.driver.poll_suspend()
    }

    fn begin_resume(&self) -> Result<(), VdpaError> {
        self.driver.begin_resume()
    }

    fn poll_resume(&self) -> Option<Result<(), VdpaError>> {
        self.driver.poll_resume()
    }

    fn set_dirty_log(&self, on: bool) -> Result<(), VdpaError> {
        self.driver.set_dirty_log(on)
    }

    fn take_dirty(&self, mark: &mut dyn FnMut(u64, u64)) {
        self.driver.take_dirty(mark);
    }

    fn reset(&self) -> Result<(), VdpaError> {
        self.driver.reset()
    }

    fn service(&self) -> Option<Instant> {
        self.driver.service()
    }

    fn counters(&self) -> Counters {
        let stats = self.model.stats();
        Counters {
            frames_sent: stats.frames_sent,
            frames_received: stats.frames_received,
            frames_dropped: stats.frames_dropped,
            access_errors: stats.access_errors,
            first_frame_ns: stats.first_frame.map(|moment| moment.0),
            last_frame_ns: stats.last_frame.map(|moment| moment.0),
        }
    }

    fn frame_times(&self) -> (Option<Instant>, Option<Instant>) {
        let stats = self.model.stats();
        (stats.first_frame, stats.last_frame)
    }
}
