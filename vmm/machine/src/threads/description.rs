//! What a destination must have in common with the source.

use super::tsc::tsc_khz;
use crate::vcpu::backend::BackendError;
use minicbor::{Decode, Encode};

/// Most bytes of a description; what is longer is refused unread.
const DESCRIPTION_BYTES_MAX: usize = 4096;

/// Field numbers are never used again for something else; new fields are optional.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct Description {
    /// Of the running kernel. Also what keeps strangers from sending code: see the module above.
    #[n(0)]
    boot_id: String,
    /// Host address of guest physical address 0.
    #[n(1)]
    base: u64,
    /// For the guest's ticks; a matter of information, as the host is the same.
    #[n(2)]
    tsc_khz: u32,
}

impl Description {
    /// Describes this process.
    pub(super) fn here(base: u64) -> Result<Description, BackendError> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(BackendError::host("read /proc/sys/kernel/random/boot_id"))?;
        Ok(Description { boot_id: boot_id.trim().to_owned(), base, tsc_khz: tsc_khz() })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("writing to a vector can't fail")
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Description, BackendError> {
        if bytes.len() > DESCRIPTION_BYTES_MAX {
            let reason = format!("{} bytes of a description", bytes.len());
            return Err(BackendError::state(reason));
        }
        minicbor::decode(bytes).map_err(|error| BackendError::state(error.to_string()))
    }

    /// Whether a guest that is so described can run where `here` is true.
    pub(super) fn check(&self, here: &Description) -> Result<(), BackendError> {
        // Kernels without a boot id would all be alike.
        if self.boot_id.is_empty() || self.boot_id != here.boot_id {
            let reason = "the guest runs without KVM on another host, which it can't leave: \
                          it is a part of its process and lives by its host's clock"
                .into();
            return Err(BackendError::Unsupported { reason });
        }
        if self.base != here.base {
            let (theirs, ours) = (self.base, here.base);
            let reason = format!("guest memory is at {theirs:#x} at the source, {ours:#x} here");
            return Err(BackendError::Unsupported { reason });
        }
        Ok(())
    }

    pub(super) fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_stays_on_its_host_and_at_its_address() {
        let here = Description::here(0x1000_0000).unwrap();
        assert_eq!(here.check(&here).map_err(|error| error.to_string()), Ok(()));
        let same = Description::from_bytes(&here.to_bytes()).unwrap();
        assert_eq!(same, here);
        for other in [
            Description { boot_id: "11111111-2222-3333-4444-555555555555".into(), ..here.clone() },
            Description { boot_id: String::new(), ..here.clone() },
            Description { base: 0x2000_0000, ..here.clone() },
        ] {
            assert!(other.check(&here).is_err(), "{other:?}");
        }
    }

    #[test]
    fn hostile_bytes_are_refused() {
        let good = Description::here(0).unwrap().to_bytes();
        for cut in 0..good.len() {
            assert!(Description::from_bytes(&good[..cut]).is_err(), "{cut}");
        }
        assert!(Description::from_bytes(&vec![0; DESCRIPTION_BYTES_MAX + 1]).is_err());
        assert!(Description::from_bytes(&[0xff; 64]).is_err());
    }
}
