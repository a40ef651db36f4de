//! What travels of a machine: its description before, its state at the switchover. Never reuse a
//! number; a new field is an `Option`.

use crate::devices::SavedSerial;
use crate::{Accel, VCPUS_MAX};
use martlet_ram::REGIONS_MAX;
use martlet_units::{Gfn, PageCount, PageRange};
use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

/// Names the format, so that another VMM's description is refused by name.
const FORMAT: &str = "martlet-machine";

/// What a destination must build.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedDescription {
    #[n(0)]
    format: String,
    #[n(1)]
    accel: SavedAccel,
    #[n(2)]
    vcpus: u16,
    #[n(3)]
    memory: Vec<SavedRange>,
    /// The backend's own part.
    #[cbor(n(4), with = "minicbor::bytes")]
    backend: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
enum SavedAccel {
    #[n(0)]
    Kvm,
    #[n(1)]
    Threads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
struct SavedRange {
    #[n(0)]
    start: u64,
    #[n(1)]
    pages: u64,
}

/// A description whose parts have been checked, each by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) accel: Accel,
    pub(crate) vcpus: u16,
    pub(crate) memory: Vec<PageRange>,
    pub(crate) backend: Vec<u8>,
}

impl Description {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let memory = self.memory.iter();
        let saved = SavedDescription {
            format: FORMAT.to_owned(),
            accel: match self.accel {
                Accel::Kvm => SavedAccel::Kvm,
                Accel::Threads => SavedAccel::Threads,
            },
            vcpus: self.vcpus,
            memory: memory.map(|r| SavedRange { start: r.start().0, pages: r.pages().0 }).collect(),
            backend: self.backend.clone(),
        };
        minicbor::to_vec(&saved).expect("a vector takes everything")
    }

    /// Reads a peer's bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Description, String> {
        let saved: SavedDescription = minicbor::decode(bytes).map_err(|error| error.to_string())?;
        if saved.format != FORMAT {
            return Err(format!("a machine of another kind ({:?})", limited(&saved.format)));
        }
        if saved.vcpus == 0 || saved.vcpus > VCPUS_MAX {
            return Err(format!("{} vCPUs, this machine has 1 to {VCPUS_MAX}", saved.vcpus));
        }
        if saved.memory.len() > REGIONS_MAX {
            return Err(format!("{} memory regions", saved.memory.len()));
        }
        let range = |range: &SavedRange| {
            PageRange::try_new(Gfn(range.start), PageCount(range.pages))
                .ok_or_else(|| format!("memory of {} pages at {:#x}", range.pages, range.start))
        };
        Ok(Description {
            accel: match saved.accel {
                SavedAccel::Kvm => Accel::Kvm,
                SavedAccel::Threads => Accel::Threads,
            },
            vcpus: saved.vcpus,
            memory: saved.memory.iter().map(range).collect::<Result<_, _>>()?,
            backend: saved.backend,
        })
    }
}

/// The beginning of a text that a peer chose.
fn limited(text: &str) -> String {
    text.chars().take(32).collect()
}

/// The whole machine but its memory.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedMachine {
    /// One part for each vCPU, in the backend's encoding.
    #[n(0)]
    pub(crate) vcpus: Vec<ByteVec>,
    /// What they share, in the backend's encoding.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub(crate) vm: Vec<u8>,
    #[n(2)]
    pub(crate) serial: SavedSerial,
}

impl SavedMachine {
    pub(crate) fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("a vector takes everything")
    }

    /// Reads a peer's bytes; all of them.
    pub(crate) fn decode(bytes: &[u8]) -> Result<SavedMachine, String> {
        let mut decoder = minicbor::Decoder::new(bytes);
        let saved = decoder.decode().map_err(|error: minicbor::decode::Error| error.to_string())?;
        if decoder.position() == bytes.len() {
            Ok(saved)
        } else {
            Err(format!("{} bytes behind its end", bytes.len() - decoder.position()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        Description {
            accel: Accel::Kvm,
            vcpus: 2,
            memory: vec![PageRange::try_new(Gfn(0), PageCount(4096)).unwrap()],
            backend: vec![1, 2, 3],
        }
    }

    #[test]
    fn a_description_survives_the_way() {
        assert_eq!(Description::decode(&description().encode()), Ok(description()));
    }

    #[test]
    fn hostile_descriptions_are_refused() {
        let good = description().encode();
        for cut in 0..good.len() {
            assert!(Description::decode(&good[..cut]).is_err(), "cut at {cut}");
        }
        let many = Description { vcpus: VCPUS_MAX + 1, ..description() };
        assert!(Description::decode(&many.encode()).is_err());
        let mut other = good.clone();
        let place = other.windows(7).position(|w| w == b"martlet").unwrap();
        other[place] = b'X';
        let error = Description::decode(&other).unwrap_err();
        assert!(error.contains("another kind"), "{error}");
    }

    /// A newer martlet's description has a field more.
    #[test]
    fn newer_descriptions_are_read() {
        #[derive(Encode)]
        #[cbor(map)]
        struct Newer {
            #[n(0)]
            format: &'static str,
            #[n(1)]
            accel: SavedAccel,
            #[n(2)]
            vcpus: u16,
            #[n(3)]
            memory: Vec<SavedRange>,
            #[cbor(n(4), with = "minicbor::bytes")]
            backend: Vec<u8>,
            #[n(5)]
            colour: Vec<&'static str>,
        }
        let newer = Newer {
            format: FORMAT,
            accel: SavedAccel::Threads,
            vcpus: 1,
            memory: vec![SavedRange { start: 0, pages: 1 }],
            backend: Vec::new(),
            colour: vec!["black"],
        };
        let read = Description::decode(&minicbor::to_vec(newer).unwrap()).unwrap();
        assert_eq!((read.accel, read.vcpus), (Accel::Threads, 1));
    }
}
