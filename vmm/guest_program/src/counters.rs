//! What the guest says of itself, read from its memory while it runs or after it stopped.

use crate::abi::{Counters, Directory, MAGIC, VERSION};
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
    Some(sum)
}

impl GuestCounters {
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
        ) {
            let words = [MAGIC, VERSION, vcpus, counters, stride];
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let _ = read_counters(|gpa, buffer| {
                if gpa == PROGRAM_GPA { buffer.copy_from_slice(&bytes) } else { buffer.fill(fill) }
                true
            });
        }
    }
}
