//! Who finds zero pages: `--zero-check`, from the words to the devices.

use crate::failure::chain;
use martlet_dsa::{
    CompletionWait, FindError, ProcessMemory, QueueLimits, QueueName, SeatWait, Tokens, WorkQueue,
};
use martlet_dsa_model::{DeviceConfig, DsaModel, Faults};
use martlet_engine::{DsaFinders, DsaQueue};
use martlet_policy::admission::{DeviceProfile, OffloadPolicy};
use martlet_ram::{CpuFinders, ZeroCheck, ZeroFinders};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use tracing::{info, warn};

/// Where the kernel tells of its DSA devices.
const DEVICES: &str = "/sys/bus/dsa/devices";
/// Where it puts the queues' device files.
const FILES: &str = "/dev/dsa";
/// Where the processes of a host tell each other what they have outstanding.
const TOKENS: &str = "/dev/shm/martlet-dsa-tokens";

/// Who finds zero pages: `cpu`, `auto`, `dsa:/dev/dsa/wq0.0,/dev/dsa/wq2.0` or `dsa:model`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ZeroCheckArg {
    /// The CPU.
    #[default]
    Cpu,
    /// DSA if this host has usable work queues, else the CPU.
    Auto,
    /// These work queues.
    Dsa(Vec<PathBuf>),
    /// A software DSA in the source's process.
    Model,
}

impl FromStr for ZeroCheckArg {
    type Err = String;

    fn from_str(text: &str) -> Result<ZeroCheckArg, String> {
        match text {
            "cpu" => return Ok(ZeroCheckArg::Cpu),
            "auto" => return Ok(ZeroCheckArg::Auto),
            "dsa:model" => return Ok(ZeroCheckArg::Model),
            _ => {}
        }
        let queues = text.strip_prefix("dsa:").filter(|queues| !queues.is_empty());
        let queues = queues.ok_or("expected cpu, auto, dsa:/dev/dsa/wqN.M[,...] or dsa:model")?;
        let path = |name: &str| {
            let path = PathBuf::from(name);
            match QueueName::of_path(&path) {
                Some(_) => Ok(path),
                None => Err(format!("`{name}` is no DSA work queue such as /dev/dsa/wq0.0")),
            }
        };
        queues.split(',').map(path).collect::<Result<_, _>>().map(ZeroCheckArg::Dsa)
    }
}

impl fmt::Display for ZeroCheckArg {
    /// As it is read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ZeroCheckArg::Cpu => f.write_str("cpu"),
            ZeroCheckArg::Auto => f.write_str("auto"),
            ZeroCheckArg::Model => f.write_str("dsa:model"),
            ZeroCheckArg::Dsa(queues) => {
                let queues: Vec<_> = queues.iter().map(|path| path.display().to_string()).collect();
                write!(f, "dsa:{}", queues.join(","))
            }
        }
    }
}

impl ZeroCheckArg {
    /// Opens what it names. The error is one line that says what to do.
    pub(crate) fn open(&self) -> Result<Arc<dyn ZeroFinders>, String> {
        match self {
            ZeroCheckArg::Cpu => Ok(cpu()),
            ZeroCheckArg::Model => Ok(Arc::new(model()?)),
            ZeroCheckArg::Dsa(files) => Ok(Arc::new(hardware(files)?)),
            ZeroCheckArg::Auto => {
                let files = usable_queues();
                if files.is_empty() {
                    return Ok(cpu());
                }
                let opened = hardware(&files).inspect_err(|reason| warn!(%reason, "no DSA"));
                Ok(opened.map_or_else(|_| cpu(), |finders| Arc::new(finders) as _))
            }
        }
    }
}

fn cpu() -> Arc<dyn ZeroFinders> {
    Arc::new(CpuFinders(ZeroCheck::detect()))
}

/// Work queues that this process can use, by their files; none on a host without DSA.
pub(crate) fn usable_queues() -> Vec<PathBuf> {
    let devices = martlet_dsa::find(Path::new(DEVICES));
    let devices = devices.inspect_err(|error: &FindError| info!(%error, "no DSA")).ok();
    let mut files = Vec::new();
    for device in devices.into_iter().flatten() {
        for queue in device.queues.iter().filter(|queue| device.obstacle(queue).is_none()) {
            files.push(Path::new(FILES).join(queue.name.to_string()));
        }
    }
    files
}

/// Opens work queues of this host.
pub(crate) fn hardware(files: &[PathBuf]) -> Result<DsaFinders, String> {
    let mut queues = Vec::with_capacity(files.len());
    for file in files {
        let opened = martlet_dsa::open(Path::new(DEVICES), file).map_err(|error| chain(&error))?;
        let device = QueueName::of_path(file).map_or(0, |name| name.device);
        let profile = DeviceProfile::default();
        info!(queue = opened.queue.name(), submitter = ?opened.submitter, "opened");
        queues.push(DsaQueue { queue: opened.queue, device, profile });
    }
    // Without them each process finds out by the device's latency what others do.
    let tokens = Tokens::open(Path::new(TOKENS));
    let tokens = tokens.inspect_err(|error| warn!(%error, "DSA is shared without tokens")).ok();
    Ok(DsaFinders::new(OffloadPolicy::Adaptive, queues, tokens, Arc::new(ProcessMemory)))
}

/// A software device of Sapphire Rapids' speed in real time. It gets all the work that it takes:
/// to try the driver is what it is for.
pub(crate) fn model() -> Result<DsaFinders, String> {
    let (queue, bus) = model_queue(DeviceConfig::sapphire_rapids())?;
    let queue = DsaQueue { queue, device: 0, profile: DeviceProfile::default() };
    Ok(DsaFinders::new(OffloadPolicy::CpuWhenFull, vec![queue], None, bus))
}

/// The first work queue of a software device in real time, and the bus that both use.
pub(crate) fn model_queue(config: DeviceConfig) -> Result<(Arc<WorkQueue>, Arc<SoftBus>), String> {
    let bus = SoftBus::new(Addressing::Process);
    let stage = Stage::new(SoftClock::real());
    let limits = config.queues.first().map(|queue| QueueLimits {
        batch_max: queue.batch_max,
        transfer_bytes_max: queue.transfer_bytes_max,
        credits: None,
    });
    let clock = Arc::clone(stage.clock());
    let model = DsaModel::new(config, Arc::clone(&bus) as _, clock, Faults::default());
    let model = model.map_err(|error| error.to_string())?;
    let seat = stage.seat(Arc::clone(&model) as _);
    let wait: Arc<dyn CompletionWait> = Arc::new(SeatWait::new(seat));
    let portal = model.portal(0).ok_or("the model has no work queue")?;
    let limits = limits.ok_or("the model has no work queue")?;
    Ok((WorkQueue::new("model", Box::new(portal), wait, limits), bus))
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_ram::{CHUNK_PAGES, Chunk, ChunkBits, GuestRam, RegionIndex};
    use martlet_units::{Gfn, PAGE_SIZE, PageCount, PageRange};

    #[test]
    fn words_are_read_as_they_are_written() {
        for text in ["cpu", "auto", "dsa:model", "dsa:/dev/dsa/wq0.0", "dsa:/dev/dsa/wq0.0,wq1.2"] {
            assert_eq!(
                text.parse::<ZeroCheckArg>().map(|arg| arg.to_string()),
                Ok(text.to_owned())
            );
        }
        for bad in ["", "dsa", "dsa:", "dsa:/dev/null", "gpu", "dsa:/dev/dsa/wq0.0,"] {
            assert!(bad.parse::<ZeroCheckArg>().is_err(), "{bad}");
        }
    }

    /// One bit anywhere in a chunk: every method of this host and the driver on the model agree.
    #[test]
    #[allow(unsafe_code)]
    // UNSAFETY: the test writes memory as a guest would.
    fn all_methods_see_any_single_bit() {
        let range = PageRange::try_new(Gfn(0), PageCount(CHUNK_PAGES)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range]).unwrap());
        let write = |bit: u64, value: u8| {
            let byte = ram.regions()[0].host_ptr(bit / 8 / PAGE_SIZE);
            // SAFETY: a byte of the region; only this thread uses it.
            unsafe { byte.add(usize::try_from(bit / 8 % PAGE_SIZE).unwrap()).write(value) };
        };
        (0..CHUNK_PAGES).for_each(|page| write(page * PAGE_SIZE * 8, 0));
        let instant = model_queue(DeviceConfig::instant()).unwrap();
        let queue = DsaQueue { queue: instant.0, device: 0, profile: DeviceProfile::default() };
        let always = OffloadPolicy::CpuWhenFull;
        let model: Arc<dyn ZeroFinders> =
            Arc::new(DsaFinders::new(always, vec![queue], None, instant.1));
        let mut finders: Vec<_> = ZeroCheck::supported()
            .map(|check| Arc::new(CpuFinders(check)) as Arc<dyn ZeroFinders>)
            .chain([model])
            .map(|finders| (finders.name(), finders.open(&ram, 0).unwrap()))
            .collect();
        let bits = CHUNK_PAGES * PAGE_SIZE * 8;
        let mut bit = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..300 {
            bit = bit.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (bit >> 20) % bits;
            write(at, 1 << (at % 8));
            let mut expected = ChunkBits::FULL;
            expected.clear(u32::try_from(at / 8 / PAGE_SIZE).unwrap());
            for (name, finder) in &mut finders {
                let chunk = Chunk::new(&ram, RegionIndex(0), 0, ChunkBits::FULL).unwrap();
                finder.submit(chunk);
                let found = finder.collect();
                assert_eq!(found, Some((chunk, expected)), "{name}, bit {at}");
            }
            write(at, 0);
        }
    }

    #[test]
    fn a_queue_that_is_not_there_is_named() {
        let arg: ZeroCheckArg = "dsa:/dev/dsa/wq99.7".parse().unwrap();
        let error = arg.open().err().unwrap();
        assert!(error.contains("wq99.7") && !error.contains('\n'), "{error}");
        assert!(ZeroCheckArg::Auto.open().is_ok());
    }
}
