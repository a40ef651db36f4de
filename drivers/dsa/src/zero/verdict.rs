//! What a completion record says of the pages that a descriptor was about.

use crate::slots::Piece;
use martlet_dsa_abi::{CompletionRecord, Status};
use martlet_units::PAGE_SIZE;

/// The device's answer for a piece. Whatever a record says, the counts are within the piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All pages are zero.
    Zero,
    /// The first `zero` pages are zero, and the page behind them has content. Of the others nothing
    /// is known.
    Content { zero: u32 },
    /// The first `zero` pages are zero, and the page behind them is not mapped. Of the others
    /// nothing is known.
    Fault { zero: u32 },
    /// Nothing usable.
    Error,
    /// The record was not written.
    Unwritten,
}

impl Verdict {
    pub(super) fn of(piece: Piece, record: &CompletionRecord) -> Verdict {
        let before = u32::try_from(u64::from(record.completed()) / PAGE_SIZE).unwrap_or(u32::MAX);
        let inside = before < piece.pages;
        match (record.status(), record.result()) {
            (Status::NONE, _) => Verdict::Unwritten,
            (Status::SUCCESS | Status::SUCCESS_FALSE_PREDICATE, 0) => Verdict::Zero,
            (Status::SUCCESS | Status::SUCCESS_FALSE_PREDICATE, 1) if inside => {
                Verdict::Content { zero: before }
            }
            (Status::PAGE_FAULT, 0) if inside => Verdict::Fault { zero: before },
            // It stopped, and has seen content before: where, the CPU finds out.
            (Status::PAGE_FAULT, _) if inside => Verdict::Fault { zero: 0 },
            _ => Verdict::Error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PIECE: Piece = Piece { first: 7, pages: 4 };

    #[test]
    fn a_mismatch_names_the_first_page_with_content() {
        let different = CompletionRecord::new(Status::SUCCESS).with_result(1);
        for (offset, zero) in [(0, 0), (4095, 0), (4096, 1), (3 * 4096 + 8, 3)] {
            let record = different.with_completed(offset);
            assert_eq!(Verdict::of(PIECE, &record), Verdict::Content { zero });
        }
        assert_eq!(Verdict::of(PIECE, &different.with_completed(4 * 4096)), Verdict::Error);
        let odd = CompletionRecord::new(Status::SUCCESS).with_result(2);
        assert_eq!(Verdict::of(PIECE, &odd), Verdict::Error);
    }

    #[test]
    fn a_fault_keeps_what_was_seen_before_it() {
        let fault = CompletionRecord::new(Status::PAGE_FAULT).with_completed(2 * 4096);
        assert_eq!(Verdict::of(PIECE, &fault), Verdict::Fault { zero: 2 });
        assert_eq!(Verdict::of(PIECE, &fault.with_write_fault()), Verdict::Fault { zero: 2 });
        assert_eq!(Verdict::of(PIECE, &fault.with_result(1)), Verdict::Fault { zero: 0 });
        assert_eq!(Verdict::of(PIECE, &fault.with_completed(u32::MAX)), Verdict::Error);
    }

    proptest! {
        #[test]
        fn no_record_says_more_than_the_piece_has(bytes: [u8; 32], pages in 1_u32..512) {
            let record = CompletionRecord::from_bytes(&bytes);
            match Verdict::of(Piece { first: 0, pages }, &record) {
                Verdict::Content { zero } | Verdict::Fault { zero } => prop_assert!(zero < pages),
                Verdict::Zero => prop_assert!(record.status().is_success() && bytes[1] == 0),
                Verdict::Error | Verdict::Unwritten => {}
            }
        }
    }
}
