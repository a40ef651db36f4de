//! A finder of zero pages that lets a device do what it can.
#![allow(unsafe_code)]
// UNSAFETY: the driver takes addresses of guest memory, which is alive as long as the finder.

use super::gate::PolicyGate;
use martlet_device_io::Dma;
use martlet_dsa::{
    CpuCheck, EngineConfig, PageRun, SharedMemory, Tokens, WorkQueue, ZeroEngine, ZeroPages,
};
use martlet_policy::admission::{DeviceProfile, OffloadPolicy};
use martlet_ram::{
    CHUNK_PAGES, Chunk, ChunkBits, GuestRam, RegionIndex, ZeroCheck, ZeroFinder, ZeroFinders,
};
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A work queue that a migration may use.
pub struct DsaQueue {
    /// The queue.
    pub queue: Arc<WorkQueue>,
    /// The number of its device.
    pub device: u16,
    /// What is known of the device.
    pub profile: DeviceProfile,
}

/// Lets DSA devices find zero pages. One for all channels and migrations of a process.
pub struct DsaFinders {
    queues: Vec<Arc<WorkQueue>>,
    gate: Arc<PolicyGate>,
    dma: Arc<dyn Dma>,
    config: EngineConfig,
    check: ZeroCheck,
    /// Guest memory as the devices reach it, while a migration needs it.
    shared: Mutex<Weak<SharedMemory>>,
}

impl DsaFinders {
    /// Finders that offload to `queues` as the policy says. `dma` is the memory of all of them:
    /// with SVA, this process's own.
    pub fn new(
        policy: OffloadPolicy,
        queues: Vec<DsaQueue>,
        tokens: Option<Tokens>,
        dma: Arc<dyn Dma>,
    ) -> DsaFinders {
        let profiles: Vec<_> = queues.iter().map(|queue| (queue.device, queue.profile)).collect();
        DsaFinders {
            gate: Arc::new(PolicyGate::new(policy, &profiles, tokens)),
            queues: queues.into_iter().map(|queue| queue.queue).collect(),
            dma,
            config: EngineConfig::default(),
            check: ZeroCheck::detect(),
            shared: Mutex::new(Weak::new()),
        }
    }

    /// Guest memory, pinned once for all channels.
    fn share(&self, ram: &Arc<GuestRam>) -> io::Result<Arc<SharedMemory>> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = shared.upgrade() {
            return Ok(known);
        }
        let pieces: Vec<_> = (0..)
            .map(RegionIndex)
            .zip(ram.regions())
            .map(|(index, _)| ram.host_memory(index))
            .collect();
        let pinned = SharedMemory::pin(self.dma.as_ref(), &pieces).map_err(io::Error::other)?;
        *shared = Arc::downgrade(&pinned);
        Ok(pinned)
    }
}

impl ZeroFinders for DsaFinders {
    fn name(&self) -> String {
        let names: Vec<&str> = self.queues.iter().map(|queue| queue.name()).collect();
        format!("dsa ({})", names.join(", "))
    }

    fn open(&self, ram: &Arc<GuestRam>, channel: u16) -> io::Result<Box<dyn ZeroFinder>> {
        let config = EngineConfig { channel, ..self.config };
        let engine = ZeroEngine::new(
            config,
            self.queues.clone(),
            Arc::clone(&self.gate) as _,
            self.share(ram)?,
            self.dma.as_ref(),
            Cpu(self.check),
        )
        .map_err(io::Error::other)?;
        Ok(Box::new(DsaFinder {
            engine,
            ram: Arc::clone(ram),
            chunks: [None; martlet_dsa::JOBS],
            oldest: 0,
            runs: Vec::with_capacity(RUNS_MAX),
        }))
    }
}

/// Every other page of a chunk may be meant.
const RUNS_MAX: usize = martlet_dsa::JOB_PAGES_MAX / 2;
const _: () = assert!(martlet_dsa::JOB_PAGES_MAX as u64 == CHUNK_PAGES, "a job is a chunk");

/// The CPU's check, for the driver.
struct Cpu(ZeroCheck);

impl CpuCheck for Cpu {
    unsafe fn is_zero(&self, page: *const u8) -> bool {
        // SAFETY: the caller's promise is the same.
        unsafe { self.0.is_zero(page) }
    }
}

struct DsaFinder {
    // Before the memory: its drop waits for what the devices still read.
    engine: ZeroEngine<Cpu>,
    ram: Arc<GuestRam>,
    /// The chunks whose jobs are open; the first one is at `oldest`.
    chunks: [Option<Chunk>; martlet_dsa::JOBS],
    oldest: usize,
    /// Kept for its room.
    runs: Vec<PageRun>,
}

impl ZeroFinder for DsaFinder {
    fn depth(&self) -> usize {
        self.chunks.len()
    }

    fn pending(&self) -> usize {
        self.engine.open_jobs()
    }

    fn submit(&mut self, chunk: Chunk) {
        let region = self.ram.region(chunk.region()).expect("a chunk of this guest");
        self.runs.clear();
        for run in chunk.runs() {
            assert!(run.end <= region.pages(), "a chunk's pages are in its region");
            let address = region.host_ptr(run.start).expose_provenance() as u64;
            let pages = u32::try_from(run.end - run.start).expect("a chunk is small");
            // SAFETY: pages of the region's mapping, which `ram` keeps until the engine is gone.
            self.runs.push(unsafe { PageRun::new(address, pages) });
        }
        let place = (self.oldest + self.engine.open_jobs()) % self.chunks.len();
        self.engine.begin(&self.runs);
        self.chunks[place] = Some(chunk);
    }

    fn collect(&mut self) -> Option<(Chunk, ChunkBits)> {
        let zero = self.engine.collect()?;
        let chunk = self.chunks[self.oldest].take().expect("a chunk for each job");
        self.oldest = (self.oldest + 1) % self.chunks.len();
        Some((chunk, spread(&chunk, &zero)))
    }
}

/// From places among the pages that were asked for to places in the chunk.
fn spread(chunk: &Chunk, zero: &ZeroPages) -> ChunkBits {
    if *chunk.bits() == ChunkBits::FULL {
        return ChunkBits(*zero.words());
    }
    let mut bits = ChunkBits::EMPTY;
    for (place, page) in (0..zero.pages()).zip(chunk.bits().runs().flatten()) {
        if zero.is_zero(place) {
            bits.set(page);
        }
    }
    bits
}
