//! What `query-migrate` says, as a client reads it.

use crate::report_json::{OutrunJson, ReportJson};
use martlet_units::{ByteCount, BytesPerSec, PAGE_SIZE};
use serde::Deserialize;
use serde_json::Value;

/// A look at a migration from outside of its process. What a server leaves out is zero.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct Snapshot {
    /// QEMU's word; empty if there was no migration.
    pub(crate) status: String,
    /// Since its start, in ms.
    pub(crate) total_time: u64,
    /// Memory.
    pub(crate) ram: RamSnapshot,
    /// The predicted blackout.
    pub(crate) x_expected_downtime_ms: Option<f64>,
    /// The guest's time taken away, in per cent.
    pub(crate) cpu_throttle_percentage: u8,
    /// How its guest is faster than its link, if it is.
    pub(crate) x_outrun: Option<OutrunJson>,
    /// Why it failed.
    pub(crate) error_desc: Option<String>,
    /// The report, once it is over.
    pub(crate) x_martlet: Option<ReportJson>,
    /// At a destination: where it listens.
    pub(crate) socket_address: Vec<Value>,
}

/// How the memory's migration stands.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct RamSnapshot {
    /// Bytes sent.
    pub(crate) transferred: u64,
    /// Bytes dirty.
    pub(crate) remaining: u64,
    /// Bytes of the guest.
    pub(crate) total: u64,
    /// Pages sent with their content.
    pub(crate) normal: u64,
    /// Pages found to be zero.
    pub(crate) duplicate: u64,
    /// Pages never touched by the guest.
    pub(crate) x_untouched: u64,
    /// Mbit/s.
    pub(crate) mbps: f64,
    /// Pages dirtied a second.
    pub(crate) dirty_pages_rate: u64,
    /// Rounds begun.
    pub(crate) dirty_sync_count: u32,
}

impl Snapshot {
    /// Whether it tells of a migration away from there.
    pub(crate) fn is_of_source(&self) -> bool {
        !self.status.is_empty() && self.socket_address.is_empty()
    }

    /// Whether nothing more will happen by itself.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self.status.as_str(),
            "completed" | "failed" | "cancelled" | "x-undecided" | "x-given-up"
        )
    }

    /// How many of `ram.total` bytes are done with. In the first round that is what was looked
    /// at; later, what is not dirty.
    pub(crate) fn done(&self) -> u64 {
        let ram = &self.ram;
        if ram.dirty_sync_count > 1 {
            return ram.total.saturating_sub(ram.remaining);
        }
        let pages = ram.normal.saturating_add(ram.duplicate).saturating_add(ram.x_untouched);
        pages.saturating_mul(PAGE_SIZE).min(ram.total)
    }

    /// The sending rate.
    pub(crate) fn rate(&self) -> BytesPerSec {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates, and a negative rate is none"
        )]
        let rate = (self.ram.mbps * 1e6 / 8.0) as u64;
        BytesPerSec(rate)
    }

    /// Bytes sent so far.
    pub(crate) fn sent(&self) -> ByteCount {
        ByteCount(self.ram.transferred)
    }
}
