//! What travels of a machine: its description before, its state at the switchover. Never reuse a
//! number; a new field is an `Option`.

use crate::devices::virtio::{NICS_MAX, NicKind, SavedNic};
use crate::devices::{SavedBoard, SavedSerial};
use crate::{Accel, VCPUS_MAX};
use martlet_ram::REGIONS_MAX;
use martlet_units::{Gfn, PageCount, PageRange};
use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

/// Names the format, so that another VMM's description is refused by name.
const FORMAT: &str = "martlet-machine";
/// The same for a machine with network cards: one who does not know them must not build it without.
const FORMAT_WITH_NICS: &str = "martlet-machine with virtio-net";

/// Decodes a peer's bytes, all of them.
pub(crate) fn decode<'b, T: minicbor::Decode<'b, ()>>(bytes: &'b [u8]) -> Result<T, String> {
    let end = martlet_wire::cbor::check_nesting(bytes).map_err(|error| error.to_string())?;
    if end != bytes.len() {
        return Err(format!("{} bytes behind its end", bytes.len() - end));
    }
    minicbor::decode(bytes).map_err(|error| error.to_string())
}

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
    /// Network cards, if there are any.
    #[n(5)]
    nics: Option<Vec<NicKind>>,
    /// What lies in the last memory region: what the guest boots from, not memory of its own. An
    /// older destination takes it for memory, of which no memory map tells the guest.
    #[n(6)]
    power_on: Option<PowerOnKind>,
}

/// What a guest is booted from again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub(crate) enum PowerOnKind {
    /// The built-in program.
    #[n(0)]
    Program,
    /// A kernel, which wants to be reset at a triple fault.
    #[n(1)]
    Kernel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
enum SavedAccel {
    #[n(0)]
    Kvm,
    #[n(1)]
    Threads,
}

/// A run of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct SavedRange {
    #[n(0)]
    pub(crate) start: u64,
    #[n(1)]
    pub(crate) pages: u64,
}

/// A description whose parts have been checked, each by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) accel: Accel,
    pub(crate) vcpus: u16,
    pub(crate) memory: Vec<PageRange>,
    pub(crate) backend: Vec<u8>,
    pub(crate) nics: Vec<NicKind>,
    /// Set if the last range of `memory`, of at least two, is for what the guest boots from.
    pub(crate) power_on: Option<PowerOnKind>,
}

impl Description {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let memory = self.memory.iter();
        let saved = SavedDescription {
            format: if self.nics.is_empty() { FORMAT } else { FORMAT_WITH_NICS }.to_owned(),
            accel: match self.accel {
                Accel::Kvm => SavedAccel::Kvm,
                Accel::Threads => SavedAccel::Threads,
            },
            vcpus: self.vcpus,
            memory: memory.map(|r| SavedRange { start: r.start().0, pages: r.pages().0 }).collect(),
            backend: self.backend.clone(),
            nics: Some(self.nics.clone()).filter(|nics| !nics.is_empty()),
            power_on: self.power_on,
        };
        minicbor::to_vec(&saved).expect("a vector takes everything")
    }

    /// Reads a peer's bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Description, String> {
        let saved: SavedDescription = decode(bytes)?;
        if saved.format != FORMAT && saved.format != FORMAT_WITH_NICS {
            return Err(format!("a machine of another kind ({:?})", limited(&saved.format)));
        }
        if saved.vcpus == 0 || saved.vcpus > VCPUS_MAX {
            return Err(format!("{} vCPUs, this machine has 1 to {VCPUS_MAX}", saved.vcpus));
        }
        if saved.memory.len() > REGIONS_MAX {
            return Err(format!("{} memory regions", saved.memory.len()));
        }
        let nics = saved.nics.unwrap_or_default();
        if nics.len() > NICS_MAX {
            return Err(format!("{} network cards, this machine has up to {NICS_MAX}", nics.len()));
        }
        if saved.power_on.is_some() && saved.memory.len() < 2 {
            return Err("no memory but what the guest boots from".into());
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
            nics,
            power_on: saved.power_on,
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
    /// Network cards, if there are any.
    #[n(3)]
    pub(crate) nics: Option<Vec<SavedNic>>,
    /// The board's registers. An older destination has none: its guest can't turn itself off.
    #[n(4)]
    pub(crate) board: Option<SavedBoard>,
}

impl SavedMachine {
    pub(crate) fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("a vector takes everything")
    }

    /// Reads a peer's bytes; all of them.
    pub(crate) fn decode(bytes: &[u8]) -> Result<SavedMachine, String> {
        decode(bytes)
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
            nics: Vec::new(),
            power_on: None,
        }
    }

    fn with_power_on() -> Description {
        let range = |start| PageRange::try_new(Gfn(start), PageCount(4096)).unwrap();
        let (memory, power_on) = (vec![range(0), range(1 << 20)], Some(PowerOnKind::Kernel));
        Description { memory, power_on, ..description() }
    }

    fn with_nics() -> Description {
        let nic = NicKind {
            features: 1 << 32 | 1 << 5,
            queues: 32,
            queue_size_max: 256,
            mac: Some([2, 0, 0, 0, 0, 1]),
        };
        Description { nics: vec![nic.clone(), NicKind { mac: None, ..nic }], ..description() }
    }

    #[test]
    fn a_description_survives_the_way() {
        assert_eq!(Description::decode(&description().encode()), Ok(description()));
        assert_eq!(Description::decode(&with_nics().encode()), Ok(with_nics()));
        assert_eq!(Description::decode(&with_power_on().encode()), Ok(with_power_on()));
        let only_that = Description { memory: description().memory, ..with_power_on() };
        assert!(Description::decode(&only_that.encode()).is_err());
    }

    /// What martlet wrote before there were network cards, byte for byte: a machine without them
    /// is still written and read so.
    #[test]
    fn machines_without_cards_are_as_ever() {
        let before: &[u8] = b"\xa5\x00\x6fmartlet-machine\x01\x00\x02\x02\x03\x81\x82\x00\x19\
            \x10\x00\x04\x43\x01\x02\x03";
        assert_eq!(description().encode(), before);
        assert_eq!(Description::decode(before), Ok(description()));
        // One who knows that name only refuses a machine with cards by its name.
        assert!(with_nics().encode().windows(8).any(|bytes| bytes == b"with vir"));
    }

    #[test]
    fn too_many_cards_are_refused() {
        let mut many = with_nics();
        many.nics = vec![many.nics[0].clone(); NICS_MAX + 1];
        assert!(Description::decode(&many.encode()).is_err());
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
            #[n(99)]
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
