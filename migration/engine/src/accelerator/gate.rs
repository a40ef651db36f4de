//! The policy's admission as the driver asks it.

use martlet_dsa::{Ask, Gate, Grant, Latency, Outcome, Tokens};
use martlet_policy::admission::{
    self, Admission, AdmissionConfig, Decision, DeviceProfile, OffloadPolicy, Request,
};
use martlet_units::Instant;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lets [`Admission`] decide, for all channels of a migration, and tells the host's other processes
/// what is outstanding.
pub struct PolicyGate {
    admission: Mutex<State>,
    /// The number of each queue's device, as other processes know it.
    devices: Vec<u16>,
    tokens: Option<Tokens>,
}

struct State {
    admission: Admission,
    /// Pages outstanding in other processes, queue by queue.
    others: Vec<u64>,
}

impl PolicyGate {
    /// A gate for these queues. Without tokens, other processes are known by the device's latency
    /// only.
    pub fn new(
        policy: OffloadPolicy,
        queues: &[(u16, DeviceProfile)],
        tokens: Option<Tokens>,
    ) -> PolicyGate {
        let profiles: Vec<DeviceProfile> = queues.iter().map(|(_, profile)| *profile).collect();
        let admission = Admission::new(AdmissionConfig::new(policy), &profiles);
        let others = vec![0; queues.len()];
        PolicyGate {
            admission: Mutex::new(State { admission, others }),
            devices: queues.iter().map(|(device, _)| *device).collect(),
            tokens,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate for PolicyGate {
    fn admit(&self, now: Instant, ask: Ask) -> Option<Grant> {
        let mut state = self.state();
        let State { admission, others } = &mut *state;
        if let Some(tokens) = &self.tokens {
            for (waiting, device) in others.iter_mut().zip(&self.devices) {
                *waiting = tokens.others(now, *device);
            }
        }
        let request = Request { pages: ask.pages, node: ask.node, channel: ask.channel };
        match admission.decide(now, request, others) {
            Decision::Cpu => None,
            Decision::Offload(admission::Grant { device, pages, ahead, at, tries }) => {
                if let (Some(tokens), Some(number)) = (&self.tokens, self.devices.get(device)) {
                    tokens.add(*number, pages);
                }
                Some(Grant { queue: device, tries, pages, ahead, at })
            }
        }
    }

    fn finish(&self, now: Instant, grant: Grant, outcome: Outcome) {
        let Grant { queue, tries, pages, ahead, at } = grant;
        if let (Some(tokens), Some(number)) = (&self.tokens, self.devices.get(queue)) {
            tokens.sub(*number, pages);
        }
        let grant = admission::Grant { device: queue, pages, ahead, at, tries };
        self.state().admission.finish(now, grant, to_policy(outcome));
    }

    fn heard(&self, now: Instant, queue: usize) {
        self.state().admission.on_heard(now, queue);
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
