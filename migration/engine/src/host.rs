//! What the engine asks of the host it runs on.

use crate::cgroup;
use martlet_protocol::ClockKey;
use martlet_units::ByteCount;
use rustix::time::{ClockId, clock_gettime};
use std::os::unix::ffi::OsStrExt;
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

/// Stands for the `CLOCK_MONOTONIC` of this process: processes with equal keys read the same clock.
/// A boot of a host has one for each time namespace. `None` where the kernel does not tell.
pub(crate) fn clock_key() -> Option<ClockKey> {
    let mut facts = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    // As in `time:[4026531834]`; there is none before Linux 5.6, and one clock.
    let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    facts.extend_from_slice(namespace.as_os_str().as_bytes());
    Some(ClockKey::new(&facts))
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

/// Runs what may panic, and catches that: `Err` says what it panicked with, as one line. Whatever
/// it worked on is not to be used after it, but to be dropped.
pub(crate) fn guarded<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!("internal error: {}", text.unwrap_or("a panic without words"))
    })
}

/// Memory that this process may have: this host's, or less if its control groups say so.
pub(crate) fn memory() -> ByteCount {
    let info = rustix::system::sysinfo();
    let host = info.totalram.saturating_mul(u64::from(info.mem_unit));
    ByteCount(cgroup::memory_limit().map_or(host, |limit| limit.min(host)))
}

/// A thread that outlives its maker, with a name that `top -H` shows.
pub(crate) fn spawn(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}
