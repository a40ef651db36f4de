//! The policy's admission as the driver asks it.

use martlet_dsa::{Ask, Gate, Grant, Latency, Outcome, Tokens};
use martlet_policy::admission::{
    self, Admission, AdmissionConfig, Decision, DeviceProfile, OffloadPolicy, Part, Request,
};
use martlet_units::Instant;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lets [`Admission`] decide, for all channels of a migration, and tells the host's other processes
/// what is outstanding.
pub(crate) struct PolicyGate {
    admission: Mutex<State>,
    /// Each queue's device: its number, as other processes know it, and what is known of it.
    devices: Vec<(u16, DeviceProfile)>,
    tokens: Option<Tokens>,
}

struct State {
    admission: Admission,
    /// Pages outstanding in other processes, queue by queue.
    others: Vec<u64>,
}

impl State {
    /// Whether the CPU is the second choice, and not due to be measured.
    fn prefers_device(&self) -> bool {
        let adaptive = match self.admission.policy() {
            OffloadPolicy::Adaptive | OffloadPolicy::AdaptiveSaving => true,
            OffloadPolicy::CpuOnly | OffloadPolicy::Block | OffloadPolicy::CpuWhenFull => false,
        };
        adaptive && !self.admission.cpu_is_due()
    }
}

impl PolicyGate {
    /// A gate for these queues. Without tokens, other processes are known by the device's latency
    /// only.
    pub(super) fn new(
        policy: OffloadPolicy,
        queues: &[(u16, DeviceProfile)],
        tokens: Option<Tokens>,
    ) -> PolicyGate {
        let profiles: Vec<DeviceProfile> = queues.iter().map(|(_, profile)| *profile).collect();
        let admission = Admission::new(AdmissionConfig::new(policy), &profiles);
        let others = vec![0; queues.len()];
        PolicyGate {
            admission: Mutex::new(State { admission, others }),
            devices: queues.to_vec(),
            tokens,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the host's other processes what a queue's device has of this one, and for how long.
    fn publish(&self, now: Instant, state: &State, queue: usize) {
        let (Some(tokens), Some((device, profile))) = (&self.tokens, self.devices.get(queue))
        else {
            return;
        };
        let queues = self.devices.iter().enumerate().filter(|(_, (other, _))| other == device);
        let pages: u64 = queues.map(|(queue, _)| state.admission.backlog(now, queue)).sum();
        let waiting = pages.saturating_add(state.others.get(queue).copied().unwrap_or(0));
        let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
        let time = profile.latency.saturating_add(profile.page_time.saturating_mul(waiting));
        tokens.publish(*device, u32::try_from(pages).unwrap_or(u32::MAX), now.after(time));
    }
}

impl Gate for PolicyGate {
    fn admit(&self, now: Instant, ask: Ask) -> Option<Grant> {
        let mut state = self.state();
        let State { admission, others } = &mut *state;
        if let Some(tokens) = &self.tokens {
            for (waiting, (device, _)) in others.iter_mut().zip(&self.devices) {
                *waiting = tokens.others(now, *device);
            }
        }
        let Ask { pages, pages_min, has_pending, channel } = ask;
        let request = Request { pages, channel };
        let part = Part { pages_min, has_pending };
        match admission.decide_part(now, request, part, others) {
            Decision::Cpu => None,
            Decision::Offload(admission::Grant { device, pages, ahead, at, tries }) => {
                self.publish(now, &state, device);
                Some(Grant { queue: device, tries, pages, ahead, at })
            }
        }
    }

    fn asks_again(&self) -> bool {
        self.state().prefers_device()
    }

    fn pause(&self, pages: u32) -> Duration {
        let state = self.state();
        if state.prefers_device() { state.admission.pause(pages) } else { Duration::ZERO }
    }

    fn finish(&self, now: Instant, grant: Grant, outcome: Outcome) {
        let Grant { queue, tries, pages, ahead, at } = grant;
        let grant = admission::Grant { device: queue, pages, ahead, at, tries };
        let mut state = self.state();
        state.admission.finish(now, grant, to_policy(outcome));
        self.publish(now, &state, queue);
    }

    fn cpu(&self, pages: u32, time: Duration) {
        self.state().admission.on_cpu(pages, time);
    }
}

fn to_policy(outcome: Outcome) -> admission::Outcome {
    match outcome {
        Outcome::Completed { latency, faulted } => {
            let latency = match latency {
                Latency::Measured(time) => admission::Latency::Measured(time),
                Latency::AtMost(time) => admission::Latency::AtMost(time),
            };
            admission::Outcome::Completed { latency, faulted }
        }
        Outcome::Rejected => admission::Outcome::Rejected,
        Outcome::TimedOut => admission::Outcome::TimedOut,
        Outcome::Failed => admission::Outcome::Failed,
        Outcome::Gone => admission::Outcome::Gone,
    }
}
