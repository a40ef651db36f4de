//! The channels that bring an attempt's pages, and who reads them.

use super::io::{Intake, Look};
use crate::DestinationVmm;
use core::time::Duration;
use martlet_units::Instant;

/// The thread stays awake this long for a blackout that was announced.
const AWAKE_MAX: Duration = Duration::from_millis(200);

/// Last pages beyond this are received by the channels' threads, side by side.
const LAST_BYTES_AWAKE_MAX: u64 = 8 << 20;

/// The channels, once there are some.
#[derive(Default)]
pub(super) struct Receiving {
    intake: Option<Box<dyn Intake>>,
    /// Set while the attempt reads the channels itself, without sleeping.
    awake: Option<Awake>,
}

#[derive(Clone, Copy)]
struct Awake {
    until: Instant,
    bytes_before: u64,
}

impl Receiving {
    pub(super) fn open(&mut self, intake: Box<dyn Intake>) {
        self.intake = Some(intake);
    }

    /// Breaks the channels.
    pub(super) fn drop_intake(&mut self) {
        self.fall_asleep();
        self.intake = None;
    }

    /// Reads nothing more, whoever would.
    pub(super) fn close(&mut self) {
        if let Some(intake) = &mut self.intake {
            intake.close();
        }
    }

    /// The source is being told that a round is in.
    pub(super) fn tell_round(&mut self, round: u32) {
        if let Some(intake) = &mut self.intake {
            intake.tell_round(round);
        }
    }

    pub(super) fn is_awake(&self) -> bool {
        self.awake.is_some()
    }

    /// The blackout is near: whoever reads the channels and the vCPUs' threads stay awake.
    pub(super) fn arm(&mut self, now: Instant, vmm: &dyn DestinationVmm) {
        vmm.arm(AWAKE_MAX);
        if let Some(intake) = &mut self.intake {
            intake.take_over();
            let bytes_before = intake.bytes();
            self.awake = Some(Awake { until: now.after(AWAKE_MAX), bytes_before });
        }
    }

    /// Reads what has come, if that is the attempt's to do. Whether there was anything.
    pub(super) fn look(&mut self) -> bool {
        match &mut self.intake {
            Some(intake) if self.awake.is_some() => intake.look() == Look::Busy,
            _ => false,
        }
    }

    /// Goes to sleep if the blackout does not come, or comes with too many pages.
    pub(super) fn stay_awake(&mut self, now: Instant) {
        let Some(Awake { until, bytes_before }) = self.awake else { return };
        let received = self.intake.as_ref().map_or(0, |intake| intake.bytes());
        if now >= until || received.saturating_sub(bytes_before) > LAST_BYTES_AWAKE_MAX {
            self.fall_asleep();
        }
    }

    /// The guest was started: nothing comes by the channels any more, and their threads, woken now,
    /// would keep the vCPUs from running.
    pub(super) fn leave_taken_over(&mut self) {
        self.awake = None;
    }

    pub(super) fn fall_asleep(&mut self) {
        if self.awake.take().is_some()
            && let Some(intake) = &mut self.intake
        {
            intake.give_back();
        }
    }
}
