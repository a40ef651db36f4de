//! What stands in a key: the bus addresses of a direct key, the entries of the indirect one.

use martlet_device_io::BusRun;

/// Largest granule, as a power of two: a direct key is no longer than this.
pub(crate) const GRANULE_SHIFT_MAX: u32 = 30;

/// Bytes of an entry of a direct key's list, a bus address.
pub(crate) const MTT_BYTES: usize = 8;

/// Bytes of an entry of the indirect key's list.
pub(crate) const KLM_BYTES: usize = 16;

/// Bytes behind one entry of the indirect key at most; a hole that is longer takes several. The
/// field has 32 bits, and a longer count would silently lose its high bits (Linux a6097e0a54a5).
pub(crate) const KLM_COVERS_MAX: u64 = 1 << 30;

/// The bus addresses of a direct key, in equal steps, made when they are asked for: with 4 KiB
/// steps there are 262144 of them behind 1 GiB.
#[derive(Debug)]
pub(crate) struct Mtts {
    granule_shift: u32,
    /// Neighbours on the bus are one run.
    runs: Vec<BusRun>,
    /// Where each run ends, counted in bytes from the begin of the key.
    ends: Vec<u64>,
}

impl Mtts {
    /// `None` for no memory, for an empty run, and for more than fits in 64 bits.
    pub(crate) fn new(pinned: impl IntoIterator<Item = BusRun>) -> Option<Mtts> {
        let mut runs: Vec<BusRun> = Vec::new();
        for run in pinned {
            match runs.last_mut() {
                Some(last) if last.at.checked_add(last.bytes) == Some(run.at) => {
                    last.bytes = last.bytes.checked_add(run.bytes)?;
                }
                _ => runs.push(run),
            }
        }
        let mut end = 0_u64;
        let mut ends = Vec::with_capacity(runs.len());
        for run in &runs {
            run.at.checked_add(run.bytes)?;
            end = end.checked_add(run.bytes)?;
            ends.push(end);
        }
        let granule_shift = granule_shift(&runs)?;
        Some(Mtts { granule_shift, runs, ends })
    }

    /// Bytes behind the key.
    pub(crate) fn bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Bytes behind each entry, as a power of two.
    pub(crate) fn granule_shift(&self) -> u32 {
        self.granule_shift
    }

    /// Number of entries.
    pub(crate) fn count(&self) -> u64 {
        self.bytes() >> self.granule_shift
    }

    /// The entries from `index` on; zeros beyond the last, which is how the list is padded.
    pub(crate) fn entries(&self, index: u64) -> impl Iterator<Item = u64> {
        let step = 1 << self.granule_shift;
        let offset = index.saturating_mul(step);
        let mut number = self.ends.partition_point(|end| *end <= offset);
        let run = |number: usize| self.runs.get(number).copied();
        let before = number.checked_sub(1).and_then(|before| self.ends.get(before).copied());
        let mut inside = offset - before.unwrap_or(0);
        std::iter::repeat_with(move || {
            let Some(BusRun { at, bytes }) = run(number) else { return 0 };
            let entry = at.0 + inside;
            inside += step;
            if inside >= bytes {
                (number, inside) = (number + 1, 0);
            }
            entry
        })
    }
}

/// The largest power of two that divides every run's address and length, as its exponent: each
/// step of the key lies in one run then, and at a multiple of itself, as the device wants it.
///
/// Linux takes the logarithm of the common divisor of the lengths, rounded down. That is the same
/// only while the divisor is a power of two (three pages are not made of steps of two), and only
/// if the addresses are as round as the lengths.
fn granule_shift(runs: &[BusRun]) -> Option<u32> {
    if runs.is_empty() || runs.iter().any(|run| run.bytes == 0) {
        return None;
    }
    let bits = runs.iter().fold(0, |bits, run| bits | run.at.0 | run.bytes);
    Some(bits.trailing_zeros().min(GRANULE_SHIFT_MAX))
}

/// An entry of the indirect key's list: so many bytes, behind that key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Klm {
    pub(crate) bytes: u32,
    pub(crate) key: u32,
}

/// A piece as the indirect key sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Covered {
    pub(crate) iova: u64,
    pub(crate) bytes: u64,
    pub(crate) key: u32,
}

/// How many entries [`klms`] makes, without making them: a map with a hole of 2^60 bytes has a
/// billion.
pub(crate) fn klm_count(pieces: impl IntoIterator<Item = (u64, u64)>) -> u64 {
    let mut count = 0_u64;
    let mut last_end = None;
    for (iova, bytes) in pieces {
        let hole = iova - last_end.unwrap_or(iova);
        count += hole.div_ceil(KLM_COVERS_MAX) + bytes.div_ceil(KLM_COVERS_MAX);
        last_end = Some(iova + bytes);
    }
    count
}

/// The entries of the indirect key over `pieces`, which are in order: each piece by its own key,
/// what lies between them by `null_key`, which lets nothing through. Not padded.
pub(crate) fn klms(pieces: impl IntoIterator<Item = Covered>, null_key: u32) -> Vec<Klm> {
    let mut list = Vec::new();
    let mut last_end = None;
    for piece in pieces {
        let mut hole = piece.iova - last_end.unwrap_or(piece.iova);
        while hole > 0 {
            let bytes = hole.min(KLM_COVERS_MAX);
            list.push(Klm { bytes: klm_bytes(bytes), key: null_key });
            hole -= bytes;
        }
        list.push(Klm { bytes: klm_bytes(piece.bytes), key: piece.key });
        last_end = Some(piece.iova + piece.bytes);
    }
    list
}

fn klm_bytes(bytes: u64) -> u32 {
    assert!(bytes > 0 && bytes <= KLM_COVERS_MAX, "an entry covers up to 1 GiB");
    u32::try_from(bytes).expect("1 GiB fits in 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::PAGE;
    use martlet_device_io::BusAddress;
    use proptest::prelude::*;

    fn bus_run(at: u64, bytes: u64) -> BusRun {
        BusRun { at: BusAddress(at), bytes }
    }

    #[test]
    fn the_granule_minds_lengths_and_addresses() {
        let shift = |runs: &[(u64, u64)]| {
            Mtts::new(runs.iter().map(|(at, bytes)| bus_run(*at, *bytes))).unwrap().granule_shift()
        };
        assert_eq!(shift(&[(0x20_0000, 0x20_0000)]), 21);
        assert_eq!(shift(&[(0x20_1000, 0x20_0000)]), 12);
        assert_eq!(shift(&[(0x20_0000, 0x20_0000), (0x80_0000, 0x1000)]), 12);
        // Three pages each: the common divisor is no power of two.
        assert_eq!(shift(&[(0x20_0000, 0x3000), (0x80_0000, 0x3000)]), 12);
        assert_eq!(shift(&[(0, 1 << 30)]), 30);
        // Neighbours on the bus are one run.
        assert_eq!(shift(&[(0x20_0000, 0x1000), (0x20_1000, 0x1f_f000)]), 21);
    }

    #[test]
    fn no_memory_has_no_entries() {
        assert!(Mtts::new([]).is_none());
        assert!(Mtts::new([bus_run(0, 0)]).is_none());
        assert!(Mtts::new([bus_run(u64::MAX - PAGE, 2 * PAGE)]).is_none());
    }

    #[test]
    fn a_hole_of_more_than_1_gib_takes_several_entries() {
        const GIB: u64 = 1 << 30;
        let one = Covered { iova: GIB, bytes: GIB, key: 1 };
        let two = Covered { iova: 6 * GIB + PAGE, bytes: PAGE, key: 2 };
        let list = klms([one, two], 9);
        let list: Vec<(u64, u32)> =
            list.iter().map(|klm| (u64::from(klm.bytes), klm.key)).collect();
        assert_eq!(list, [(GIB, 1), (GIB, 9), (GIB, 9), (GIB, 9), (GIB, 9), (PAGE, 9), (PAGE, 2)]);
        assert_eq!(klm_count([one, two].map(|piece| (piece.iova, piece.bytes))), 7);
    }

    proptest! {
        #[test]
        fn each_step_lies_in_its_run(
            list in proptest::collection::vec((0_u64..4096, 1_u64..64, 0_u32..4), 1..20),
        ) {
            let runs: Vec<BusRun> = list
                .iter()
                .map(|(at, pages, shift)| bus_run((at * PAGE) << shift, (pages * PAGE) << shift))
                .collect();
            let mtts = Mtts::new(runs.iter().copied()).unwrap();
            let pages: Vec<u64> = runs
                .iter()
                .flat_map(|run| (0..run.bytes / PAGE).map(|page| run.at.0 + page * PAGE))
                .collect();
            // By brute force: the largest step whose entries give the same pages.
            let gives = |shift: u32| {
                let step = 1_usize << (shift - 12);
                pages.len().is_multiple_of(step)
                    && pages.chunks(step).all(|chunk| {
                        (chunk[0] >> shift) << shift == chunk[0]
                            && chunk.iter().zip(0..).all(|(at, page)| *at == chunk[0] + page * PAGE)
                    })
            };
            let best = (12..=GRANULE_SHIFT_MAX).rev().find(|shift| gives(*shift)).unwrap();
            prop_assert_eq!(mtts.granule_shift(), best);
            let brute = merged(&runs).iter().flat_map(|run| [run.at.0, run.bytes]).fold(0, gcd);
            prop_assert_eq!(1_u64 << mtts.granule_shift(), largest_power_of_two_in(brute));
            let step = 1_u64 << (mtts.granule_shift() - 12);
            for (index, at) in (0..).zip(pages.iter()) {
                let entry = mtts.entries(index / step).next().unwrap();
                prop_assert_eq!(entry + (index % step) * PAGE, *at);
            }
            // From wherever one begins, and zeros after the last.
            let count = usize::try_from(mtts.count()).unwrap();
            let all: Vec<u64> = mtts.entries(0).take(count + 3).collect();
            prop_assert_eq!(&all[count..], [0; 3]);
            for index in (0..count).step_by(count / 16 + 1) {
                let from = u64::try_from(index).unwrap();
                let rest: Vec<u64> = mtts.entries(from).take(count + 3 - index).collect();
                prop_assert_eq!(&rest, &all[index..]);
            }
        }

        #[test]
        fn entries_cover_everything_in_order(
            list in proptest::collection::vec((0_u64..3 << 30, 1_u64..1 << 18), 1..10),
        ) {
            let mut at = 1 << 40;
            let mut pieces = Vec::new();
            for (key, (hole, pages)) in (1..).zip(list) {
                let hole = hole & !(PAGE - 1);
                pieces.push(Covered { iova: at + hole, bytes: pages * PAGE, key });
                at += hole + pages * PAGE;
            }
            let list = klms(pieces.iter().copied(), 0);
            let bounds = pieces.iter().map(|piece| (piece.iova, piece.bytes));
            prop_assert_eq!(u64::try_from(list.len()).unwrap(), klm_count(bounds));
            let mut at = pieces[0].iova;
            let mut rest = pieces.iter();
            for klm in list {
                if klm.key != 0 {
                    let piece = rest.next().unwrap();
                    prop_assert_eq!((at, u64::from(klm.bytes), klm.key), (piece.iova, piece.bytes, piece.key));
                }
                at += u64::from(klm.bytes);
            }
            prop_assert!(rest.next().is_none());
        }
    }

    fn merged(runs: &[BusRun]) -> Vec<BusRun> {
        let mut list: Vec<BusRun> = Vec::new();
        for run in runs {
            match list.last_mut() {
                Some(last) if last.at.0 + last.bytes == run.at.0 => last.bytes += run.bytes,
                _ => list.push(*run),
            }
        }
        list
    }

    fn gcd(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { gcd(b, a % b) }
    }

    fn largest_power_of_two_in(value: u64) -> u64 {
        (0..=GRANULE_SHIFT_MAX)
            .rev()
            .map(|shift| 1 << shift)
            .find(|power| value.is_multiple_of(*power))
            .unwrap()
    }
}
