//! Whether a page is all zero, as fast as memory can be read.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is read through raw pointers while the guest may write it.

use crate::{CHUNK_PAGES, ChunkBits};
use core::fmt;
use martlet_raw_memory::ZeroTest;

const PAGE: usize = crate::PAGE_BYTES;

/// Checks pages for zero in the fastest way that the processor has.
///
/// The guest may write a page while it is checked. Then the answer is that of some mix of old and
/// new, which is good enough: the write comes after the page was rearmed, so the page is reported
/// dirty and checked again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ZeroCheck {
    test: ZeroTest,
    name: &'static str,
}

impl ZeroCheck {
    /// The check to use on this processor.
    pub fn detect() -> ZeroCheck {
        let suits = |check: &ZeroCheck| check.name != AVX512 || wide_is_fast();
        let widest = ZeroCheck::supported().filter(suits).last();
        widest.unwrap_or(ZeroCheck { test: ZeroTest::WORDS, name: SCALAR })
    }

    /// All checks that this processor has, in ascending order of width.
    pub fn supported() -> impl Iterator<Item = ZeroCheck> {
        let tests = [
            (Some(ZeroTest::WORDS), SCALAR),
            (ZeroTest::avx2(), "avx2"),
            (ZeroTest::avx512(), AVX512),
        ];
        tests.into_iter().filter_map(|(test, name)| Some(ZeroCheck { test: test?, name }))
    }

    /// `scalar`, `avx2` or `avx512`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether all 4096 bytes are zero. Reads a page with content only as far as it must. A page
    /// that the host lost is not zero: who sends it finds out, and can say which one it is.
    ///
    /// # Safety
    /// `page` is the address of a mapped page, a multiple of 4096, that stays mapped
    /// during the call. Others may write it meanwhile.
    #[inline]
    pub unsafe fn is_zero(&self, page: *const u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.test.run(page) }.unwrap_or(false)
    }

    /// Those pages of `bits` that are all zero. The other pages of the chunk are not touched.
    ///
    /// # Safety
    /// `base` is where the chunk's page 0 is mapped or would be; each page of `bits` is as
    /// [`ZeroCheck::is_zero`] asks.
    pub unsafe fn zero_pages(&self, base: *const u8, bits: &ChunkBits) -> ChunkBits {
        let mut zero = ChunkBits::EMPTY;
        for page in bits.runs().flatten() {
            debug_assert!(u64::from(page) < CHUNK_PAGES);
            // SAFETY: the caller's promise for each page in `bits`.
            if unsafe { self.is_zero(base.wrapping_add(page as usize * PAGE)) } {
                zero.set(page);
            }
        }
        zero
    }
}

impl fmt::Debug for ZeroCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ZeroCheck({})", self.name())
    }
}

const SCALAR: &str = "scalar";
const AVX512: &str = "avx512";

/// Whether 512-bit loads are the fastest way to read memory on this processor, if it has them. Not
/// on AMD: Zen 4 does them in halves, and they are slower than 256 bits there (`martlet bench
/// zero-check`). Nor on Intel before Ice Lake (which has VBMI2), where they lower the core's clock.
fn wide_is_fast() -> bool {
    use std::arch::x86_64::__cpuid;
    #[allow(unused_unsafe, reason = "safe in newer toolchains")]
    // SAFETY: every x86-64 processor has the CPUID instruction.
    let vendor = unsafe { __cpuid(0) };
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"GenuineIntel" && std::arch::is_x86_feature_detected!("avx512vbmi2")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[repr(C, align(4096))]
    struct Pages<const N: usize>([[u8; PAGE]; N]);

    fn answers(page: &Pages<1>) -> Vec<bool> {
        // SAFETY: an aligned page of this thread's own.
        ZeroCheck::supported().map(|check| unsafe { check.is_zero(page.0[0].as_ptr()) }).collect()
    }

    #[test]
    fn every_single_bit_is_seen_by_every_variant() {
        let mut page = Box::new(Pages([[0; PAGE]]));
        assert!(answers(&page).iter().all(|zero| *zero));
        for byte in 0..PAGE {
            for bit in 0..8 {
                page.0[0][byte] = 1 << bit;
                assert!(answers(&page).iter().all(|zero| !*zero), "byte {byte} bit {bit}");
            }
            page.0[0][byte] = 0;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn variants_agree_on_pages(
            content in prop::collection::vec((0..PAGE, any::<u8>()), 0..4),
        ) {
            let mut page = Box::new(Pages([[0; PAGE]]));
            content.iter().for_each(|(place, byte)| page.0[0][*place] = *byte);
            let zero = page.0[0].iter().all(|byte| *byte == 0);
            prop_assert!(answers(&page).iter().all(|answer| *answer == zero));
        }

        #[test]
        fn variants_agree_on_chunks(
            wanted in prop::collection::btree_set(0..16u32, 0..16),
            full in prop::collection::btree_set(0..16u32, 0..16),
            place in 0..PAGE,
        ) {
            let mut pages = Box::new(Pages([[0; PAGE]; 16]));
            full.iter().for_each(|page| pages.0[*page as usize][place] = 1);
            let mut bits = ChunkBits::EMPTY;
            wanted.iter().for_each(|page| bits.set(*page));
            for check in ZeroCheck::supported() {
                // SAFETY: only the first 16 pages are named, which are this thread's own.
                let zero = unsafe { check.zero_pages(pages.0[0].as_ptr(), &bits) };
                for page in 0..16 {
                    let expected = wanted.contains(&page) && !full.contains(&page);
                    prop_assert_eq!(zero.get(page), expected, "{:?} page {}", check, page);
                }
            }
        }
    }

    #[test]
    fn the_choice_is_one_of_those_that_work() {
        let all: Vec<_> = ZeroCheck::supported().collect();
        assert_eq!(all[0].name(), "scalar");
        assert!(all.contains(&ZeroCheck::detect()));
        println!("this host has {all:?} and uses {:?}", ZeroCheck::detect());
    }
}
