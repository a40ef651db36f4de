//! The guest's map, cut into the pieces that get a key each.

use crate::memory::build::invalid;
use martlet_units::PAGE_SIZE;
use martlet_vdpa::{Access, HostMemory, MapRun, VdpaError};

/// A piece of the map behind one direct key: contiguous for the guest, one access, at most
/// `piece_bytes` long, and never across a multiple of that.
///
/// The kernel counts its pieces from the begin of a chain of adjacent runs. Cutting at multiples
/// instead costs at most one key a chain, and keeps all the others when the chain grows or shrinks
/// at its begin.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) iova: u64,
    pub(crate) bytes: u64,
    pub(crate) access: Access,
    /// The memory behind it, in order; together `bytes` long. Keeps the owners, so that nobody
    /// else's memory can have the same name while the piece is known.
    pub(crate) memory: Vec<HostMemory>,
}

impl Piece {
    /// One past its last address.
    pub(crate) fn end(&self) -> u64 {
        self.iova + self.bytes
    }

    /// Whether the other piece is the same for the device: then it can have the same key. How the
    /// memory was cut into runs makes no difference.
    pub(crate) fn same(&self, other: &Piece) -> bool {
        (self.iova, self.bytes, self.access) == (other.iova, other.bytes, other.access)
            && same_memory(&self.memory, &other.memory)
    }
}

/// Whether two lists name the same memory, byte by byte.
fn same_memory(one: &[HostMemory], two: &[HostMemory]) -> bool {
    let (mut one, mut two) = (Cursor::new(one), Cursor::new(two));
    loop {
        match (one.rest(), two.rest()) {
            (None, None) => return true,
            (Some(a), Some(b)) => {
                let bytes = a.bytes().min(b.bytes());
                if a.slice(0, bytes) != b.slice(0, bytes) {
                    return false;
                }
                one.skip(bytes);
                two.skip(bytes);
            }
            (None, Some(_)) | (Some(_), None) => return false,
        }
    }
}

/// A place in a list of memory.
struct Cursor<'a> {
    list: &'a [HostMemory],
    offset: u64,
}

impl Cursor<'_> {
    fn new(list: &[HostMemory]) -> Cursor<'_> {
        Cursor { list, offset: 0 }
    }

    /// What is left of the entry that the cursor is in.
    fn rest(&self) -> Option<HostMemory> {
        let first = self.list.first()?;
        first.slice(self.offset, first.bytes() - self.offset)
    }

    /// Goes on by `bytes`, not beyond what is left of the entry.
    fn skip(&mut self, bytes: u64) {
        self.offset += bytes;
        if let Some((first, others)) = self.list.split_first()
            && self.offset == first.bytes()
        {
            (self.list, self.offset) = (others, 0);
        }
    }
}

/// Cuts a map into pieces of at most `piece_bytes` (a power of two, whole pages), in the order of
/// their addresses. Costs a step for each run and each piece, and touches no memory.
pub(crate) fn split(runs: &[MapRun], piece_bytes: u64) -> Result<Vec<Piece>, VdpaError> {
    assert!(piece_bytes.is_power_of_two() && piece_bytes >= PAGE_SIZE, "pieces are whole pages");
    let mut pieces: Vec<Piece> = Vec::new();
    let mut last_end = 0;
    for run in runs {
        let end = checked_end(run, last_end)?;
        let (begin, mut at) = (run.iova.0, run.iova.0);
        while at < end {
            // The last address space's end is no multiple that fits in 64 bits.
            let cut = (at | (piece_bytes - 1)).checked_add(1);
            let stop = cut.map_or(end, |cut| cut.min(end));
            // Also of a run that began in an earlier piece (Linux 29ce8b8a4fa7 counted from the
            // piece's begin, and mapped the wrong memory).
            let memory = run.memory.slice(at - begin, stop - at);
            let memory = memory.expect("a part of the run is inside of its memory");
            match pieces.last_mut() {
                Some(last)
                    if last.end() == at
                        && last.access == run.access
                        && !at.is_multiple_of(piece_bytes) =>
                {
                    last.bytes += memory.bytes();
                    last.memory.push(memory);
                }
                _ => pieces.push(Piece {
                    iova: at,
                    bytes: memory.bytes(),
                    access: run.access,
                    memory: vec![memory],
                }),
            }
            at = stop;
        }
        last_end = end;
    }
    Ok(pieces)
}

/// One past the run's last address, if the run may follow what ends at `last_end`.
fn checked_end(run: &MapRun, last_end: u64) -> Result<u64, VdpaError> {
    let (iova, bytes, address) = (run.iova.0, run.memory.bytes(), run.memory.address());
    if bytes == 0 || [iova, bytes, address].iter().any(|value| !value.is_multiple_of(PAGE_SIZE)) {
        let what = format!("the run at {iova:#x} ({bytes:#x} bytes at {address:#x})");
        return Err(invalid(format!("{what} is not whole pages")));
    }
    let end = iova.checked_add(bytes).ok_or_else(|| {
        invalid(format!("the run at {iova:#x} of {bytes:#x} bytes ends past the last address"))
    })?;
    if iova < last_end {
        let before = format!("before the one before it ends ({last_end:#x})");
        return Err(invalid(format!("the run at {iova:#x} begins {before}")));
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::{PAGE, fake_memory, run};
    use proptest::prelude::*;

    const PIECE: u64 = 16 * PAGE;

    fn refusal(runs: &[MapRun]) -> String {
        split(runs, PIECE).unwrap_err().to_string()
    }

    fn shape(pieces: &[Piece]) -> Vec<(u64, u64)> {
        pieces.iter().map(|piece| (piece.iova / PAGE, piece.bytes / PAGE)).collect()
    }

    #[test]
    fn adjacent_runs_share_a_piece_up_to_a_multiple() {
        let memory = fake_memory(0x10_0000, 100 * PAGE);
        let runs = [
            run(3, &memory, 0, 4, Access::ReadWrite),
            run(7, &memory, 50, 20, Access::ReadWrite),
            run(27, &memory, 80, 2, Access::Read),
            run(40, &memory, 90, 1, Access::Read),
        ];
        let pieces = split(&runs, PIECE).unwrap();
        assert_eq!(shape(&pieces), [(3, 13), (16, 11), (27, 2), (40, 1)]);
        // The second run starts before the second piece: its memory is taken from where the piece
        // begins, not from the begin of the run.
        assert_eq!(pieces[1].memory, [memory.slice(59 * PAGE, 11 * PAGE).unwrap()]);
    }

    #[test]
    fn the_last_address_space_can_be_mapped_but_for_its_last_page() {
        let memory = fake_memory(0x10_0000, 32 * PAGE);
        let top = u64::MAX / PAGE;
        let pieces = split(&[run(top - 20, &memory, 0, 20, Access::Read)], PIECE).unwrap();
        assert_eq!(shape(&pieces), [(top - 20, 5), (top - 15, 15)]);
        let past = run(top - 20, &memory, 0, 21, Access::Read);
        assert!(refusal(&[past]).contains("past the last address"));
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let memory = fake_memory(0x10_0000, 32 * PAGE);
        let odd =
            MapRun { memory: memory.slice(0, 100).unwrap(), ..run(0, &memory, 0, 1, Access::Read) };
        assert!(refusal(&[odd]).contains("not whole pages"));
        let empty = run(0, &memory, 0, 0, Access::Read);
        assert!(refusal(&[empty]).contains("not whole pages"));
        let two = [run(4, &memory, 0, 4, Access::Read), run(7, &memory, 8, 1, Access::Read)];
        assert!(refusal(&two).contains("0x7000 begins before the one before it ends (0x8000)"));
    }

    #[test]
    fn a_piece_is_known_by_its_memory_not_by_its_runs() {
        let memory = fake_memory(0x10_0000, 32 * PAGE);
        let other = fake_memory(0x10_0000, 32 * PAGE);
        let whole = split(&[run(0, &memory, 0, 8, Access::Read)], PIECE).unwrap();
        let parts = [run(0, &memory, 0, 3, Access::Read), run(3, &memory, 3, 5, Access::Read)];
        assert!(split(&parts, PIECE).unwrap()[0].same(&whole[0]));
        let moved = [run(0, &memory, 0, 3, Access::Read), run(3, &memory, 4, 5, Access::Read)];
        assert!(!split(&moved, PIECE).unwrap()[0].same(&whole[0]));
        // The same address with another owner is other memory: the old one may be gone.
        let owner = [run(0, &other, 0, 8, Access::Read)];
        assert!(!split(&owner, PIECE).unwrap()[0].same(&whole[0]));
        let access = [run(0, &memory, 0, 8, Access::ReadWrite)];
        assert!(!split(&access, PIECE).unwrap()[0].same(&whole[0]));
        let short = [run(0, &memory, 0, 7, Access::Read)];
        assert!(!split(&short, PIECE).unwrap()[0].same(&whole[0]));
    }

    proptest! {
        #[test]
        fn pieces_are_the_map(map in crate::memory::testing::any_map()) {
            let pieces = split(&map.runs, PIECE).unwrap();
            let mut pages = Vec::new();
            for piece in &pieces {
                prop_assert!(piece.bytes > 0 && piece.bytes <= PIECE);
                prop_assert_eq!(piece.iova / PIECE, (piece.end() - 1) / PIECE);
                let mut at = piece.iova;
                for memory in &piece.memory {
                    for page in 0..memory.bytes() / PAGE {
                        pages.push((at, memory.address() + page * PAGE, piece.access));
                        at += PAGE;
                    }
                }
                prop_assert_eq!(at, piece.end());
            }
            prop_assert_eq!(pages, map.pages());
            // As few as possible: neighbours differ in access, or a multiple is between them.
            for pair in pieces.windows(2) {
                prop_assert!(pair[0].end() < pair[1].iova
                    || pair[0].access != pair[1].access
                    || pair[1].iova.is_multiple_of(PIECE));
            }
        }
    }
}
