//! What is measured while the guest runs, and what follows from it.

use super::{Attempt, SourceIo, Then};
use crate::{Outrun, Rehearsal};
use martlet_policy::{
    self as policy, AutoConverge, Convergence, Measurements, Prediction, RoundResult, predict,
};
use martlet_protocol::{Decision, SourceEvent};
use martlet_units::{ByteCount, BytesPerSec, Instant, PageCount};
use martlet_wire::control::Control;
use std::time::Duration;

/// Smaller rounds measure the way's latency, not its width.
const BANDWIDTH_SAMPLE_MIN: ByteCount = ByteCount(1 << 20);

/// Whoever has the guest stopped for as long as the rest takes accepts a blackout of at least this,
/// whatever was predicted: only a link that carries nothing any more sets the guest running again.
pub(super) const WANTED_STOP: Duration = Duration::from_secs(5);

/// What an attempt knows of itself.
#[derive(Debug)]
pub(super) struct Measures {
    convergence: Convergence,
    pub(super) measured: Measurements,
    pub(super) prediction: Option<Prediction>,
    /// What to do next, and when.
    pub(super) rest: Option<(Instant, Decision)>,
    /// The round behind which the stop was rehearsed the last time.
    rehearsed_round: Option<u32>,
    /// When that began.
    rehearsed_at: Instant,
}

impl Measures {
    pub(super) fn new(now: Instant, auto_converge: bool) -> Measures {
        let auto_converge = if auto_converge { AutoConverge::On } else { AutoConverge::Off };
        Measures {
            convergence: Convergence::new(auto_converge),
            measured: Measurements::default(),
            prediction: None,
            rest: None,
            rehearsed_round: None,
            rehearsed_at: now,
        }
    }

    pub(super) fn begin_rehearsal(&mut self, now: Instant, round: Option<u32>) {
        self.rehearsed_round = round;
        self.rehearsed_at = now;
    }

    /// Takes from a rehearsal what is measured, and gives the state back.
    pub(super) fn note_rehearsal(&mut self, rehearsal: Rehearsal) -> Vec<u8> {
        self.measured.pause = rehearsal.pause;
        self.measured.save = rehearsal.save;
        self.measured.state = ByteCount(rehearsal.state.len() as u64);
        rehearsal.state
    }

    fn note_bandwidth(&mut self, bytes: ByteCount, took: Duration) {
        let measured = BytesPerSec::measured(bytes, took);
        if bytes >= BANDWIDTH_SAMPLE_MIN {
            self.measured.bandwidth = measured;
        } else {
            // At least that wide.
            self.measured.bandwidth = self.measured.bandwidth.max(measured);
        }
    }
}

fn per_second(pages: PageCount, time: Duration) -> u64 {
    let nanos = time.as_nanos().max(1);
    u64::try_from(u128::from(pages.0) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

impl Attempt {
    /// Takes from a message what is measured.
    pub(super) fn note(&mut self, message: &Control, io: &dyn SourceIo) {
        match message {
            Control::RoundReceived(received) => {
                if let Some(round) = &mut self.precopy.round
                    && round.number == received.round
                {
                    let took = io.now().since(round.started);
                    round.took = Some(took);
                    let bytes = ByteCount(io.sent().bytes - round.bytes_before);
                    self.measures.note_bandwidth(bytes, took);
                }
            }
            Control::Rehearsed(rehearsed) => {
                // Nothing there took longer than the answer did: what is predicted, and with it how
                // long the guest may stand, is not for the destination to say.
                let waited = io.now().since(self.measures.rehearsed_at);
                let measured = &mut self.measures.measured;
                measured.load = waited.min(Duration::from_nanos(rehearsed.load_ns));
                measured.start = waited.min(Duration::from_nanos(rehearsed.start_ns));
            }
            _ => {}
        }
    }

    /// A round is over: what did the guest do meanwhile, and is it time?
    pub(super) fn decide(&mut self, io: &mut dyn SourceIo) {
        let Some(round) = self.precopy.round else { return };
        let before = io.now();
        if let Err(error) = self.precopy.sync() {
            return self.host_failed(error);
        }
        let now = io.now();
        let since_sync = now.since(self.precopy.last_sync);
        let dirty = self.precopy.dirty_pages();
        let measured = &mut self.measures.measured;
        measured.sync = now.since(before);
        measured.dirty = dirty;
        measured.round_trip = self.machine.round_trip().unwrap_or_default();
        let prediction = predict(measured);
        self.measures.prediction = Some(prediction);
        let result = RoundResult {
            sent: PageCount(round.pages),
            duration: round.took.unwrap_or(since_sync),
            dirty,
            prediction,
        };
        let limit = io.downtime_limit();
        let mut decision = self.measures.convergence.after_round(&result, limit);
        if self.owner.stop_now && prediction.total() < Duration::MAX {
            decision = policy::Decision::Switchover;
        }
        // What is accepted of the blackout is the machine's measure for its own deadlines.
        let accepted = self.accepted_blackout(limit);
        self.machine.set_downtime_limit(accepted);
        self.show_decision(since_sync);
        match decision {
            policy::Decision::Switchover => {
                // The first rehearsal is measured behind the bulk round, when the hosts are busy
                // and nothing is warm: what is told of the blackout comes from one like the stop.
                let is_fresh = self.measures.rehearsed_round == Some(round.number);
                let next = if is_fresh { Decision::Switchover } else { Decision::RehearseAgain };
                self.tell(SourceEvent::Decided(next));
            }
            policy::Decision::NextRound { throttle_percent, rest } => {
                io.vmm().set_throttle(throttle_percent);
                let doubtful = prediction.fixed() > limit;
                let next = if doubtful && self.measures.rehearsed_round != Some(round.number) {
                    // No round makes that shorter, but it may have been measured at a bad moment.
                    Decision::RehearseAgain
                } else {
                    self.precopy.last_sync = now;
                    Decision::NextRound
                };
                self.measures.rest = Some((now.after(rest), next));
            }
        }
    }

    /// The blackout that is accepted, of a limit.
    pub(super) fn accepted_blackout(&self, limit: Duration) -> Duration {
        if !self.owner.stop_now {
            return limit;
        }
        let predicted = self.measures.prediction.map_or(Duration::ZERO, |it| it.total());
        limit.max(predicted).max(WANTED_STOP)
    }

    fn show_decision(&mut self, since_sync: Duration) {
        let Measures { convergence, measured, prediction, .. } = &self.measures;
        let dirty = measured.dirty;
        let outrun = convergence.is_outrun().then(|| Outrun {
            dirties: BytesPerSec::measured(dirty.to_bytes(), since_sync),
            carries: measured.bandwidth,
        });
        let progress = &mut self.progress;
        progress.outrun = outrun.filter(Outrun::gains_nothing);
        progress.dirty_pages_per_s = per_second(dirty, since_sync);
        progress.predicted_blackout = prediction.map(|prediction| prediction.total());
        progress.throttle_percent = convergence.throttle_percent();
    }

    pub(super) fn end_rest(&mut self, io: &dyn SourceIo) {
        if let Some((_, decision)) = self.measures.rest.take_if(|(until, _)| *until <= io.now()) {
            self.tell(SourceEvent::Decided(decision));
        }
    }

    /// Until when the guest is to be stopped. One that is being stopped is not bothered: it is about
    /// to leave, unless the stop is called off.
    pub(super) fn due(&self) -> Option<Instant> {
        self.owner.due.filter(|_| !self.switchover.is_stopping()).map(|(at, _)| at)
    }

    /// Does what the owner wants once the migration has taken too long.
    pub(super) fn heed_bound(&mut self, io: &dyn SourceIo) {
        if self.due().is_none_or(|at| at > io.now()) {
            return;
        }
        let Some((at, then)) = self.owner.due.take() else { return };
        let limit = at.since(self.started);
        match then {
            Then::Cancel => {
                let reason = format!("the guest could not be moved within {limit:?}");
                self.ending.cancelled_because = Some(reason.clone());
                self.tell(SourceEvent::Cancel { reason });
            }
            Then::Throttle => self.measures.convergence.set_auto_converge(AutoConverge::On),
            Then::Stop => self.owner.stop_now = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the simulated world: a guest of few pages never went. Its first round, which had
    /// nothing but zeros, said that the link is narrow, and no later one was large enough to count.
    #[test]
    fn a_small_round_shows_at_least_how_wide_the_link_is() {
        let mut measures = Measures::new(Instant::default(), false);
        let (long, short) = (Duration::from_millis(1), Duration::from_micros(100));
        measures.note_bandwidth(ByteCount(100), long);
        measures.note_bandwidth(ByteCount(100_000), short);
        assert_eq!(measures.measured.bandwidth, BytesPerSec(1_000_000_000));
        measures.note_bandwidth(ByteCount(100), long);
        assert_eq!(measures.measured.bandwidth, BytesPerSec(1_000_000_000));
        measures.note_bandwidth(ByteCount(2 << 20), Duration::from_secs(1));
        assert_eq!(measures.measured.bandwidth, BytesPerSec(2 << 20), "a large one counts");
    }
}
