//! Whether two processes read the same clock, without telling anybody which host that is.

use martlet_wire::control::MigrationId;

/// What a host's clock is known by. Equal keys are equal clocks; the key itself never leaves its
/// process, and its proof for one migration says nothing to who does not have it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ClockKey([u8; 32]);

impl ClockKey {
    /// From facts that all processes with the same clock see, and others can't guess.
    pub fn new(facts: &[u8]) -> ClockKey {
        ClockKey(blake3::derive_key("martlet protocol 1: processes with the same clock", facts))
    }

    /// What a process with this key shows in a migration.
    pub fn proof(&self, migration: MigrationId) -> [u8; 32] {
        *blake3::keyed_hash(&self.0, &migration.0).as_bytes()
    }
}

impl core::fmt::Debug for ClockKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ClockKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_hosts_show_equal_proofs_and_each_migration_another() {
        let (here, there) = (ClockKey::new(b"here"), ClockKey::new(b"there"));
        let (one, two) = (MigrationId([1; 16]), MigrationId([2; 16]));
        assert_eq!(here.proof(one), ClockKey::new(b"here").proof(one));
        assert_ne!(here.proof(one), there.proof(one));
        assert_ne!(here.proof(one), here.proof(two));
    }
}
