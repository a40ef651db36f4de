//! What the engine asks of the host it runs on.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time that this process used so far, all threads.
pub(crate) fn process_cpu() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(used.tv_sec).unwrap_or(0), u32::try_from(used.tv_nsec).unwrap_or(0))
}

/// The wall clock (`CLOCK_REALTIME`) minus `CLOCK_MONOTONIC`.
pub(crate) fn wall_clock_ns() -> i64 {
    let nanos = |id| {
        let time = clock_gettime(id);
        time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
    };
    nanos(ClockId::Realtime).saturating_sub(nanos(ClockId::Monotonic))
}

/// Names the `CLOCK_MONOTONIC` of this process: processes with equal names read the same clock. A
/// boot of a host has one for each time namespace. All zeros, which equal nobody's, where the
/// kernel does not tell.
pub(crate) fn clock_id() -> [u8; 16] {
    let mut id = [0; 16];
    if let Ok(text) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::try_from(pair[0] * 16 + pair[1]).unwrap_or(0);
        }
        for (byte, namespace) in id.iter_mut().zip(time_namespace().to_le_bytes()) {
            *byte ^= namespace;
        }
    }
    id
}

/// The number of this process's time namespace; 0 before Linux 5.6, where there is one clock.
fn time_namespace() -> u64 {
    let link = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    // As in `time:[4026531834]`.
    let digits = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect::<String>();
    digits.parse().unwrap_or(0)
}

/// Sixteen random bytes for ids and tokens.
pub(crate) fn random_id() -> std::io::Result<[u8; 16]> {
    let mut id = [0; 16];
    let mut filled = 0;
    while filled < id.len() {
        filled +=
            rustix::rand::getrandom(&mut id[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(id)
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A thread that outlives its maker, with a name that `top -H` shows.
pub(crate) fn spawn(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}
