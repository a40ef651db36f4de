//! Waiting for a completion record.
#![allow(unsafe_code)]
// UNSAFETY: UMONITOR takes the address that is to be watched.

use crate::instructions::{self, Instructions};
use martlet_device_io::{DmaBlock, Waiter};
use martlet_units::Instant;
use std::sync::Arc;
use std::time::Duration;

/// The status byte of a completion record that has not been written yet.
#[derive(Clone, Copy, Debug)]
pub struct StatusByte<'a> {
    block: &'a DmaBlock,
    offset: usize,
}

impl<'a> StatusByte<'a> {
    pub(crate) fn new(block: &'a DmaBlock, offset: usize) -> StatusByte<'a> {
        StatusByte { block, offset }
    }

    /// Whether the device has written it. Acquires the rest of the record.
    pub fn is_written(&self) -> bool {
        self.block.load8(self.offset) != 0
    }
}

/// The clock of a device, and a place to wait for its answers.
pub trait CompletionWait: Send + Sync {
    /// The time.
    fn now(&self) -> Instant;

    /// Lets the device go on without waiting. Called in a loop, so it is cheap.
    fn poll(&self);

    /// Returns when the byte was written, at `until` at the latest; may return early for no reason.
    fn wait(&self, status: StatusByte<'_>, until: Instant);

    /// Lets some microseconds pass; may return early.
    fn let_pass(&self, time: Duration);
}

/// Waits where a model of a device has its driver wait.
#[derive(Clone)]
pub struct SeatWait(Arc<dyn Waiter>);

impl SeatWait {
    /// Waits at this seat.
    pub fn new(seat: Arc<dyn Waiter>) -> SeatWait {
        SeatWait(seat)
    }
}

impl CompletionWait for SeatWait {
    fn now(&self) -> Instant {
        self.0.now()
    }

    fn poll(&self) {
        self.0.poll();
    }

    fn wait(&self, status: StatusByte<'_>, until: Instant) {
        if !status.is_written() {
            self.0.wait(Some(until));
        }
    }

    fn let_pass(&self, time: Duration) {
        self.0.wait(Some(self.now().after(time)));
    }
}

/// Longest UMWAIT, in cycles of the time stamp counter. Linux limits it to as many by default
/// (`UMWAIT_DEFAULT`, `arch/x86/kernel/cpu/umwait.c`).
const UMWAIT_CYCLES: u64 = 100_000;
/// UMWAIT (or without it, spinning) for this long, which is more than an idle device takes for a
/// batch; then sleep.
const AWAKE: Duration = Duration::from_micros(50);
/// Without UMWAIT, spins between two looks at the clock.
const SPINS: u32 = 64;
/// One sleep. The kernel adds its timer slack, 50 us unless the thread has set another one.
const SLEEP: Duration = Duration::from_micros(20);

/// Waits on the host: UMWAIT on the record's cache line where the processor has it, a short spin
/// where not, then short sleeps. The clock is `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostWait {
    umwait: bool,
}

impl HostWait {
    /// For records at process addresses ([`crate::ProcessMemory`]), with what this processor has.
    pub(crate) fn for_process_addresses(instructions: Instructions) -> HostWait {
        HostWait { umwait: instructions.umwait }
    }

    fn rest(self, status: StatusByte<'_>) {
        if !self.umwait {
            for _ in 0..SPINS {
                if status.is_written() {
                    return;
                }
                std::hint::spin_loop();
            }
            return;
        }
        let address = status.block.at().0.saturating_add(u64::try_from(status.offset).unwrap_or(0));
        // SAFETY: the processor has WAITPKG; the address is that of a byte in a block that is
        // borrowed, as this type is only made together with process addresses.
        unsafe { instructions::umonitor(address) };
        // A record that was written before the monitor was armed wakes nobody.
        if !status.is_written() {
            // SAFETY: the processor has WAITPKG.
            unsafe { instructions::umwait(UMWAIT_CYCLES) };
        }
    }
}

impl CompletionWait for HostWait {
    fn now(&self) -> Instant {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        Instant(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }

    fn poll(&self) {}

    fn wait(&self, status: StatusByte<'_>, until: Instant) {
        let begin = self.now();
        loop {
            let now = self.now();
            if status.is_written() || now >= until {
                return;
            }
            if now.since(begin) < AWAKE {
                self.rest(status);
            } else {
                std::thread::sleep(SLEEP.min(until.since(now)));
            }
        }
    }
    fn let_pass(&self, time: Duration) {
        let end = self.now().after(time);
        while self.now() < end {
            (0..SPINS).for_each(|_| std::hint::spin_loop());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProcessMemory;
    use martlet_device_io::Dma;

    /// With and without UMWAIT, as far as this processor has it: a record that is written ends the
    /// wait, whenever it comes, and the limit ends it otherwise.
    #[test]
    fn a_record_or_the_limit_ends_a_wait() {
        let block = ProcessMemory.alloc(64, 64).unwrap();
        let ways = [Instructions::default(), Instructions::detect()];
        for wait in ways.map(HostWait::for_process_addresses) {
            let status = StatusByte::new(&block, 32);
            let begin = wait.now();
            wait.wait(status, begin.after(Duration::from_millis(2)));
            assert!(wait.now().since(begin) >= Duration::from_millis(2));
            assert!(!status.is_written());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(1));
                    block.store8(32, 1);
                });
                while !status.is_written() {
                    wait.wait(status, wait.now().after(Duration::from_secs(60)));
                }
            });
            wait.wait(status, wait.now().after(Duration::from_secs(60)));
            block.store8(32, 0);
            let begin = wait.now();
            wait.let_pass(Duration::from_micros(3));
            assert!(wait.now().since(begin) >= Duration::from_micros(3));
        }
    }
}
