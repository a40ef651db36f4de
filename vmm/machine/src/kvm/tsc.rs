//! Letting a guest's clocks go on by the time that it stood.
//!
//! Documentation/virt/kvm/devices/vcpu.rst, section 4.1, describes the method for time stamp
//! counters. The source reads its own TSC and its clock together; the destination does the same and
//! adds what lies between to each vCPU's offset, so that vCPUs keep their distances and two loads
//! of one state agree. The clock is `CLOCK_MONOTONIC`, and how two hosts' differ was measured by
//! the engine: their wall clocks are set by people and differ by whatever those did.

use crate::clock;
use crate::vcpu::backend::BackendError;
use crate::vcpu::lock;
use martlet_units::{ClockOffset, Instant};
use std::sync::Mutex;
use std::time::Duration;

/// No guest stands longer: the protocol gives a switchover up far earlier, also one that compares
/// all memory.
const STOOD_MAX: Duration = Duration::from_secs(3600);

/// A host's TSC and its clock, read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) host_tsc: u64,
    pub(super) at: Instant,
}

/// From the source's clocks to the destination's; set by loading a VM's state, used by its vCPUs.
#[derive(Default)]
pub(super) struct TscPlan(Mutex<Plan>);

#[derive(Clone, Copy, Default)]
struct Plan {
    /// Added to each offset, wrapping.
    shift: Option<u64>,
    /// How the source's clock differs.
    source: Option<ClockOffset>,
}

impl TscPlan {
    /// Plans from the moment that the source saved and this host's present one; both `None` where
    /// a kernel does not give them.
    pub(super) fn plan(
        &self,
        saved: Option<Moment>,
        here: Option<Moment>,
        source: Option<ClockOffset>,
        tsc_khz: u32,
    ) -> Result<(), BackendError> {
        let shift = match saved.zip(here) {
            Some((saved, here)) => {
                let stood = stood(Some(saved.at), source, here.at)?;
                let cycles = cycles(stood, tsc_khz);
                Some(saved.host_tsc.wrapping_sub(here.host_tsc).wrapping_add(cycles))
            }
            None => None,
        };
        *lock(&self.0) = Plan { shift, source };
        Ok(())
    }

    /// The offset of a vCPU whose offset was this at the source.
    pub(super) fn destination_offset(&self, saved: u64) -> Option<u64> {
        lock(&self.0).shift.map(|shift| saved.wrapping_add(shift))
    }

    /// What a counter shows now that showed this when it was saved.
    pub(super) fn advance(
        &self,
        saved: u64,
        saved_at: Option<Instant>,
        tsc_khz: u32,
    ) -> Result<u64, BackendError> {
        let stood = stood(saved_at, lock(&self.0).source, clock::now())?;
        Ok(saved.wrapping_add(cycles(stood, tsc_khz)))
    }
}

/// How long a guest has been standing that was saved at this moment of the source's clock. Zero,
/// so that its clocks stood still as well, where that can't be known: an older source says neither
/// when it saved nor how the clocks differ.
pub(super) fn stood(
    saved_at: Option<Instant>,
    source: Option<ClockOffset>,
    now: Instant,
) -> Result<Duration, BackendError> {
    let Some((saved_at, source)) = saved_at.zip(source) else { return Ok(Duration::ZERO) };
    let stood = now.since(source.from_peer(saved_at));
    if stood > STOOD_MAX {
        let reason = format!(
            "by the clocks' difference it was saved {} s ago, and no guest stands for so long",
            stood.as_secs()
        );
        return Err(BackendError::state(reason));
    }
    Ok(stood)
}

fn cycles(time: Duration, tsc_khz: u32) -> u64 {
    let cycles = time.as_nanos() * u128::from(tsc_khz) / 1_000_000;
    u64::try_from(cycles).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KHZ: u32 = 2_000_000;

    fn moment(host_tsc: u64, at_ns: u64) -> Moment {
        Moment { host_tsc, at: Instant(at_ns) }
    }

    fn planned(saved: Moment, here: Moment, source: ClockOffset) -> Option<u64> {
        let plan = TscPlan::default();
        plan.plan(Some(saved), Some(here), Some(source), KHZ).unwrap();
        plan.destination_offset(7)
    }

    #[test]
    fn one_host_keeps_its_offsets() {
        let (saved, here) = (moment(1_000_000, 5_000_000), moment(1_002_000, 5_001_000));
        assert_eq!(planned(saved, here, ClockOffset::ONE_CLOCK), Some(7));
    }

    #[test]
    fn another_host_makes_up_for_its_own_counter_and_clock() {
        // The source booted 4 ms earlier.
        let source = ClockOffset { ns: 4_000_000, error: Duration::from_nanos(50) };
        let (saved, here) = (moment(1_000_000, 5_000_000), moment(10, 1_001_000));
        // Guest TSC at the source 1_000_007; 2000 cycles later here 1_002_007.
        assert_eq!(planned(saved, here, source).map(|o| o.wrapping_add(10)), Some(1_002_007));
    }

    #[test]
    fn a_stop_of_unknown_length_is_none() {
        let (then, now) = (Some(Instant(5)), Instant(9_000));
        assert_eq!(stood(then, None, now).unwrap(), Duration::ZERO);
        assert_eq!(stood(None, Some(ClockOffset::ONE_CLOCK), now).unwrap(), Duration::ZERO);
        // Two readings of clocks that are compared with an error.
        let ahead = ClockOffset { ns: -10_000, error: Duration::from_micros(20) };
        assert_eq!(stood(then, Some(ahead), now).unwrap(), Duration::ZERO);
    }

    #[test]
    fn a_stop_that_no_protocol_allows_is_refused() {
        let now = Instant(590 * 60 * 1_000_000_000);
        let error = stood(Some(Instant(0)), Some(ClockOffset::ONE_CLOCK), now).unwrap_err();
        assert!(error.to_string().contains("35400 s"), "{error}");
    }
}
