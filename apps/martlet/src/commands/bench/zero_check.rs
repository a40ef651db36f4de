//! `bench zero-check`: how fast each method tells zero pages from others, beside the plain reading
//! of the same memory.
#![allow(unsafe_code)]
// UNSAFETY: fills and reads this process's own memory as guest memory is used.

use super::TableOutput;
use crate::accelerator;
use crate::cli::{BenchZeroCheckArgs, ZeroMethodArg};
use crate::failure::Failure;
use crate::report_json::round_to;
use crate::view::table::Table;
use martlet_ram::{
    CHUNK_PAGES, Chunk, ChunkBits, CpuFinders, GuestRam, RamRegion, RegionIndex, ZeroCheck,
    ZeroFinder, ZeroFinders,
};
use martlet_units::{Gfn, PAGE_SIZE, PageCount, PageRange};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory that is checked: far more than caches hold.
const CHUNKS: u64 = 256;
/// Passes over it; the best one counts, as others may use the host at the same time.
const PASSES: u32 = 5;

#[derive(Debug, Serialize)]
struct ResultJson {
    /// Plain reading by one core.
    read_gib_s: f64,
    rows: Vec<RowJson>,
}

#[derive(Debug, Serialize)]
struct RowJson {
    method: String,
    zero_percent: u8,
    pages_per_s: f64,
    gib_s: f64,
    /// CPU time of this process for a million pages.
    cpu_s_per_million_pages: f64,
    /// From the submission of a chunk of 512 pages to its answer.
    latency_p50_us: f64,
    latency_p99_us: f64,
    /// Whether a model played the device, on the same CPU.
    modelled: bool,
}

/// `martlet bench zero-check`.
pub(crate) fn run(args: &BenchZeroCheckArgs, output: TableOutput) -> Result<(), Failure> {
    let pages = PageCount(CHUNKS * CHUNK_PAGES);
    let range = PageRange::try_new(Gfn(0), pages).expect("not empty");
    let ram = GuestRam::create(&[range]).map_err(|e| Failure::because("no memory", &e))?;
    let ram = Arc::new(ram);
    let region = ram.regions().first().expect("one region");
    let methods = methods(args.method)?;
    fill(region, 100);
    let read = best(|| {
        std::hint::black_box(read_all(region));
    });
    let mut rows = Vec::new();
    for zero in &args.zero {
        fill(region, *zero);
        for method in &methods {
            rows.push(measure(method, &ram, *zero)?);
        }
    }
    let read_gib_s = round_to(gib_per_s(region, read), 100.0);
    let table = table(&rows, read_gib_s);
    output.show(std::slice::from_ref(&table), &ResultJson { read_gib_s, rows }, || table.svg())
}

struct Method {
    name: String,
    finders: Arc<dyn ZeroFinders>,
    modelled: bool,
}

fn methods(wanted: ZeroMethodArg) -> Result<Vec<Method>, Failure> {
    let mut methods = Vec::new();
    if wanted != ZeroMethodArg::Dsa {
        for check in ZeroCheck::supported() {
            let finders: Arc<dyn ZeroFinders> = Arc::new(CpuFinders(check));
            methods.push(Method { name: finders.name(), finders, modelled: false });
        }
    }
    if wanted != ZeroMethodArg::Cpu {
        let queues = accelerator::usable_queues();
        if !queues.is_empty() {
            let finders = accelerator::hardware(&queues).map_err(Failure::Failed)?;
            let finders: Arc<dyn ZeroFinders> = Arc::new(finders);
            methods.push(Method { name: finders.name(), finders, modelled: false });
        }
        let finders: Arc<dyn ZeroFinders> =
            Arc::new(accelerator::model().map_err(Failure::Failed)?);
        methods.push(Method { name: finders.name(), finders, modelled: true });
    }
    Ok(methods)
}

/// Gives this share of the pages only zeros, spread evenly, and the others content from their
/// first word on.
fn fill(region: &RamRegion, zero_percent: u8) {
    for page in 0..region.pages() {
        let is_zero = page * 37 % 100 < u64::from(zero_percent);
        // SAFETY: a page of the region; nobody else is here.
        unsafe { region.host_ptr(page).write_bytes(if is_zero { 0 } else { 0x5a }, 4096) };
    }
}

fn measure(method: &Method, ram: &Arc<GuestRam>, zero: u8) -> Result<RowJson, Failure> {
    let cannot = |e: std::io::Error| Failure::because(&method.name, &e);
    let mut finder = method.finders.open(ram, 0).map_err(cannot)?;
    let region = ram.regions().first().expect("one region");
    let mut latencies = Vec::new();
    let (mut time, mut cpu) = (Duration::MAX, Duration::MAX);
    for _ in 0..PASSES {
        let (begin, cpu_begin) = (Instant::now(), process_cpu());
        let found = pass(finder.as_mut(), ram, &mut latencies);
        let (took, cpu_took) = (begin.elapsed(), process_cpu().saturating_sub(cpu_begin));
        (time, cpu) = (time.min(took), cpu.min(cpu_took));
        let expected = (0..region.pages()).filter(|p| p * 37 % 100 < u64::from(zero)).count();
        if found != expected as u64 {
            let name = &method.name;
            let text = format!("{name} found {found} zero pages of {expected}: please report this");
            return Err(Failure::Failed(text));
        }
    }
    latencies.sort_unstable();
    let at = |percent: usize| {
        let place = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        let latency = latencies.get(place).copied().unwrap_or_default();
        round_to(latency.as_secs_f64() * 1e6, 10.0)
    };
    #[expect(clippy::cast_precision_loss, reason = "some hundred thousand pages")]
    let pages = region.pages() as f64;
    Ok(RowJson {
        method: method.name.clone(),
        zero_percent: zero,
        pages_per_s: (pages / time.as_secs_f64()).round(),
        gib_s: round_to(gib_per_s(region, time), 100.0),
        cpu_s_per_million_pages: round_to(cpu.as_secs_f64() / pages * 1e6, 1e4),
        latency_p50_us: at(50),
        latency_p99_us: at(99),
        modelled: method.modelled,
    })
}

/// All chunks once, as a lane does it; how many pages were zero.
fn pass(finder: &mut dyn ZeroFinder, ram: &GuestRam, latencies: &mut Vec<Duration>) -> u64 {
    let mut begun = std::collections::VecDeque::with_capacity(finder.depth());
    let mut found = 0;
    let mut collect = |finder: &mut dyn ZeroFinder, begun: &mut std::collections::VecDeque<_>| {
        if let (Some((_, zero)), Some(at)) = (finder.collect(), begun.pop_front()) {
            latencies.push(Instant::elapsed(&at));
            found += u64::from(zero.count());
        }
    };
    for index in 0..CHUNKS {
        if finder.pending() == finder.depth() {
            collect(finder, &mut begun);
        }
        begun.push_back(Instant::now());
        let chunk = Chunk::new(ram, RegionIndex(0), index, ChunkBits::FULL);
        finder.submit(chunk.expect("the memory has all chunks"));
    }
    while finder.pending() > 0 {
        collect(finder, &mut begun);
    }
    found
}

fn best(mut run: impl FnMut()) -> Duration {
    let time = |_| {
        let begin = Instant::now();
        run();
        begin.elapsed()
    };
    (0..PASSES).map(time).min().unwrap_or_default()
}

fn gib_per_s(region: &RamRegion, time: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let gib = (region.pages() * PAGE_SIZE) as f64 / f64::from(1 << 30);
    gib / time.as_secs_f64().max(1e-9)
}

fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Reads all of it with the widest loads that the compiler finds.
fn read_all(region: &RamRegion) -> u64 {
    let words = usize::try_from(region.pages() * PAGE_SIZE / 8).expect("it is mapped");
    // SAFETY: the whole mapping; nobody writes it during the call.
    let words = unsafe { std::slice::from_raw_parts(region.host_ptr(0).cast::<u64>(), words) };
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { or_avx2(words) };
    }
    or(words)
}

#[inline(always)]
fn or(words: &[u64]) -> u64 {
    words.iter().fold(0, |all, word| all | word)
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn or_avx2(words: &[u64]) -> u64 {
    or(words)
}

fn table(rows: &[RowJson], read_gib_s: f64) -> Table {
    let mut table = Table::new(
        "zero check, one thread",
        &["method", "zero %", "Mpages/s", "GiB/s", "CPU s/Mpage", "p50 us", "p99 us"],
    );
    for row in rows {
        table.row([
            if row.modelled { format!("{} *", row.method) } else { row.method.clone() },
            row.zero_percent.to_string(),
            format!("{:.2}", row.pages_per_s / 1e6),
            format!("{:.2}", row.gib_s),
            format!("{:.4}", row.cpu_s_per_million_pages),
            format!("{:.1}", row.latency_p50_us),
            format!("{:.1}", row.latency_p99_us),
        ]);
    }
    table.note(format!("measured, real time; plain reading by one core: {read_gib_s:.2} GiB/s"));
    table.note("latency: from the submission of 512 pages to their answer");
    if rows.iter().any(|row| row.modelled) {
        table.note("* the device is a model whose work this CPU does: no figure of hardware");
    }
    table
}
