//! What CBOR of a peer must obey before a decoder sees it.
//!
//! A decoder skips what it does not know, and keeps a record of every array and map that it is in:
//! 16 bytes of memory for a byte of the peer's. Of a list that it knows it makes objects, which are
//! larger than that. [`check_nesting`] walks over all of it first, with a few words on the stack,
//! and refuses what no martlet of any version sends.

/// Deepest nesting of arrays and maps; today's messages have 3.
pub const DEPTH_MAX: usize = 8;

/// Most items of one value, the largest of which is the state of a machine or of one of its vCPUs:
/// some ten thousand. A decoder makes an object of each, however few bytes of the peer's it is.
pub const ITEMS_MAX: u32 = 1 << 18;

/// Why bytes are no CBOR that a decoder may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NestingError {
    /// Too deep.
    #[error("arrays and maps nested deeper than {DEPTH_MAX} at byte {0}")]
    Depth(usize),
    /// Too many.
    #[error("more than {ITEMS_MAX} items")]
    Items,
    /// A length that is not said before, a tag, or a code without meaning: martlet sends none.
    #[error("an item that starts with {first:#04x} at byte {at}")]
    Form {
        /// Its first byte.
        first: u8,
        /// Where.
        at: usize,
    },
    /// The bytes end within an item.
    #[error("the bytes end within an item")]
    End,
}

/// Walks over the one item at the start of `bytes`; returns its length.
pub fn check_nesting(bytes: &[u8]) -> Result<usize, NestingError> {
    // Items that are still to come in each array or map that is open.
    let mut open = [0_u64; DEPTH_MAX];
    let mut depth = 0;
    let mut at = 0;
    let mut items = 0;
    loop {
        items += 1;
        if items > ITEMS_MAX {
            return Err(NestingError::Items);
        }
        let start = at;
        let (major, number) = head(bytes, &mut at)?;
        let inside = match major {
            0 | 1 | 7 => 0,
            2 | 3 => {
                let length = usize::try_from(number).map_err(|_| NestingError::End)?;
                at = at.checked_add(length).ok_or(NestingError::End)?;
                0
            }
            4 => number,
            5 => number.checked_mul(2).ok_or(NestingError::End)?,
            _ => return Err(NestingError::Form { first: bytes[start], at: start }),
        };
        if at > bytes.len() {
            return Err(NestingError::End);
        }
        if inside > 0 {
            *open.get_mut(depth).ok_or(NestingError::Depth(start))? = inside;
            depth += 1;
            continue;
        }
        // The item is complete, and with it each one that it was the last of.
        loop {
            let Some(above) = depth.checked_sub(1) else { return Ok(at) };
            open[above] -= 1;
            if open[above] > 0 {
                break;
            }
            depth = above;
        }
    }
}

/// The major type and the number of an item (RFC 8949, section 3).
fn head(bytes: &[u8], at: &mut usize) -> Result<(u8, u64), NestingError> {
    let start = *at;
    let first = *bytes.get(start).ok_or(NestingError::End)?;
    let count = match first & 31 {
        small @ 0..=23 => {
            *at += 1;
            return Ok((first >> 5, u64::from(small)));
        }
        sized @ 24..=27 => 1_usize << (sized - 24),
        _ => return Err(NestingError::Form { first, at: start }),
    };
    let digits = bytes.get(start + 1..start + 1 + count).ok_or(NestingError::End)?;
    *at += 1 + count;
    let number = digits.iter().fold(0, |number, digit| number << 8 | u64::from(*digit));
    Ok((first >> 5, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_items_are_measured() {
        for item in [
            &[0x00][..],
            &[0x18, 0xff],
            &[0xf6],
            &[0x43, 1, 2, 3],
            &[0x80],
            &[0xa0],
            &[0xa1, 0x00, 0x82, 0x01, 0x41, 0x07],
            &[0x82, 0x81, 0x80, 0xa1, 0x00, 0x00],
        ] {
            assert_eq!(check_nesting(item), Ok(item.len()), "{item:x?}");
            assert_eq!(check_nesting(&[item, &[0xff]].concat()), Ok(item.len()), "{item:x?}");
            for end in 0..item.len() {
                assert_eq!(check_nesting(&item[..end]), Err(NestingError::End), "{item:x?} {end}");
            }
        }
    }

    #[test]
    fn depth_has_a_limit() {
        let nested = |depth: usize| [vec![0x81; depth], vec![0x00]].concat();
        assert_eq!(check_nesting(&nested(DEPTH_MAX)), Ok(DEPTH_MAX + 1));
        let deeper = check_nesting(&nested(DEPTH_MAX + 1));
        assert_eq!(deeper, Err(NestingError::Depth(DEPTH_MAX)));
        assert_eq!(check_nesting(&nested(1 << 24)), Err(NestingError::Depth(DEPTH_MAX)));
    }

    #[test]
    fn items_have_a_limit() {
        let list = |count: u32| {
            let nothing = vec![0x40; usize::try_from(count).unwrap()];
            [&[0x9a][..], &count.to_be_bytes(), &nothing].concat()
        };
        let most = list(ITEMS_MAX - 1);
        assert_eq!(check_nesting(&most), Ok(most.len()));
        assert_eq!(check_nesting(&list(ITEMS_MAX)), Err(NestingError::Items));
    }

    #[test]
    fn forms_that_nobody_sends_are_refused() {
        for first in [0x9f, 0xbf, 0x5f, 0x7f, 0xc0, 0xff, 0x1c] {
            let refused = check_nesting(&[first, 0x00, 0xff]);
            assert_eq!(refused, Err(NestingError::Form { first, at: 0 }), "{first:#x}");
        }
        let long = [0x5b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(check_nesting(&long), Err(NestingError::End));
        let many = [0xbb, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(check_nesting(&many), Err(NestingError::End));
    }
}
