//! What the CPU does where the device does not.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is read and written word by word through raw pointers, as the guest may
// write it at the same time; and the CRC uses instructions that not every processor has.

use crate::PageRun;
use martlet_units::PAGE_SIZE;

/// Bytes of a page, as a length in memory.
pub(crate) const PAGE_BYTES: usize = 4096;
const WORD_BYTES: usize = 8;

/// The CPU's way to check a page for zero: the caller's, who knows the processor.
pub trait CpuCheck: Send {
    /// Whether all 4096 bytes are zero.
    ///
    /// # Safety
    /// `page` is the address of a mapped page, a multiple of 4096, that stays mapped during the
    /// call. Others may write it meanwhile.
    unsafe fn is_zero(&self, page: *const u8) -> bool;
}

/// The address of a page of a run.
pub(crate) fn pointer(address: u64) -> *mut u8 {
    let address = usize::try_from(address).expect("an address of this process");
    std::ptr::with_exposed_provenance_mut(address)
}

/// The words of a run of pages.
fn words(run: PageRun) -> impl Iterator<Item = *mut u64> {
    let base = pointer(run.address()).cast::<u64>();
    let bytes = u64::from(run.pages()) * PAGE_SIZE;
    let count = usize::try_from(bytes).expect("memory of this process") / WORD_BYTES;
    (0..count).map(move |word| base.wrapping_add(word))
}

/// Copies pages that others may write meanwhile; each word is read once, and whole.
pub(crate) fn copy_from(run: PageRun, into: &mut [u8]) {
    let (places, rest) = into.as_chunks_mut::<WORD_BYTES>();
    assert!(rest.is_empty(), "a whole number of words");
    for (from, into) in words(run).zip(places) {
        // SAFETY: inside of the run, which is mapped and aligned by the promise of its maker.
        *into = unsafe { from.read_volatile() }.to_ne_bytes();
    }
}

/// Fills pages with zeroes, word by word.
pub(crate) fn clear(run: PageRun) {
    for word in words(run) {
        // SAFETY: as in `copy_from`; the run may be written.
        unsafe { word.write_volatile(0) };
    }
}

/// Writes one word of a page.
pub(crate) fn write_word(page: PageRun, word: usize, value: u64) {
    assert!(word < PAGE_BYTES / WORD_BYTES, "a word of this page");
    let at = pointer(page.address()).cast::<u64>().wrapping_add(word);
    // SAFETY: as in `clear`.
    unsafe { at.write_volatile(value) };
}

/// The polynomial of CRC-32C, reflected.
const CRC32C: u32 = 0x82f6_3b78;

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0_u32;
    while byte < 256 {
        let mut crc = byte;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 != 0 { crc >> 1 ^ CRC32C } else { crc >> 1 };
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
};

/// The CRC-32C (CRC-32/ISCSI, RFC 3720) of `bytes`, going on from the checksum `seed` of what came
/// before; 0 for nothing. What the device computes.
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has SSE4.2.
        return unsafe { crc32c_sse42(seed, bytes) };
    }
    crc32c_table(seed, bytes)
}

fn crc32c_table(seed: u32, bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        let [low, ..] = crc.to_le_bytes();
        CRC_TABLE[usize::from(low ^ byte)] ^ crc >> 8
    };
    !bytes.iter().fold(!seed, step)
}

/// # Safety
/// The processor has SSE4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn crc32c_sse42(seed: u32, bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    let (words, rest) = bytes.as_chunks::<WORD_BYTES>();
    let crc = words
        .iter()
        .fold(u64::from(!seed), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
    let [a, b, c, d, ..] = crc.to_le_bytes();
    let crc = u32::from_le_bytes([a, b, c, d]);
    !rest.iter().fold(crc, |crc, byte| _mm_crc32_u8(crc, *byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, B.4, and the check value of the catalogue of CRC algorithms.
    #[test]
    fn checksums_are_those_of_the_rfc() {
        let ascending: Vec<u8> = (0..32).collect();
        let vectors: [(&[u8], u32); 4] = [
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (b"123456789", 0xe306_9283),
        ];
        for (bytes, sum) in vectors {
            assert_eq!(crc32c(0, bytes), sum);
            assert_eq!(crc32c_table(0, bytes), sum);
            let (head, tail) = bytes.split_at(5);
            assert_eq!(crc32c(crc32c(0, head), tail), sum);
        }
    }
}
