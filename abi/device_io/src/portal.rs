//! 64-byte submission portals: ENQCMD, MOVDIR64B, or a `write` to a device file.

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 64;

/// What came of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// The device has the descriptor. MOVDIR64B always says so: who uses it counts credits.
    Accepted,
    /// The work queue is full, or over its threshold; nothing was taken.
    Retry,
    /// There is no device behind the portal any more; nothing was taken.
    Gone,
}

/// Where descriptors go.
///
/// A submission is a release: the device sees everything that the calling thread wrote before it
/// (ENQCMD and MOVDIR64B are weakly ordered, so an implementation fences).
pub trait Portal: Send + Sync {
    /// Hands one descriptor to the device, all of it or nothing.
    fn submit(&self, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Submission;
}
