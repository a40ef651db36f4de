//! Cards on models with published latencies, in real time, and a guest's memory for them.

use crate::failure::{Failure, chain};
use martlet_mlx5::OpcodeStats;
use martlet_mlx5::options::Options;
use martlet_mlx5::{Mlx5Device, Platform};
use martlet_mlx5_model::{Latencies, Model, ModelConfig};
use martlet_ram::{GuestRam, RegionIndex};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use martlet_units::{Gfn, PAGE_SIZE, PageCount, PageRange};
use martlet_vdpa::virtio::feature;
use martlet_vdpa::{
    Access, Iova, MapRun, QueueConfig, QueueIndex, QueueState, VdpaDevice, VdpaError,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of a queue.
const QUEUE_SIZE: u16 = 256;
/// Each queue's rings have this much room, behind the first MiB of memory.
const QUEUE_ROOM: u64 = 64 << 10;
const FIRST_QUEUE: u64 = 1 << 20;
/// Where a PC's memory has holes, in bytes: for the VGA's frame buffer, and below 4 GiB.
const LOW_END: u64 = 0xa_0000;
const BIOS: u64 = 0xc_0000;
const PCI_HOLE: u64 = 2 << 30;
const HIGH: u64 = 4 << 30;

/// A guest's memory as QEMU's q35 machine lays it out: 640 KiB, the BIOS's 256 KiB, up to 2 GiB, and
/// the rest above 4 GiB. None of it is there before it is touched.
pub(super) struct Memory {
    ram: Arc<GuestRam>,
}

impl Memory {
    pub(super) fn new(bytes: u64) -> Result<Memory, Failure> {
        let high = bytes.saturating_sub(PCI_HOLE);
        let pieces = [
            (0, LOW_END),
            (BIOS, FIRST_QUEUE),
            (FIRST_QUEUE, bytes.min(PCI_HOLE)),
            (HIGH, HIGH + high),
        ];
        let layout: Vec<PageRange> = pieces
            .into_iter()
            .filter_map(|(start, end)| {
                let pages = end.saturating_sub(start) / PAGE_SIZE;
                PageRange::try_new(Gfn(start / PAGE_SIZE), PageCount(pages))
            })
            .collect();
        let ram = GuestRam::create(&layout).map_err(|e| Failure::because("guest memory", &e))?;
        Ok(Memory { ram: Arc::new(ram) })
    }

    /// The map of all of it.
    pub(super) fn map(&self) -> Vec<MapRun> {
        (0..)
            .map(RegionIndex)
            .zip(self.ram.regions())
            .map(|(index, region)| MapRun {
                iova: Iova(region.range().start().0 * PAGE_SIZE),
                memory: self.ram.host_memory(index),
                access: Access::ReadWrite,
            })
            .collect()
    }
}

/// One card with its driver.
pub(super) struct Rig {
    pub(super) device: Arc<Mlx5Device>,
    queues: u16,
}

/// Cards that are driven alike.
pub(super) fn cards(
    count: u16,
    queues: u16,
    latencies: &Latencies,
    options: Options,
) -> Result<Vec<Rig>, Failure> {
    let stage = Stage::new(SoftClock::real());
    (0..count)
        .map(|_| {
            let bus = SoftBus::new(Addressing::Iommu);
            let config =
                ModelConfig { queues, latencies: latencies.clone(), ..ModelConfig::default() };
            let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
            let platform = Platform {
                registers: model.registers(),
                dma: bus,
                waiter: stage.seat(Arc::clone(&model) as _),
                vectors: model.vectors(),
            };
            let device = Mlx5Device::open(platform, options)
                .map_err(|e| Failure::Failed(format!("a card does not start: {}", chain(&e))))?;
            Ok(Rig { device: Arc::new(device), queues })
        })
        .collect()
}

impl Rig {
    /// Says what the guest's driver would say before its DRIVER_OK.
    pub(super) fn configure(&self) -> Result<(), Failure> {
        self.device.set_features(feature::VERSION_1 | feature::NET_MQ).map_err(|e| told(&e))?;
        for index in 0..self.queues {
            let at = FIRST_QUEUE + u64::from(index) * QUEUE_ROOM;
            let config = QueueConfig {
                size: QUEUE_SIZE,
                descriptors: Iova(at),
                driver: Iova(at + (16 << 10)),
                device: Iova(at + (32 << 10)),
            };
            self.device.set_queue(QueueIndex(index), config).map_err(|e| told(&e))?;
        }
        Ok(())
    }

    /// Sets all queues going.
    pub(super) fn start(&self, map: &[MapRun]) -> Result<(), Failure> {
        self.configure()?;
        self.device.set_map(map).map_err(|e| told(&e))?;
        self.device.start().map_err(|e| told(&e))
    }

    /// Reads all queues' indices, as a VMM does after a suspend.
    pub(super) fn read_states(&self) -> Result<Vec<QueueState>, Failure> {
        (0..self.queues)
            .map(|q| self.device.queue_state(QueueIndex(q)).map_err(|e| told(&e)))
            .collect()
    }

    /// Says where the queues have come to elsewhere.
    pub(super) fn set_states(&self, states: &[QueueState]) -> Result<(), Failure> {
        for (index, state) in (0..).zip(states) {
            self.device.set_queue_state(QueueIndex(index), *state).map_err(|e| told(&e))?;
        }
        Ok(())
    }

    /// Figures of one opcode so far.
    pub(super) fn opcode(&self, opcode: martlet_mlx5_abi::Opcode) -> OpcodeStats {
        self.device.command_stats().of(opcode)
    }

    /// Commands issued so far.
    pub(super) fn issued(&self) -> u64 {
        self.device.command_stats().issued()
    }
}

/// Suspends cards, together, and says how long that took.
pub(super) fn suspend(rigs: &[Rig]) -> Result<Duration, Failure> {
    let begin = Instant::now();
    for rig in rigs {
        rig.device.begin_suspend().map_err(|e| told(&e))?;
    }
    wait(rigs, |device| device.poll_suspend())?;
    Ok(begin.elapsed())
}

/// Resumes cards, together.
pub(super) fn resume(rigs: &[Rig]) -> Result<Duration, Failure> {
    let begin = Instant::now();
    for rig in rigs {
        rig.device.begin_resume().map_err(|e| told(&e))?;
    }
    wait(rigs, |device| device.poll_resume())?;
    Ok(begin.elapsed())
}

fn wait(
    rigs: &[Rig],
    poll: impl Fn(&Mlx5Device) -> Option<Result<(), VdpaError>>,
) -> Result<(), Failure> {
    let mut left: Vec<&Rig> = rigs.iter().collect();
    let mut result = Ok(());
    while !left.is_empty() {
        left.retain(|rig| match poll(&rig.device) {
            None => true,
            Some(outcome) => {
                if let Err(error) = outcome {
                    result = Err(told(&error));
                }
                false
            }
        });
        std::thread::yield_now();
    }
    result
}

/// How long a call takes.
pub(super) fn timed<T>(call: impl FnOnce() -> Result<T, VdpaError>) -> Result<Duration, Failure> {
    let begin = Instant::now();
    call().map_err(|e| told(&e))?;
    Ok(begin.elapsed())
}

pub(super) fn told(error: &VdpaError) -> Failure {
    Failure::Failed(chain(error))
}
