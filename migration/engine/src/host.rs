//! What the engine asks of the host it runs on.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time that this process used so far, all threads.
pub(crate) fn process_cpu() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(used.tv_sec).unwrap_or(0), u32::try_from(used.tv_nsec).unwrap_or(0))
}

/// This boot of this host: processes with equal ids share `CLOCK_MONOTONIC`. All zeros, which
/// equal nobody's, where the kernel does not tell.
pub(crate) fn boot_id() -> [u8; 16] {
    let mut id = [0; 16];
    if let Ok(text) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::try_from(pair[0] * 16 + pair[1]).unwrap_or(0);
        }
    }
    id
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
