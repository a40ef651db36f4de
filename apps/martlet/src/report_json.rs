//! The report of a migration as one JSON object: written by the source's control socket, read by
//! `migrate` and `demo`, and printed by `--json`.

use crate::failure::Failure;
use crate::seen::{self, Seen};
use martlet_engine::{Devices, Fault, Outcome, Outrun, RdmaUse, Report, Side, Span};
use martlet_machine::{FrameCheck, GuestCheck};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What was measured in one migration. Field names are an interface: only add.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ReportJson {
    /// How it ended.
    pub(crate) outcome: OutcomeJson,
    /// Why it failed.
    pub(crate) error: Option<String>,
    /// Whose fault that is: see [`fault_word`].
    #[serde(default)]
    pub(crate) fault: Option<String>,
    /// From the command until the destination's acknowledgement.
    pub(crate) total_ms: f64,
    /// How long the guest was stopped; null without a switchover or if a check lengthened it.
    pub(crate) blackout_ms: Option<f64>,
    /// What was predicted when the guest was stopped; null whenever `blackout_ms` is.
    pub(crate) predicted_blackout_ms: Option<f64>,
    /// What `blackout_ms` may be off by, because two clocks were compared.
    pub(crate) clock_error_ms: f64,
    /// The destination host's wall clock minus the source's; null if the destination did not say.
    /// The guest's clocks do not follow it.
    #[serde(default)]
    pub(crate) wall_clock_difference_ms: Option<f64>,
    /// The blackout's parts, in us.
    pub(crate) phases: PhasesJson,
    /// Pre-copy rounds and the last one.
    pub(crate) rounds: u32,
    /// Pages by what was done with them.
    pub(crate) pages: PagesJson,
    /// Sent on all connections.
    pub(crate) bytes_sent: u64,
    /// Data channels.
    pub(crate) channels: u16,
    /// CPU time of the source process, its vCPUs included.
    pub(crate) source_cpu_s: f64,
    /// CPU time of the destination process.
    pub(crate) destination_cpu_s: Option<f64>,
    /// How RDMA served; null where it was not asked for.
    #[serde(default)]
    pub(crate) rdma: Option<RdmaJson>,
    /// What became of the guest's network cards; null without any.
    #[serde(default)]
    pub(crate) network: Option<NetworkJson>,
    /// How the guest was faster than its link, if it was in the last round; else null.
    #[serde(default)]
    pub(crate) outrun: Option<OutrunJson>,
    /// What the guest says of itself.
    pub(crate) guest: Option<GuestJson>,
    /// Whether both sides' memory was equal before the commit; null if it was not compared.
    pub(crate) memory_equal: Option<bool>,
    /// The switchover bar by bar.
    pub(crate) timeline: Vec<SpanJson>,
}

/// How RDMA served a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RdmaJson {
    /// Provider and device; null if it did not come to that.
    pub(crate) device: Option<String>,
    /// Why the rest went over the connection, if RDMA ended early.
    pub(crate) fell_back: Option<String>,
    /// Pages that were sent again for that.
    pub(crate) pages_again: u64,
}

impl From<&RdmaUse> for RdmaJson {
    fn from(rdma: &RdmaUse) -> RdmaJson {
        RdmaJson {
            device: rdma.device.clone(),
            fell_back: rdma.fell_back.as_deref().map(crate::failure::one_line),
            pages_again: rdma.pages_again,
        }
    }
}

/// A guest that dirties memory faster than its link carries it: nothing ends that by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OutrunJson {
    /// What the guest dirties.
    pub(crate) dirties_bytes_per_s: u64,
    /// What the link carries.
    pub(crate) carries_bytes_per_s: u64,
}

impl From<&Outrun> for OutrunJson {
    fn from(outrun: &Outrun) -> OutrunJson {
        OutrunJson { dirties_bytes_per_s: outrun.dirties.0, carries_bytes_per_s: outrun.carries.0 }
    }
}

/// How a migration ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OutcomeJson {
    /// The guest runs at the destination.
    Completed,
    /// The guest runs at the source.
    #[default]
    Failed,
    /// The guest runs at the source: its owner cancelled.
    Cancelled,
    /// The destination must be asked.
    Undecided,
    /// It was undecided, and the guest was given up here.
    GivenUp,
}

impl ReportJson {
    /// Of a migration that left no report, or never began: nothing was measured.
    pub(crate) fn without_figures(outcome: OutcomeJson, error: Option<String>) -> ReportJson {
        ReportJson { outcome, error, ..ReportJson::default() }
    }

    /// The same, of a command that ended so.
    pub(crate) fn of_failure(failure: &Failure) -> ReportJson {
        let reason = crate::failure::one_line(&failure.to_string());
        let is_slip = matches!(failure, Failure::Usage(_));
        let fault = is_slip.then(|| fault_word(Fault::Request).to_owned());
        ReportJson { fault, ..ReportJson::without_figures(failure.outcome(), Some(reason)) }
    }
}

impl OutcomeJson {
    /// The word that JSON uses.
    pub(crate) fn word(self) -> &'static str {
        match self {
            OutcomeJson::Completed => "completed",
            OutcomeJson::Failed => "failed",
            OutcomeJson::Cancelled => "cancelled",
            OutcomeJson::Undecided => "undecided",
            OutcomeJson::GivenUp => "given-up",
        }
    }
}

/// The blackout's parts in us, in the order in which the source waits for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PhasesJson {
    pub(crate) pause: f64,
    pub(crate) final_sync: f64,
    pub(crate) final_pages: f64,
    pub(crate) cpu_state: f64,
    pub(crate) commit: f64,
    pub(crate) start: f64,
}

/// Pages by what was done with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PagesJson {
    pub(crate) normal: u64,
    pub(crate) zero: u64,
    pub(crate) untouched: u64,
}

/// What the guest says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuestJson {
    pub(crate) verified_pages: u64,
    pub(crate) wrong_pages: u64,
    pub(crate) heartbeats: u64,
    /// What it says of its frames; null without network cards.
    #[serde(default)]
    pub(crate) frames: Option<FramesJson>,
}

/// Frames that the guest exchanged since its boot, by its own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FramesJson {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    pub(crate) damaged: u64,
    /// How often a queue's index went past 65535.
    #[serde(alias = "index-wraps")]
    pub(crate) index_wraps: u64,
}

/// What became of the network cards in a switchover.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NetworkJson {
    /// The longest time without a frame, from the last one served at the source to the first at
    /// the destination; null if it is not known for a card.
    pub(crate) blackout_ms: Option<f64>,
    /// The same, card by card.
    pub(crate) cards_ms: Vec<Option<f64>>,
    /// How long the suspend of all cards took. vCPUs ran meanwhile.
    pub(crate) suspend_ms: f64,
    /// How long their resume took. vCPUs ran already.
    pub(crate) resume_ms: Option<f64>,
    /// Which card does not work at the destination, and why.
    pub(crate) trouble: Option<String>,
}

/// A bar of the timeline. Zero is the moment when the stop was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SpanJson {
    /// What was done.
    pub(crate) name: String,
    /// Where.
    pub(crate) side: SideJson,
    /// From.
    pub(crate) start_us: i64,
    /// To.
    pub(crate) end_us: i64,
}

/// A side of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SideJson {
    Source,
    Destination,
}

/// The word that JSON uses for whose fault a failure is.
pub(crate) fn fault_word(fault: Fault) -> &'static str {
    match fault {
        Fault::Peer => "peer",
        Fault::Host => "host",
        Fault::Vmm => "vmm",
        Fault::Device => "device",
        Fault::Request => "request",
        Fault::Cancelled => "cancelled",
    }
}

/// Milliseconds with three decimals: finer is noise, and coarser hides a blackout.
pub(crate) fn ms(time: Duration) -> f64 {
    round_to(time.as_secs_f64() * 1e3, 1e3)
}

/// Microseconds with one decimal.
fn us(time: Duration) -> f64 {
    round_to(time.as_secs_f64() * 1e6, 10.0)
}

/// Seconds with six decimals, as fine as the kernel counts CPU time.
fn seconds(time: Duration) -> f64 {
    round_to(time.as_secs_f64(), 1e6)
}

/// `value` rounded to a multiple of `1 / steps`.
pub(crate) fn round_to(value: f64, steps: f64) -> f64 {
    (value * steps).round() / steps
}

impl From<&Report> for ReportJson {
    fn from(report: &Report) -> ReportJson {
        let transfer = &report.transfer;
        let switchover = report.switchover.clone().unwrap_or_default();
        let seen = Seen::of(&switchover);
        let blackout = seen::blackout(report);
        let predicted = switchover.predicted.filter(|_| blackout.is_some());
        let phases = &switchover.phases;
        let has_network = seen.has_cards() || switchover.devices.trouble.is_some();
        ReportJson {
            outcome: match report.outcome {
                Outcome::Completed => OutcomeJson::Completed,
                Outcome::Failed => OutcomeJson::Failed,
                Outcome::Cancelled => OutcomeJson::Cancelled,
                Outcome::Undecided => OutcomeJson::Undecided,
                Outcome::GivenUp => OutcomeJson::GivenUp,
            },
            error: report.error.as_ref().map(|error| crate::failure::one_line(&error.to_line())),
            fault: report.error.as_ref().map(|error| fault_word(error.fault()).to_owned()),
            total_ms: ms(transfer.total),
            blackout_ms: blackout.map(ms),
            predicted_blackout_ms: predicted.map(|p| ms(p.total())),
            clock_error_ms: switchover.clock.map_or(0.0, |clock| ms(clock.error)),
            wall_clock_difference_ms: switchover.wall_clock_difference_ns.map(|ns| {
                let size = ms(Duration::from_nanos(ns.unsigned_abs()));
                if ns < 0 { -size } else { size }
            }),
            phases: PhasesJson {
                pause: us(phases.pause),
                final_sync: us(phases.final_sync),
                final_pages: us(phases.final_pages),
                cpu_state: us(phases.cpu_state),
                commit: us(phases.commit),
                start: us(phases.start),
            },
            rounds: transfer.rounds,
            pages: PagesJson {
                normal: transfer.pages.normal,
                zero: transfer.pages.zero,
                untouched: transfer.pages.untouched,
            },
            bytes_sent: transfer.bytes_sent.0,
            channels: transfer.channels,
            source_cpu_s: seconds(transfer.source_cpu),
            destination_cpu_s: transfer.destination_cpu.map(seconds),
            rdma: transfer.rdma.as_ref().map(RdmaJson::from),
            network: has_network.then(|| NetworkJson::new(&seen.cards(), &switchover.devices)),
            outrun: None,
            guest: seen.check().map(GuestJson::from),
            memory_equal: transfer.memory_equal,
            timeline: seen.timeline(&switchover).iter().map(SpanJson::from).collect(),
        }
    }
}

impl From<GuestCheck> for GuestJson {
    fn from(check: GuestCheck) -> GuestJson {
        GuestJson {
            verified_pages: check.verified_pages,
            wrong_pages: check.wrong_pages,
            heartbeats: check.heartbeats,
            frames: check.frames.map(FramesJson::from),
        }
    }
}

impl From<FrameCheck> for FramesJson {
    fn from(check: FrameCheck) -> FramesJson {
        let FrameCheck { sent, received, lost, repeated, damaged, index_wraps } = check;
        FramesJson { sent, received, lost, repeated, damaged, index_wraps }
    }
}

impl NetworkJson {
    fn new(cards: &[Option<Duration>], devices: &Devices) -> NetworkJson {
        let worst = cards.iter().copied().collect::<Option<Vec<_>>>();
        NetworkJson {
            blackout_ms: worst.and_then(|cards| cards.into_iter().max()).map(ms),
            cards_ms: cards.iter().map(|card| card.map(ms)).collect(),
            suspend_ms: ms(devices.suspend),
            resume_ms: devices.resume.map(ms),
            trouble: devices.trouble.as_deref().map(crate::failure::one_line),
        }
    }
}

impl From<&Span> for SpanJson {
    fn from(span: &Span) -> SpanJson {
        SpanJson {
            name: span.name.to_owned(),
            side: match span.side {
                Side::Source => SideJson::Source,
                Side::Destination => SideJson::Destination,
            },
            start_us: span.start_us,
            end_us: span.end_us,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use martlet_engine::{ClockOffset, Instant, PageCounts, Phases, Switchover};
    use martlet_machine::Observed;
    use martlet_policy::Prediction;
    use martlet_units::ByteCount;

    /// A report as a migration of a 1 GiB guest over loopback gives it.
    pub(crate) fn sample() -> Report {
        let us = Duration::from_micros;
        let span = |name, side, start_us, end_us| Span { name, side, start_us, end_us };
        let mut report = Report::not_begun(Outcome::Completed, None, us(412_345));
        let transfer = &mut report.transfer;
        transfer.rounds = 4;
        transfer.pages = PageCounts { normal: 131_800, zero: 12, untouched: 130_800 };
        transfer.bytes_sent = ByteCount(541_000_000);
        transfer.channels = 2;
        transfer.source_cpu = Duration::from_millis(480);
        transfer.destination_cpu = Some(Duration::from_millis(390));
        let mut switchover = Switchover::default();
        switchover.stop = Instant(10_000_000);
        switchover.blackout = Some(us(440));
        switchover.clock = Some(ClockOffset::ONE_CLOCK);
        switchover.wall_clock_difference_ns = Some(-590_000_000_000);
        switchover.predicted =
            Some(Prediction { pause: us(40), commit: us(300), ..Prediction::default() });
        switchover.phases = Phases {
            pause: us(38),
            final_sync: us(21),
            final_pages: us(60),
            cpu_state: us(44),
            commit: us(190),
            start: us(70),
        };
        switchover.timeline = vec![
            span("rehearse", Side::Destination, -900, -400),
            span("arm", Side::Destination, -60, -20),
            span("suspend devices", Side::Source, -2_480, 0),
            span("pause vCPUs", Side::Source, 0, 38),
            span("final sync", Side::Source, 38, 59),
            span("last pages", Side::Source, 59, 119),
            span("save state", Side::Source, 38, 163),
            span("commit", Side::Source, 163, 353),
            span("load state", Side::Destination, 180, 300),
            span("start vCPUs", Side::Destination, 353, 423),
            span("resume devices", Side::Destination, 440, 5_050),
        ];
        switchover.devices = Devices { suspend: us(2_480), resume: Some(us(4_610)), trouble: None };
        let frames = FrameCheck { sent: 70_100, received: 70_000, ..FrameCheck::default() };
        let check = GuestCheck {
            verified_pages: 900_000,
            wrong_pages: 0,
            heartbeats: 5_000,
            frames: Some(frames),
        };
        // The guest was silent from 20 us before the stop to 443 us behind it.
        let source = Observed {
            last_heartbeat_ns: Some(9_980_000),
            last_frames_ns: vec![Some(9_000_000); 2],
            check: Some(check),
            ..Observed::default()
        };
        let destination = Observed {
            first_heartbeat_ns: Some(10_443_000),
            first_frames_ns: vec![Some(12_900_000), Some(13_200_000)],
            ..Observed::default()
        };
        switchover.source_observed = Some(source.encode());
        switchover.destination_observed = Some(destination.encode());
        report.switchover = Some(switchover);
        report
    }

    #[test]
    fn the_object_has_the_promised_fields() {
        let json = serde_json::to_value(ReportJson::from(&sample())).unwrap();
        insta::assert_snapshot!(serde_json::to_string_pretty(&json).unwrap());
    }

    #[test]
    fn a_verified_migration_has_no_blackout() {
        let mut report = sample();
        report.switchover.as_mut().unwrap().blackout = None;
        report.transfer.memory_equal = Some(true);
        let json = ReportJson::from(&report);
        assert_eq!((json.blackout_ms, json.predicted_blackout_ms), (None, None));
        let back: ReportJson =
            serde_json::from_str(&serde_json::to_string(&json).unwrap()).unwrap();
        assert_eq!(back, json);
    }
}
