//! What the guest says of itself, read from its memory while it runs or after it stopped.

use crate::abi::{self, Counters, Directory, MAGIC, NICS_MAX, VERSION};
use crate::plan::{PROGRAM_GPA, VCPUS_MAX};
use martlet_units::{Gfn, Gpa};
use std::mem::{offset_of, size_of};

/// The sum over all vCPUs. Each number is exact, but they are not of the same moment while the
/// guest runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestCounters {
    /// How many vCPUs there are.
    pub vcpus: u16,
    /// All of them have filled their memory.
    pub ready: bool,
    /// Pages filled so far.
    pub filled_pages: u64,
    /// Ticks so far.
    pub heartbeats: u64,
    /// Pages of the working set that were rewritten so far.
    pub written_pages: u64,
    /// Checks of a page so far.
    pub verified_pages: u64,
    /// How many of them failed. One is a lost guest.
    pub wrong_pages: u64,
    /// The first failure of the lowest vCPU that had one.
    pub first_wrong: Option<WrongPage>,
    /// How often a vCPU saw its time stamp counter go backwards. One is a lost guest, too.
    pub tsc_backwards: u64,
    /// The longest time between two ticks of a vCPU, in cycles of the time stamp counter.
    pub longest_gap_cycles: u64,
    /// How many network cards there are: the first ones of `nics`.
    pub nic_count: u16,
    /// What the guest says of each card; see [`GuestCounters::nics`].
    pub nics: [NicCounters; NICS_MAX],
}

/// What the guest says of one of its network cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// The guest has set it up.
    pub runs: bool,
    /// The card refused to be set up; the guest does without.
    pub refused: bool,
    /// Queue pairs that the guest uses.
    pub pairs: u64,
    /// Frames sent.
    pub sent: u64,
    /// Frames that came back whole and in their turn.
    pub received: u64,
    /// Numbers that were left out, or did not come for seconds. One is a frame lost.
    pub lost: u64,
    /// Numbers that came again.
    pub repeated: u64,
    /// Frames whose content was wrong, and impossible answers of the card.
    pub damaged: u64,
    /// How often a transmit queue's index went past 65535.
    pub index_wraps: u64,
    /// How often all frames of a pair that were under way were given up; they count as lost.
    pub stalls: u64,
    /// How often the guest told the card that there is something new.
    pub kicks: u64,
}

impl NicCounters {
    /// Frames under way: sent, and neither received nor lost yet. Exact while the guest stands.
    pub fn outstanding(&self) -> u64 {
        self.sent.saturating_sub(self.received).saturating_sub(self.lost)
    }

    fn add(&mut self, other: &NicCounters) {
        self.runs &= other.runs;
        self.refused |= other.refused;
        let pairs = [
            (&mut self.pairs, other.pairs),
            (&mut self.sent, other.sent),
            (&mut self.received, other.received),
            (&mut self.lost, other.lost),
            (&mut self.repeated, other.repeated),
            (&mut self.damaged, other.damaged),
            (&mut self.index_wraps, other.index_wraps),
            (&mut self.stalls, other.stalls),
            (&mut self.kicks, other.kicks),
        ];
        for (sum, one) in pairs {
            *sum = sum.saturating_add(one);
        }
    }

    fn read(bytes: &[u8; size_of::<abi::NicCounters>()]) -> NicCounters {
        let at = |offset| word(bytes, offset);
        let state = at(offset_of!(abi::NicCounters, state));
        NicCounters {
            runs: state == abi::NIC_RUNS,
            refused: state == abi::NIC_REFUSED,
            pairs: at(offset_of!(abi::NicCounters, pairs)),
            sent: at(offset_of!(abi::NicCounters, sent)),
            received: at(offset_of!(abi::NicCounters, received)),
            lost: at(offset_of!(abi::NicCounters, lost)),
            repeated: at(offset_of!(abi::NicCounters, repeated)),
            damaged: at(offset_of!(abi::NicCounters, damaged)),
            index_wraps: at(offset_of!(abi::NicCounters, index_wraps)),
            stalls: at(offset_of!(abi::NicCounters, stalls)),
            kicks: at(offset_of!(abi::NicCounters, kicks)),
        }
    }
}

/// A page that the guest found wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongPage {
    /// Where.
    pub frame: Gfn,
    /// The version that should have been there; 0 for a page that should have been zero.
    pub version: u64,
    /// The first 64-bit word that differed; 511 also if only the version table did.
    pub word: u64,
    /// What it held.
    pub value: u64,
}

/// Reads the counters of the guest whose memory `read` reads: it fills the buffer from a guest
/// physical address on and says whether there was memory. `None` if the built-in program is not in
/// this memory. The memory is the guest's, so whatever is in it is taken as possible.
pub fn read_counters(mut read: impl FnMut(Gpa, &mut [u8]) -> bool) -> Option<GuestCounters> {
    let mut directory = [0; size_of::<Directory>()];
    if !read(PROGRAM_GPA, &mut directory) {
        return None;
    }
    let at = |offset| word(&directory, offset);
    if at(offset_of!(Directory, magic)) != MAGIC || at(offset_of!(Directory, version)) != VERSION {
        return None;
    }
    let vcpus = u16::try_from(at(offset_of!(Directory, vcpus))).ok()?;
    if vcpus == 0 || vcpus > VCPUS_MAX {
        return None;
    }
    let stride = at(offset_of!(Directory, counters_stride));
    let first = at(offset_of!(Directory, counters));
    let mut sum = GuestCounters { vcpus, ready: true, ..GuestCounters::default() };
    for vcpu in 0..u64::from(vcpus) {
        let gpa = stride.checked_mul(vcpu)?.checked_add(first)?;
        let mut bytes = [0; size_of::<Counters>()];
        if !read(Gpa(gpa), &mut bytes) {
            return None;
        }
        sum.add(&bytes);
    }
    let nics = usize::try_from(at(offset_of!(Directory, nics))).ok()?;
    let (stride, first) =
        (at(offset_of!(Directory, nic_counters_stride)), at(offset_of!(Directory, nic_counters)));
    for (number, nic) in (0..).zip(sum.nics.get_mut(..nics)?) {
        let gpa = stride.checked_mul(number)?.checked_add(first)?;
        let mut bytes = [0; size_of::<abi::NicCounters>()];
        if !read(Gpa(gpa), &mut bytes) {
            return None;
        }
        *nic = NicCounters::read(&bytes);
        sum.nic_count += 1;
    }
    Some(sum)
}

impl GuestCounters {
    /// What the guest says of each of its network cards, in their order.
    pub fn nics(&self) -> &[NicCounters] {
        &self.nics[..usize::from(self.nic_count).min(NICS_MAX)]
    }

    /// The sum over all cards: `runs` if all run, `refused` if one was.
    pub fn nic_total(&self) -> NicCounters {
        let mut total = NicCounters { runs: true, ..NicCounters::default() };
        self.nics().iter().for_each(|nic| total.add(nic));
        total
    }

    fn add(&mut self, counters: &[u8; size_of::<Counters>()]) {
        let at = |offset| word(counters, offset);
        let add = |to: &mut u64, offset| *to = to.saturating_add(at(offset));
        self.ready &= at(offset_of!(Counters, ready)) != 0;
        add(&mut self.filled_pages, offset_of!(Counters, filled_pages));
        add(&mut self.heartbeats, offset_of!(Counters, heartbeats));
        add(&mut self.written_pages, offset_of!(Counters, written_pages));
        add(&mut self.verified_pages, offset_of!(Counters, verified_pages));
        add(&mut self.wrong_pages, offset_of!(Counters, wrong_pages));
        add(&mut self.tsc_backwards, offset_of!(Counters, tsc_backwards));
        let gap = at(offset_of!(Counters, longest_gap));
        self.longest_gap_cycles = self.longest_gap_cycles.max(gap);
        if at(offset_of!(Counters, wrong_pages)) > 0 && self.first_wrong.is_none() {
            self.first_wrong = Some(WrongPage {
                frame: Gfn(at(offset_of!(Counters, first_wrong_frame))),
                version: at(offset_of!(Counters, first_wrong_version)),
                word: at(offset_of!(Counters, first_wrong_word)),
                value: at(offset_of!(Counters, first_wrong_value)),
            });
        }
    }
}

/// One word of a structure; its offset is a compile-time constant inside of it.
fn word(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn other_memory_is_not_taken_for_the_program() {
        assert_eq!(read_counters(|_, _| false), None);
        assert_eq!(
            read_counters(|_, buffer| {
                buffer.fill(0);
                true
            }),
            None
        );
    }

    proptest! {
        #[test]
        fn hostile_directories_are_survived(
            vcpus in any::<u64>(), counters in any::<u64>(), stride in any::<u64>(), fill: u8,
            nics in any::<u64>(),
        ) {
            let words = [MAGIC, VERSION, vcpus, counters, stride, nics, counters, stride];
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let _ = read_counters(|gpa, buffer| {
                if gpa == PROGRAM_GPA { buffer.copy_from_slice(&bytes) } else { buffer.fill(fill) }
                true
            });
        }
    }
}
