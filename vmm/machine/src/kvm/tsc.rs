//! Letting the guest's time stamp counter go on by the time that the guest stood.
//!
//! Documentation/virt/kvm/devices/vcpu.rst, section 4.1, describes the method. The source reads its
//! own TSC and the real time together; the destination does the same and adds what lies between
//! to each vCPU's offset, so that vCPUs keep their distances and two loads of one state agree.

use crate::vcpu::lock;
use std::sync::Mutex;

/// A stop longer than this is no migration's blackout but a wrong clock.
const ELAPSED_NS_MAX: u64 = 600 * 1_000_000_000;

/// A host's TSC and real time, read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) host_tsc: u64,
    pub(super) realtime_ns: u64,
}

/// From the source's offsets to the destination's; set by loading a VM's state.
#[derive(Default)]
pub(super) struct TscPlan {
    /// Added to each offset, wrapping.
    shift: Mutex<Option<u64>>,
}

impl TscPlan {
    /// Plans from the moment that the source saved and this host's present one; both `None` where
    /// a kernel does not give them.
    pub(super) fn plan(&self, source: Option<Moment>, here: Option<Moment>, tsc_khz: u32) {
        let shift = source.zip(here).map(|(source, here)| {
            let elapsed_ns = elapsed_ns(source.realtime_ns, here.realtime_ns);
            let cycles = u128::from(elapsed_ns) * u128::from(tsc_khz) / 1_000_000;
            let cycles = u64::try_from(cycles).unwrap_or(0);
            source.host_tsc.wrapping_sub(here.host_tsc).wrapping_add(cycles)
        });
        *lock(&self.shift) = shift;
    }

    /// The offset of a vCPU whose offset was this at the source.
    pub(super) fn destination_offset(&self, source: u64) -> Option<u64> {
        lock(&self.shift).map(|shift| source.wrapping_add(shift))
    }

    /// Time between two readings of real time; 0 if the clocks contradict each other.
    pub(super) fn elapsed_ns(&self, source: u64, here: u64) -> u64 {
        elapsed_ns(source, here)
    }
}

/// See [`TscPlan::elapsed_ns`].
pub(super) fn elapsed_ns(source: u64, here: u64) -> u64 {
    let elapsed = here.saturating_sub(source);
    if elapsed > ELAPSED_NS_MAX { 0 } else { elapsed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_keeps_its_offsets() {
        let plan = TscPlan::default();
        let source = Moment { host_tsc: 1_000_000, realtime_ns: 5_000_000 };
        let here = Moment { host_tsc: 1_000_000 + 2_000, realtime_ns: 5_001_000 };
        plan.plan(Some(source), Some(here), 2_000_000);
        assert_eq!(plan.destination_offset(7), Some(7));
    }

    #[test]
    fn another_host_makes_up_for_its_own_counter() {
        let plan = TscPlan::default();
        let source = Moment { host_tsc: 1_000_000, realtime_ns: 5_000_000 };
        let here = Moment { host_tsc: 10, realtime_ns: 5_001_000 };
        plan.plan(Some(source), Some(here), 2_000_000);
        // Guest TSC at the source 1_000_007; 2000 cycles later here 1_002_007.
        assert_eq!(plan.destination_offset(7).map(|o| o.wrapping_add(10)), Some(1_002_007));
    }

    #[test]
    fn contradicting_clocks_stand_still() {
        assert_eq!(elapsed_ns(10, 5), 0);
        assert_eq!(elapsed_ns(0, u64::MAX), 0);
        assert_eq!(elapsed_ns(5, 10), 5);
    }
}
