//! How fast each zero check is, beside the plain reading of the same memory.
//!
//! `cargo run --release -p martlet-ram --example zero_check [MiB]`
#![allow(unsafe_code)]
// UNSAFETY: reads this program's own memory as guest memory is read.

use martlet_ram::{CHUNK_PAGES, ChunkBits, GuestRam, RamRegion, ZeroCheck};
use martlet_units::{ByteCount, Gfn, PageRange};
use std::time::{Duration, Instant};

const ROUNDS: u32 = 9;

fn main() {
    let mib: u64 = std::env::args().nth(1).map_or(1024, |arg| arg.parse().expect("MiB"));
    let pages = ByteCount(mib << 20).to_whole_pages().expect("whole pages");
    let range = PageRange::try_new(Gfn(0), pages).expect("not empty");
    let ram = GuestRam::create(&[range]).expect("memory");
    let region = &ram.regions()[0];
    region.populate(0..region.pages()).expect("populate");

    println!("{mib} MiB of zero pages, best of {ROUNDS}");
    let plain = best(|| sum(region));
    print_rate("read", region, plain);
    for check in ZeroCheck::supported() {
        let time = best(|| count_zero(region, &check));
        print_rate(check.name(), region, time);
        println!("{:>8} {:.0} % of reading", "", 100.0 * plain.as_secs_f64() / time.as_secs_f64());
    }

    for page in 0..region.pages() {
        // SAFETY: a page of the region; nobody else is here.
        unsafe { region.host_ptr(page).write_bytes(0x5a, 4096) };
    }
    println!("the same, full of content");
    for check in ZeroCheck::supported() {
        let time = best(|| count_zero(region, &check));
        let per_page = time.as_nanos() / u128::from(region.pages());
        println!("{:>8} {per_page} ns a page", check.name());
    }
}

fn best<T>(mut run: impl FnMut() -> T) -> Duration {
    let time = |_| {
        let start = Instant::now();
        std::hint::black_box(run());
        start.elapsed()
    };
    (0..ROUNDS).map(time).min().unwrap_or_default()
}

fn print_rate(name: &str, region: &RamRegion, time: Duration) {
    let bytes = u32::try_from(region.len_bytes() >> 20).map_or(0.0, f64::from) / 1024.0;
    println!("{name:>8} {:.2} GiB/s", bytes / time.as_secs_f64());
}

/// Reads all of it with the widest loads that the build's target has.
fn sum(region: &RamRegion) -> u64 {
    let bytes = usize::try_from(region.len_bytes()).expect("mapped");
    // SAFETY: the whole mapping; nobody writes it during the call.
    let words = unsafe { std::slice::from_raw_parts(region.host_ptr(0).cast::<u64>(), bytes / 8) };
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { sum_avx2(words) };
    }
    words.iter().fold(0, |all, word| all | word)
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(words: &[u64]) -> u64 {
    words.iter().fold(0, |all, word| all | word)
}

fn count_zero(region: &RamRegion, check: &ZeroCheck) -> u64 {
    let whole_chunks = 0..region.pages() / CHUNK_PAGES;
    let count = |chunk| {
        // SAFETY: a whole chunk of the region's mapping.
        unsafe { check.zero_pages(region.host_ptr(chunk * CHUNK_PAGES), &ChunkBits::FULL) }.count()
    };
    whole_chunks.map(|chunk| u64::from(count(chunk))).sum()
}
