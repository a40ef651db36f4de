//! What a machine sees of its guest while that moves. The engine carries it as bytes, from both sides
//! to the source's owner.

use crate::clock;
use crate::machine::Machine;
use martlet_engine::GuestObserver;
use martlet_guest_program::GuestCounters;
use martlet_units::Instant;
use minicbor::{Decode, Encode};
use std::time::Duration;

/// How long cards may take to their first frames behind the first heartbeat. One with nothing to do
/// has none.
const FRAMES_MAX: Duration = Duration::from_millis(100);

/// What was seen in one process; times are on its `CLOCK_MONOTONIC`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Observed {
    /// The first heartbeat that left this process.
    #[n(0)]
    pub first_heartbeat_ns: Option<u64>,
    /// The last one.
    #[n(1)]
    pub last_heartbeat_ns: Option<u64>,
    /// For each network card, when it served its first frame here.
    #[n(2)]
    pub first_frames_ns: Vec<Option<u64>>,
    /// And its last one.
    #[n(3)]
    pub last_frames_ns: Vec<Option<u64>>,
    /// What the guest says of itself, if it is the built-in program.
    #[n(4)]
    pub check: Option<GuestCheck>,
}

/// What a guest says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct GuestCheck {
    /// Pages whose content it checked since its boot.
    #[n(0)]
    pub verified_pages: u64,
    /// Pages that were wrong. One is a lost guest.
    #[n(1)]
    pub wrong_pages: u64,
    /// Its heartbeats since its boot.
    #[n(2)]
    pub heartbeats: u64,
    /// What it says of its network cards, if it has any.
    #[n(3)]
    pub frames: Option<FrameCheck>,
}

/// What a guest says of the frames it exchanged since its boot, over all its network cards. Frames
/// are numbered and checksummed; what comes back is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FrameCheck {
    /// Frames it sent.
    #[n(0)]
    pub sent: u64,
    /// Frames that came back whole and in their turn.
    #[n(1)]
    pub received: u64,
    /// Numbers that were left out.
    #[n(2)]
    pub lost: u64,
    /// Numbers that came again.
    #[n(3)]
    pub repeated: u64,
    /// Frames whose content was wrong.
    #[n(4)]
    pub damaged: u64,
    /// How often a queue's index went past 65535.
    #[n(5)]
    pub index_wraps: u64,
}

impl Observed {
    /// What a report says; `None` if it is none of a machine's. The bytes may come from anybody.
    pub fn decode(report: &[u8]) -> Option<Observed> {
        minicbor::decode(report).ok()
    }

    /// What [`Observed::decode`] reads.
    pub fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("memory takes all of it")
    }

    fn of(machine: &Machine) -> Observed {
        let ns = |moment: Option<Instant>| moment.map(|moment| moment.0);
        let frames = || machine.nics.frame_times();
        Observed {
            first_heartbeat_ns: ns(machine.first_heartbeat()),
            last_heartbeat_ns: ns(machine.last_heartbeat()),
            first_frames_ns: frames().map(|(first, _)| ns(first)).collect(),
            last_frames_ns: frames().map(|(_, last)| ns(last)).collect(),
            check: machine.guest_counters().as_ref().map(GuestCheck::from),
        }
    }
}

impl GuestObserver for Machine {
    fn report(&self) -> Vec<u8> {
        Observed::of(self).encode()
    }

    fn has_seen_all(&self) -> bool {
        let Some(first) = self.first_heartbeat() else { return false };
        self.nics.frame_times().all(|(frame, _)| frame.is_some())
            || clock::now().since(first) > FRAMES_MAX
    }
}

impl From<&GuestCounters> for GuestCheck {
    fn from(counters: &GuestCounters) -> GuestCheck {
        let nics = counters.nic_total();
        GuestCheck {
            verified_pages: counters.verified_pages,
            wrong_pages: counters.wrong_pages,
            heartbeats: counters.heartbeats,
            frames: (counters.nic_count > 0).then_some(FrameCheck {
                sent: nics.sent,
                received: nics.received,
                lost: nics.lost,
                repeated: nics.repeated,
                damaged: nics.damaged,
                index_wraps: nics.index_wraps,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_short_and_is_read_back() {
        let frames = vec![Some(u64::MAX); 64];
        let most = u64::MAX;
        let observed = Observed {
            first_heartbeat_ns: Some(most),
            last_heartbeat_ns: None,
            first_frames_ns: frames.clone(),
            last_frames_ns: frames,
            check: Some(GuestCheck {
                verified_pages: most,
                wrong_pages: most,
                heartbeats: most,
                frames: Some(FrameCheck { sent: most, ..FrameCheck::default() }),
            }),
        };
        let bytes = observed.encode();
        assert!(bytes.len() <= martlet_engine::OBSERVED_BYTES_MAX, "{}", bytes.len());
        assert_eq!(Observed::decode(&bytes), Some(observed));
        assert_eq!(Observed::decode(b"something else"), None);
    }
}
