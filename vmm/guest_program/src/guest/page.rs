//! What a filled page holds: a header of four words and a body, all of which follows from the
//! page's frame number and version. A page at the wrong place, an old version, a torn page and a
//! flipped bit all differ from what is expected.
//!
//! ```text
//! word 0     1      2        3    4 .. 511
//!      TAG   frame  version  key  one word each, from key and its place
//! ```
//!
//! The body looks random: no engine can make it small, and no two pages share a word pattern.

/// 64-bit words in a page.
pub const PAGE_WORDS: usize = 512;
const HEADER_WORDS: usize = 4;
/// The first word of each filled page.
pub const TAG: u64 = u64::from_le_bytes(*b"martletP");
/// 2^64 divided by the golden ratio: steps of it are spread evenly.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// From what the body is made. The finalizer is that of SplitMix64 (Steele, Lea, Flood: Fast
/// Splittable Pseudorandom Number Generators, 2014).
pub const fn key(frame: u64, version: u64) -> u64 {
    let mut z = frame.wrapping_mul(STEP) ^ version.rotate_left(40);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Word `index` of the body. Only shifts, sums and exclusive ors, so that it vectorizes and the
/// guest's vector registers are in use all the time: a migration that loses them is found.
#[inline(always)]
pub const fn body(key: u64, index: usize) -> u64 {
    let x = key.wrapping_add((index as u64).wrapping_mul(STEP));
    let x = x ^ (x << 23);
    x ^ (x >> 17) ^ (x >> 42)
}

/// Any word of a page.
pub const fn word(frame: u64, version: u64, index: usize) -> u64 {
    match index {
        0 => TAG,
        1 => frame,
        2 => version,
        3 => key(frame, version),
        _ => body(key(frame, version), index),
    }
}

/// Writes a whole page.
///
/// # Safety
/// `page` points to a page that only the caller accesses.
#[inline]
pub unsafe fn write(page: *mut u64, frame: u64, version: u64) {
    let key = key(frame, version);
    // SAFETY: the caller owns all words of the page; the index stays below their number.
    unsafe {
        page.write(TAG);
        page.add(1).write(frame);
        page.add(2).write(version);
        page.add(3).write(key);
        let mut index = HEADER_WORDS;
        while index < PAGE_WORDS {
            page.add(index).write(body(key, index));
            index += 1;
        }
    }
}

/// Whether all words of a page are as they should be.
///
/// # Safety
/// `page` points to a page that nobody writes meanwhile.
#[inline]
pub unsafe fn matches(page: *const u64, frame: u64, version: u64) -> bool {
    let key = key(frame, version);
    // SAFETY: all words of the page may be read; the index stays below their number.
    unsafe {
        let mut wrong = (page.read() ^ TAG)
            | (page.add(1).read() ^ frame)
            | (page.add(2).read() ^ version)
            | (page.add(3).read() ^ key);
        let mut index = HEADER_WORDS;
        while index < PAGE_WORDS {
            wrong |= page.add(index).read() ^ body(key, index);
            index += 1;
        }
        wrong == 0
    }
}

/// Whether all words of a page are zero.
///
/// # Safety
/// `page` points to a page that nobody writes meanwhile.
#[inline]
pub unsafe fn is_zero(page: *const u64) -> bool {
    let mut any = 0;
    let mut index = 0;
    while index < PAGE_WORDS {
        // SAFETY: all words of the page may be read; the index stays below their number.
        any |= unsafe { page.add(index).read() };
        index += 1;
    }
    any == 0
}
