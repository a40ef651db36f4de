//! The right to run a guest.

/// The right to run one guest. There is one for each guest that was ever booted; whoever starts
/// a vCPU must hold it. It can't be copied or made outside this crate, except at the boot of a
/// new guest. It moves from the source to the destination with the commit, in the two machines of
/// this crate and nowhere else.
///
/// Dropping it is allowed and means that the guest will never run again.
#[derive(Debug)]
#[must_use = "a guest whose permit is dropped can never run again"]
pub struct RunPermit {
    _private: (),
}

impl RunPermit {
    /// The permit of a guest that did not exist before. Call it once for each guest booted from
    /// nothing, never for one that arrives by migration.
    pub fn for_new_guest() -> RunPermit {
        RunPermit { _private: () }
    }
}
