//! How long things take, and where each figure comes from.

use martlet_units::BytesPerSec;
use std::time::Duration;

/// The times of a device. All of them are parameters: a model that is as fast as its host is
/// [`Timing::instant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// What the device reads from memory, all engines together: they share it evenly (processor
    /// sharing). `None` for no limit.
    pub fabric: Option<BytesPerSec>,
    /// What a descriptor occupies its engine for, whatever it does.
    pub descriptor: Duration,
    /// From the end of an operation's work to its completion record: passes without occupying
    /// anything, so operations behind one another overlap in it.
    pub latency: Duration,
    /// What an ENQCMD takes its caller, taken or not: it waits for the device's answer. Virtual
    /// clocks are moved by it.
    pub enqcmd: Duration,
    /// What a page fault that is not waited for costs on top.
    pub fault: Duration,
}

impl Timing {
    /// Sapphire Rapids, as published measurements of it say.
    ///
    /// | | value | origin |
    /// |---|---|---|
    /// | fabric | 31.7 GB/s | LightDSA's data: comparing 4 KiB pages with a pattern in batches of 32 on 4 engines, 29.7 GiB/s (0.129 us a page); 1 engine comes to 28.7, so engines share one path |
    /// | descriptor | 35 ns | the same, 64-byte operations in batches: 0.03 to 0.05 us each |
    /// | latency | 0.88 us | the same: a single 4 KiB comparison takes 1.01 us, of which 0.13 us are the reading |
    /// | ENQCMD | 0.22 us | the same: back-to-back single submissions of one thread, 0.19 to 0.22 us; DSAssassin measured 558 to 598 cycles |
    /// | fault | 0.5 us | derived: touch-and-resume over untouched pages comes to 5.4 GiB/s, 0.7 us a page with everything |
    pub const fn sapphire_rapids() -> Timing {
        Timing {
            fabric: Some(BytesPerSec(31_700_000_000)),
            descriptor: Duration::from_nanos(35),
            latency: Duration::from_nanos(880),
            enqcmd: Duration::from_nanos(220),
            fault: Duration::from_nanos(500),
        }
    }

    /// Everything takes no time at all: for tests of what is done, not when.
    pub const fn instant() -> Timing {
        Timing {
            fabric: None,
            descriptor: Duration::ZERO,
            latency: Duration::ZERO,
            enqcmd: Duration::ZERO,
            fault: Duration::ZERO,
        }
    }

    /// How long `bytes` over the fabric occupy it alone, in picoseconds.
    pub(crate) fn transfer_ps(&self, bytes: u64) -> u64 {
        let Some(BytesPerSec(rate)) = self.fabric else { return 0 };
        let picos = u128::from(bytes) * 1_000_000_000_000 / u128::from(rate.max(1));
        u64::try_from(picos).unwrap_or(u64::MAX)
    }
}

/// A duration in picoseconds; saturates after 200 days.
pub(crate) fn ps(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_takes_what_was_measured() {
        let timing = Timing::sapphire_rapids();
        let page = timing.transfer_ps(4096);
        assert!((128_000..131_000).contains(&page), "{page} ps");
        let alone = page + ps(timing.latency);
        assert!((1_000_000..1_020_000).contains(&alone), "{alone} ps");
        assert_eq!(Timing::instant().transfer_ps(u64::MAX), 0);
    }
}
