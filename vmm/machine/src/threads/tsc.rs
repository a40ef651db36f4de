//! Rate of the time stamp counter, which a process has to find out by itself.

use core::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the counter is watched: two readings that are each good to 100 ns or so give the
/// rate to about 10 millionths.
const WATCH: Duration = Duration::from_millis(20);
/// Readings of which the best is taken, as the thread may lose the processor in the middle of one.
const READINGS: u32 = 16;

/// In kHz, measured once for the process against the monotonic clock.
pub(super) fn tsc_khz() -> u32 {
    static KHZ: OnceLock<u32> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let begin = Instant::now();
        let (cycles_before, before) = reading(begin);
        std::thread::sleep(WATCH);
        let (cycles_after, after) = reading(begin);
        let nanos = (after - before).as_nanos().max(1);
        let cycles = u128::from(cycles_after.saturating_sub(cycles_before));
        u32::try_from(cycles * 1_000_000 / nanos).unwrap_or(u32::MAX).max(1)
    })
}

/// The counter and the time at the same moment, as closely as it can be done.
fn reading(begin: Instant) -> (u64, Duration) {
    let one = || {
        let before = begin.elapsed();
        #[allow(unused_unsafe, unsafe_code, reason = "newer compilers call it safe")]
        // SAFETY: every x86-64 processor has the instruction.
        let cycles = unsafe { _rdtsc() };
        let after = begin.elapsed();
        (after - before, cycles, before + (after - before) / 2)
    };
    let best = (1..READINGS).fold(one(), |best, _| {
        let next = one();
        if next.0 < best.0 { next } else { best }
    });
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_plausible_and_stays() {
        let khz = tsc_khz();
        assert!((400_000..10_000_000).contains(&khz), "{khz}");
        assert_eq!(tsc_khz(), khz);
    }
}
