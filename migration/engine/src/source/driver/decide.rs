//! What is measured while the guest runs, and what follows from it.

use super::{Driver, Then};
use crate::Outrun;
use martlet_policy::{self as policy, AutoConverge, RoundResult, predict};
use martlet_protocol::{Decision, SourceEvent};
use martlet_transport::monotonic_now;
use martlet_units::{ByteCount, BytesPerSec, PageCount};
use martlet_wire::control::Control;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::info;

/// Smaller rounds measure the way's latency, not its width.
const BANDWIDTH_SAMPLE_MIN: ByteCount = ByteCount(1 << 20);

/// Whoever has the guest stopped for as long as the rest takes accepts a blackout of at least this,
/// whatever was predicted: only a link that carries nothing any more sets the guest running again.
const WANTED_STOP: Duration = Duration::from_secs(5);

fn per_second(pages: PageCount, time: Duration) -> u64 {
    let nanos = time.as_nanos().max(1);
    u64::try_from(u128::from(pages.0) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

impl Driver<'_> {
    /// Takes from a message what is measured.
    pub(super) fn note(&mut self, message: &Control) {
        match message {
            Control::RoundReceived(received) => {
                let sent = self.sent.bytes.load(Ordering::Relaxed);
                if let Some(round) = &mut self.round
                    && round.number == received.round
                {
                    let took = monotonic_now().since(round.started);
                    round.took = Some(took);
                    let bytes = ByteCount(sent - round.bytes_before);
                    if bytes >= BANDWIDTH_SAMPLE_MIN || self.measured.bandwidth == BytesPerSec(0) {
                        self.measured.bandwidth = BytesPerSec::measured(bytes, took);
                    }
                }
            }
            Control::Rehearsed(rehearsed) => {
                // Nothing there took longer than the answer did: what is predicted, and with it how
                // long the guest may stand, is not for the destination to say.
                let waited = monotonic_now().since(self.rehearsed_at);
                self.measured.load = waited.min(Duration::from_nanos(rehearsed.load_ns));
                self.measured.start = waited.min(Duration::from_nanos(rehearsed.start_ns));
            }
            _ => {}
        }
    }

    /// A round is over: what did the guest do meanwhile, and is it time?
    pub(super) fn decide(&mut self) {
        let (Some(tracker), Some(round)) = (&mut self.tracker, self.round) else { return };
        let before = monotonic_now();
        if let Err(error) = tracker.sync(&self.dirty) {
            return self.host_failed("cannot track dirty pages", &error);
        }
        let now = monotonic_now();
        let since_sync = now.since(self.last_sync);
        let dirty = PageCount(self.dirty.count());
        self.measured.sync = now.since(before);
        self.measured.dirty = dirty;
        self.measured.round_trip = self.machine.round_trip().unwrap_or_default();
        let prediction = predict(&self.measured);
        self.prediction = Some(prediction);
        let result = RoundResult {
            sent: PageCount(round.pages),
            duration: round.took.unwrap_or(since_sync),
            dirty,
            prediction,
        };
        let limit = self.shared.downtime_limit();
        let mut decision = self.convergence.after_round(&result, limit);
        if self.stop_now && prediction.total() < Duration::MAX {
            decision = policy::Decision::Switchover;
        }
        // What is accepted of the blackout is the machine's measure for its own deadlines.
        self.machine.set_downtime_limit(if self.stop_now {
            limit.max(prediction.total()).max(WANTED_STOP)
        } else {
            limit
        });
        let outrun = self.convergence.is_outrun().then(|| Outrun {
            dirties: BytesPerSec::measured(dirty.to_bytes(), since_sync),
            carries: self.measured.bandwidth,
        });
        let outrun = outrun.filter(Outrun::gains_nothing);
        self.shared.update(|progress| {
            progress.outrun = outrun;
            progress.dirty_pages_per_s = per_second(dirty, since_sync);
            progress.predicted_blackout = Some(prediction.total());
            progress.throttle_percent = self.convergence.throttle_percent();
        });
        match decision {
            policy::Decision::Switchover => {
                // The first rehearsal is measured behind the bulk round, when the hosts are busy
                // and nothing is warm: what is told of the blackout comes from one like the stop.
                let is_fresh = self.rehearsed_round == Some(round.number);
                let next = if is_fresh { Decision::Switchover } else { Decision::RehearseAgain };
                self.tell(SourceEvent::Decided(next));
            }
            policy::Decision::NextRound { throttle_percent, rest } => {
                self.vmm.set_throttle(throttle_percent);
                let doubtful = prediction.fixed() > limit;
                let next = if doubtful && self.rehearsed_round != Some(round.number) {
                    // No round makes that shorter, but it may have been measured at a bad moment.
                    Decision::RehearseAgain
                } else {
                    self.last_sync = now;
                    Decision::NextRound
                };
                self.rest = Some((now.after(rest), next));
            }
        }
    }

    /// Does what the owner wants once the migration has taken too long. A guest that is being
    /// stopped is not bothered: it is about to leave.
    pub(super) fn mind_bound(&mut self) {
        let Some((at, then)) = self.due else { return };
        if at > monotonic_now() {
            return;
        }
        self.due = None;
        if self.moments.is_some() {
            return;
        }
        let limit = at.since(self.shared.started);
        info!(?limit, ?then, "the migration takes longer than it may");
        match then {
            Then::Cancel => {
                let reason = format!("the guest could not be moved within {limit:?}");
                self.cancelled_because = Some(reason.clone());
                self.tell(SourceEvent::Cancel { reason });
            }
            Then::Throttle => self.convergence.set_auto_converge(AutoConverge::On),
            Then::Stop => self.stop_now = true,
        }
    }

    pub(super) fn rehearse(&mut self) {
        self.rehearsed_round = self.round.map(|round| round.number);
        self.rehearsed_at = monotonic_now();
        match self.vmm.rehearse() {
            Ok(rehearsal) => {
                self.measured.pause = rehearsal.pause;
                self.measured.save = rehearsal.save;
                self.measured.state = ByteCount(rehearsal.state.len() as u64);
                self.tell(SourceEvent::Rehearsed { state: rehearsal.state });
            }
            Err(error) => self.host_failed("cannot rehearse the stop", &error),
        }
    }
}
