//! What a chain of moves comes to: medians, percentiles, and whether all was well.

use super::process::{GuestView, MachineView};
use crate::failure::{Failure, one_line};
use crate::report_json::{
    GuestJson, NetworkJson, OutcomeJson, PagesJson, PhasesJson, RdmaJson, ReportJson,
};
use crate::view::number::{millis, plural};
use serde::Serialize;

/// The moves so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Chain {
    machine: MachineView,
    runs: Vec<ReportJson>,
    guest: Option<GuestView>,
    /// What ended it between two moves, or before the first.
    early_end: Option<(OutcomeJson, String)>,
}

/// The blackout's percentiles, in ms; null if no run had one. Nearest rank: each is a value that
/// was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Percentiles {
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    max_ms: Option<f64>,
}

/// One object for all runs: the fields of a migration, as medians, and more.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Total {
    /// Medians; the timeline of the run with the median blackout; the guest's counters from the
    /// last place it came to.
    #[serde(flatten)]
    pub(super) report: ReportJson,
    /// How often the guest was to move.
    pub(super) runs: u32,
    /// How often it did.
    pub(super) completed_runs: u32,
    /// Over all runs.
    pub(super) blackout: Percentiles,
    /// Of the worst network card, over all runs; null without cards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) network_blackout: Option<Percentiles>,
    accel: String,
    memory_bytes: u64,
    vcpus: u16,
}

impl Chain {
    /// This is what moves.
    pub(super) fn moves(&mut self, machine: MachineView) {
        self.machine = machine;
    }

    /// Something else than a move failed: there are no more.
    pub(super) fn end_early(&mut self, failure: &Failure) {
        self.early_end = Some((failure.outcome(), one_line(&failure.to_string())));
    }

    /// One more run is over.
    pub(super) fn push(&mut self, report: ReportJson) {
        self.runs.push(report);
    }

    /// What the guest says after it.
    pub(super) fn saw(&mut self, guest: &GuestView) {
        self.guest = Some(*guest);
    }

    /// Whether another run makes sense: the guest is whole, and it is known where it runs.
    pub(super) fn may_go_on(&self) -> bool {
        let known = |r: &ReportJson| r.outcome == OutcomeJson::Completed;
        self.guest_is_whole()
            && self.runs.iter().all(known)
            && self.memory_equal() != Some(false)
            && self.trouble().is_none()
    }

    /// Whether every move was completed and nothing was lost.
    pub(super) fn is_well(&self) -> bool {
        self.may_go_on() && !self.runs.is_empty()
    }

    fn failed(&self) -> Option<&ReportJson> {
        self.runs.iter().find(|r| r.outcome != OutcomeJson::Completed)
    }

    /// How the run ended that ended it all.
    pub(super) fn outcome(&self) -> OutcomeJson {
        let early_end = self.early_end.as_ref().map(|(outcome, _)| *outcome);
        let ended = early_end.or(self.failed().map(|r| r.outcome));
        ended.unwrap_or(OutcomeJson::Completed)
    }

    fn error(&self) -> Option<String> {
        let early_end = self.early_end.as_ref().map(|(_, reason)| reason.clone());
        let failed = || self.failed().and_then(|r| r.error.clone());
        early_end.or_else(failed).or_else(|| self.complaint())
    }

    fn guest_is_whole(&self) -> bool {
        self.guest.as_ref().is_none_or(|guest| {
            let frames = guest.frames.unwrap_or_default().count;
            let bad_frames = frames.lost + frames.repeated + frames.damaged;
            guest.wrong_pages == 0 && guest.clock_steps_back == 0 && bad_frames == 0
        })
    }

    /// A card that the destination could not set going again.
    fn trouble(&self) -> Option<&str> {
        self.runs.iter().find_map(|r| r.network.as_ref()?.trouble.as_deref())
    }

    /// What was not well, in one line.
    pub(super) fn complaint(&self) -> Option<String> {
        if let Some(guest) = self.guest.filter(|_| !self.guest_is_whole()) {
            let frames = guest.frames.unwrap_or_default().count;
            return Some(format!(
                "the guest is damaged: {} wrong, its clock went back {}, {} lost, {} repeated, \
                 {} damaged",
                plural(guest.wrong_pages, "page"),
                plural(guest.clock_steps_back, "time"),
                plural(frames.lost, "frame"),
                frames.repeated,
                frames.damaged,
            ));
        }
        if let Some(trouble) = self.trouble() {
            return Some(crate::failure::one_line(trouble));
        }
        if self.memory_equal() == Some(false) {
            return Some("the memory of the two sides was not equal".to_owned());
        }
        let failed = self.runs.iter().position(|r| r.outcome != OutcomeJson::Completed)?;
        let outcome = self.runs.get(failed)?.outcome.word();
        Some(format!("run {} {outcome}", failed + 1))
    }

    /// Equal only if all that were compared were; `None` if none was.
    fn memory_equal(&self) -> Option<bool> {
        self.runs.iter().filter_map(|r| r.memory_equal).reduce(|a, b| a && b)
    }

    fn completed(&self) -> impl Iterator<Item = &ReportJson> {
        self.runs.iter().filter(|r| r.outcome == OutcomeJson::Completed)
    }

    fn median(&self, value: impl Fn(&ReportJson) -> Option<f64>) -> Option<f64> {
        nearest_rank(self.completed().filter_map(value).collect(), 50.0)
    }

    fn median_count(&self, value: impl Fn(&ReportJson) -> u64) -> u64 {
        let mut values: Vec<u64> = self.completed().map(value).collect();
        values.sort_unstable();
        values.get(rank(values.len(), 50.0)).copied().unwrap_or(0)
    }

    fn blackouts(&self) -> Vec<f64> {
        self.completed().filter_map(|r| r.blackout_ms).collect()
    }

    fn network_blackouts(&self) -> Vec<f64> {
        self.completed().filter_map(|r| r.network.as_ref()?.blackout_ms).collect()
    }

    fn percentiles(values: &[f64]) -> Percentiles {
        let at = |percent| nearest_rank(values.to_vec(), percent);
        Percentiles { p50_ms: at(50.0), p99_ms: at(99.0), max_ms: at(100.0) }
    }

    fn has_network(&self) -> bool {
        self.runs.iter().any(|r| r.network.is_some())
    }

    /// All runs as one.
    pub(super) fn summary(&self) -> Total {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Total {
            report: self.medians(),
            runs: count(self.runs.len()),
            completed_runs: count(self.completed().count()),
            blackout: Chain::percentiles(&self.blackouts()),
            network_blackout: self
                .has_network()
                .then(|| Chain::percentiles(&self.network_blackouts())),
            accel: self.machine.accel.clone(),
            memory_bytes: self.machine.memory_bytes,
            vcpus: self.machine.vcpus,
        }
    }

    fn medians(&self) -> ReportJson {
        if let (Some((outcome, reason)), None) = (&self.early_end, self.completed().next()) {
            return ReportJson::without_figures(*outcome, Some(reason.clone()));
        }
        let failed = self.failed();
        if let (Some(failed), None) = (failed, self.completed().next()) {
            return failed.clone();
        }
        let middle = self.middle_run();
        let time = |value: fn(&ReportJson) -> f64| self.median(|r| Some(value(r))).unwrap_or(0.0);
        let guest = self.guest.map(|guest| GuestJson {
            verified_pages: guest.verified_pages,
            wrong_pages: guest.wrong_pages,
            heartbeats: guest.heartbeats,
            frames: guest.frames.map(|frames| frames.count),
        });
        ReportJson {
            outcome: self.outcome(),
            error: self.error(),
            fault: failed.and_then(|r| r.fault.clone()),
            total_ms: time(|r| r.total_ms),
            blackout_ms: self.median(|r| r.blackout_ms),
            predicted_blackout_ms: self.median(|r| r.predicted_blackout_ms),
            clock_error_ms: time(|r| r.clock_error_ms),
            wall_clock_difference_ms: self.median(|r| r.wall_clock_difference_ms),
            phases: PhasesJson {
                pause: time(|r| r.phases.pause),
                final_sync: time(|r| r.phases.final_sync),
                final_pages: time(|r| r.phases.final_pages),
                cpu_state: time(|r| r.phases.cpu_state),
                commit: time(|r| r.phases.commit),
                start: time(|r| r.phases.start),
            },
            rounds: u32::try_from(self.median_count(|r| r.rounds.into())).unwrap_or(u32::MAX),
            pages: PagesJson {
                normal: self.median_count(|r| r.pages.normal),
                zero: self.median_count(|r| r.pages.zero),
                untouched: self.median_count(|r| r.pages.untouched),
            },
            bytes_sent: self.median_count(|r| r.bytes_sent),
            channels: middle.map_or(0, |r| r.channels),
            source_cpu_s: time(|r| r.source_cpu_s),
            destination_cpu_s: self.median(|r| r.destination_cpu_s),
            rdma: self.rdma(),
            network: self.network(),
            outrun: failed.and_then(|r| r.outrun),
            guest,
            memory_equal: self.memory_equal(),
            timeline: middle.map(|r| r.timeline.clone()).unwrap_or_default(),
        }
    }

    /// Of the first run in which RDMA ended early, if there was one, else of the first.
    fn rdma(&self) -> Option<RdmaJson> {
        let mut all = self.runs.iter().filter_map(|r| r.rdma.as_ref());
        let first = all.clone().next();
        all.find(|rdma| rdma.fell_back.is_some()).or(first).cloned()
    }

    /// Medians of what became of the cards; card by card as in the middle run.
    fn network(&self) -> Option<NetworkJson> {
        let middle = self.middle_run()?.network.as_ref()?;
        let of = |value: fn(&NetworkJson) -> Option<f64>| {
            self.median(|r| r.network.as_ref().and_then(value))
        };
        Some(NetworkJson {
            blackout_ms: of(|network| network.blackout_ms),
            cards_ms: middle.cards_ms.clone(),
            suspend_ms: of(|network| Some(network.suspend_ms)).unwrap_or(0.0),
            resume_ms: of(|network| network.resume_ms),
            trouble: self.trouble().map(str::to_owned),
        })
    }

    /// The run with the median blackout, or the median time if there was none.
    fn middle_run(&self) -> Option<&ReportJson> {
        let mut runs: Vec<&ReportJson> = self.completed().collect();
        runs.sort_by(|a, b| {
            let key = |r: &ReportJson| r.blackout_ms.unwrap_or(r.total_ms);
            key(a).total_cmp(&key(b))
        });
        runs.get(rank(runs.len(), 50.0)).copied()
    }

    /// Percentiles and the distribution in one line.
    pub(super) fn blackout_line(&self) -> Option<String> {
        Chain::distribution(&self.blackouts())
    }

    /// The same for the worst network card of each run.
    pub(super) fn network_line(&self) -> Option<String> {
        Chain::distribution(&self.network_blackouts())
    }

    fn distribution(values: &[f64]) -> Option<String> {
        let Percentiles { p50_ms, p99_ms, max_ms } = Chain::percentiles(values);
        let bars = sparkline(values)?;
        Some(format!(
            "p50 {}, p99 {}, max {}  {bars}",
            millis(p50_ms?),
            millis(p99_ms?),
            millis(max_ms?)
        ))
    }
}

/// Place of a percentile in a sorted list of `count`, by nearest rank.
fn rank(count: usize, percent: f64) -> usize {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and a number of runs"
    )]
    let rank = (percent / 100.0 * count as f64).ceil() as usize;
    rank.saturating_sub(1)
}

fn nearest_rank(mut values: Vec<f64>, percent: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(rank(values.len(), percent)).copied()
}

/// How values are spread from the smallest to the largest; `None` for fewer than three.
fn sparkline(values: &[f64]) -> Option<String> {
    const BINS: usize = 24;
    const HEIGHTS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (low, high) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    if values.len() < 3 || high <= low {
        return None;
    }
    let mut bins = [0usize; BINS];
    for value in values {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the number of bins"
        )]
        let bin = ((value - low) / (high - low) * BINS as f64) as usize;
        if let Some(count) = bins.get_mut(bin.min(BINS - 1)) {
            *count += 1;
        }
    }
    let most = bins.iter().max().copied().unwrap_or(1).max(1);
    let bars = bins.iter().map(|count| {
        let height = (count * 8).div_ceil(most);
        HEIGHTS.get(height).copied().unwrap_or('█')
    });
    Some(bars.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report_json::tests::sample;

    fn chain(blackouts: &[Option<f64>]) -> Chain {
        let machine = MachineView { accel: "kvm".to_owned(), memory_bytes: 1 << 30, vcpus: 1 };
        let mut chain = Chain { machine, ..Chain::default() };
        for blackout in blackouts {
            let mut report = ReportJson::from(&sample());
            report.blackout_ms = *blackout;
            report.total_ms = 100.0 + blackout.unwrap_or(0.0);
            chain.push(report);
        }
        chain.saw(&GuestView { verified_pages: 7, heartbeats: 9, ..GuestView::default() });
        chain
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(nearest_rank(values.clone(), 50.0), Some(50.0));
        assert_eq!(nearest_rank(values.clone(), 99.0), Some(99.0));
        assert_eq!(nearest_rank(values, 100.0), Some(100.0));
        assert_eq!(nearest_rank(vec![3.0], 99.0), Some(3.0));
        assert_eq!(nearest_rank(vec![], 50.0), None);
    }

    #[test]
    fn the_total_is_one_object_with_the_fields_of_a_migration() {
        let total = chain(&[Some(0.9), Some(0.4), Some(0.5)]).summary();
        let json = serde_json::to_value(&total).unwrap();
        assert_eq!(json["blackout_ms"], 0.5);
        assert_eq!(json["total_ms"], 100.5);
        assert_eq!(
            json["blackout"],
            serde_json::json!({"p50_ms": 0.5, "p99_ms": 0.9, "max_ms": 0.9})
        );
        assert_eq!((json["runs"].as_u64(), json["completed_runs"].as_u64()), (Some(3), Some(3)));
        assert_eq!(json["guest"]["verified_pages"], 7);
        let single = serde_json::to_value(ReportJson::from(&sample())).unwrap();
        for field in single.as_object().unwrap().keys() {
            assert!(json.get(field).is_some(), "{field}");
        }
    }

    #[test]
    fn verified_runs_have_no_blackout_and_are_equal_only_together() {
        let mut chain = chain(&[None, None]);
        chain.runs[0].memory_equal = Some(true);
        chain.runs[1].memory_equal = Some(true);
        let total = chain.summary();
        assert_eq!(total.blackout, Percentiles::default());
        assert_eq!(total.report.memory_equal, Some(true));
        assert!(chain.is_well());
        chain.runs[1].memory_equal = Some(false);
        assert_eq!(chain.summary().report.memory_equal, Some(false));
        assert!(!chain.is_well());
    }

    #[test]
    fn a_damaged_guest_or_a_failed_run_is_a_failure() {
        let mut chain = chain(&[Some(0.5)]);
        assert!(chain.is_well() && chain.complaint().is_none());
        chain.saw(&GuestView { wrong_pages: 1, ..GuestView::default() });
        assert!(!chain.is_well());
        assert!(chain.complaint().unwrap().starts_with("the guest is damaged: 1 page wrong"));
        chain.saw(&GuestView::default());
        let mut failed = ReportJson::from(&sample());
        failed.outcome = OutcomeJson::Failed;
        chain.push(failed);
        assert!(!chain.is_well());
        assert_eq!(chain.complaint().unwrap(), "run 2 failed");
        assert_eq!(chain.summary().report.outcome, OutcomeJson::Failed);
        chain.runs.remove(0);
        assert_eq!(chain.summary().report.total_ms, 412.345, "no medians of nothing");
    }

    #[test]
    fn a_distribution_fits_a_line() {
        let line = sparkline(&[1.0, 1.0, 1.0, 2.0]).unwrap();
        assert_eq!(line.chars().count(), 24);
        assert!(line.starts_with('█') && line.ends_with('▃'), "{line}");
        assert_eq!(sparkline(&[1.0, 1.0, 1.0]), None);
    }
}
