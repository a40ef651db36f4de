//! What a destination must have in common with the source.

use super::tsc::tsc_khz;
use crate::saved::decode;
use crate::vcpu::backend::BackendError;
use minicbor::{Decode, Encode};

/// Most bytes of a description; what is longer is refused unread.
const DESCRIPTION_BYTES_MAX: usize = 4096;

/// Field numbers are never used again for something else; new fields are optional.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct Description {
    /// Empty. Once the boot id of the running kernel, which is told to nobody any more.
    #[n(0)]
    boot_id: String,
    /// Host address of guest physical address 0.
    #[n(1)]
    base: u64,
    /// For the guest's ticks; a matter of information, as the host is the same.
    #[n(2)]
    tsc_khz: u32,
    // 3 was a secret.
}

impl Description {
    /// Describes this process.
    pub(super) fn here(base: u64) -> Description {
        Description { boot_id: String::new(), base, tsc_khz: tsc_khz() }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("writing to a vector can't fail")
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Description, BackendError> {
        if bytes.len() > DESCRIPTION_BYTES_MAX {
            let reason = format!("{} bytes of a description", bytes.len());
            return Err(BackendError::state(reason));
        }
        decode(bytes).map_err(BackendError::state)
    }

    /// Whether a guest that is so described can run where `here` is true.
    pub(super) fn check(&self, here: &Description) -> Result<(), BackendError> {
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
    fn a_guest_stays_at_its_address() {
        let here = Description::here(0x1000_0000);
        assert_eq!(here.check(&here).map_err(|error| error.to_string()), Ok(()));
        let same = Description::from_bytes(&here.to_bytes()).unwrap();
        assert_eq!(same, here);
        let other = Description { base: 0x2000_0000, ..here.clone() };
        assert!(other.check(&here).is_err());
    }

    #[test]
    fn hostile_bytes_are_refused() {
        let good = Description::here(0).to_bytes();
        for cut in 0..good.len() {
            assert!(Description::from_bytes(&good[..cut]).is_err(), "{cut}");
        }
        assert!(Description::from_bytes(&vec![0; DESCRIPTION_BYTES_MAX + 1]).is_err());
        assert!(Description::from_bytes(&[0xff; 64]).is_err());
    }
}
