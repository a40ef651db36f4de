//! Where frames go that a device sends, and where those come from that it receives.
//!
//! One rule holds for all ports: a transmit descriptor is completed when the port has taken the
//! frame, and not before. A port that can't take it (no receive buffer on the other side, a queue
//! that does not run, a link that is down, a full tap) leaves it in the ring. So a frame is either
//! still the sender's or already the receiver's, and a device that is suspended loses none and
//! repeats none.

use super::Nic;
use super::tap::Tap;
use std::sync::{Arc, OnceLock, Weak};

/// Where a device is plugged in.
pub enum Port {
    /// Frames come back: from the transmit queue of a pair to a receive queue of the same device,
    /// of the same pair unless a receive queue table says otherwise.
    Loopback,
    /// A cable to another device of this process.
    Wire(WireEnd),
    /// A network interface of the host.
    Tap(Tap),
}

/// One end of a cable.
pub struct WireEnd {
    own: Arc<OnceLock<Weak<Nic>>>,
    other: Arc<OnceLock<Weak<Nic>>>,
}

impl WireEnd {
    /// A cable.
    pub fn pair() -> (WireEnd, WireEnd) {
        let (a, b) = (Arc::default(), Arc::default());
        let one = WireEnd { own: Arc::clone(&a), other: Arc::clone(&b) };
        (one, WireEnd { own: b, other: a })
    }

    /// Plugs a device in, once.
    pub(crate) fn plug(&self, nic: Weak<Nic>) {
        let fresh = self.own.set(nic).is_ok();
        assert!(fresh, "an end of a cable is plugged in once");
    }

    /// The device at the other end, while there is one.
    pub(crate) fn other(&self) -> Option<Arc<Nic>> {
        self.other.get().and_then(Weak::upgrade)
    }
}
