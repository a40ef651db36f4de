//! Whether a page is all zero, as fast as memory can be read.
#![allow(unsafe_code)]
// UNSAFETY: guest memory is read through raw pointers while the guest may write it, and the wide
// variants use instructions that not every processor has.

use crate::{CHUNK_PAGES, ChunkBits};
use core::fmt;

const PAGE: usize = crate::PAGE_BYTES;

/// How pages are checked. All ways give the same answer; they differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// 64 bits at a time: every processor.
    Scalar,
    /// 256 bits at a time.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512 bits at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Checks pages for zero in the fastest way that the processor has.
///
/// The guest may write a page while it is checked. Then the answer is that of some mix of old and
/// new, which is good enough: the write comes after the page was rearmed, so the page is reported
/// dirty and checked again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ZeroCheck {
    method: Method,
}

impl ZeroCheck {
    /// The check to use on this processor.
    pub fn detect() -> ZeroCheck {
        let suits = |check: &ZeroCheck| match check.method {
            Method::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => true,
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => wide_is_fast(),
        };
        let widest = ZeroCheck::supported().filter(suits).last();
        widest.unwrap_or(ZeroCheck { method: Method::Scalar })
    }

    /// All checks that this processor has, in ascending order of width.
    pub fn supported() -> impl Iterator<Item = ZeroCheck> {
        let methods = [
            (Method::Scalar, true),
            #[cfg(target_arch = "x86_64")]
            (Method::Avx2, std::arch::is_x86_feature_detected!("avx2")),
            #[cfg(target_arch = "x86_64")]
            (Method::Avx512, std::arch::is_x86_feature_detected!("avx512f")),
        ];
        methods.into_iter().filter_map(|(method, has)| has.then_some(ZeroCheck { method }))
    }

    /// `scalar`, `avx2` or `avx512`.
    pub fn name(&self) -> &'static str {
        match self.method {
            Method::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => "avx512",
        }
    }

    /// Whether all 4096 bytes are zero. Reads a page with content only as far as it must.
    ///
    /// # Safety
    /// `page` is the address of a mapped page, a multiple of 4096, that stays mapped
    /// during the call. Others may write it meanwhile: it is read with volatile loads or in
    /// assembly, which the compiler neither repeats nor reasons about.
    #[inline]
    pub unsafe fn is_zero(&self, page: *const u8) -> bool {
        debug_assert!(page.addr().is_multiple_of(PAGE));
        match self.method {
            // SAFETY: the caller's promise.
            Method::Scalar => unsafe { is_zero_scalar(page) },
            // SAFETY: the caller's promise; this value exists only where AVX2 was detected.
            #[cfg(target_arch = "x86_64")]
            Method::Avx2 => unsafe { is_zero_avx2(page) != 0 },
            // SAFETY: the caller's promise; this value exists only where AVX-512F was detected.
            #[cfg(target_arch = "x86_64")]
            Method::Avx512 => unsafe { is_zero_avx512(page) != 0 },
        }
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

// All variants read a page from its start to its end. Looking ahead at a line in its middle or at
// its end catches a few more pages early, but cost a sixth of the speed on zero pages where it was
// measured, as the processor's prefetcher follows ascending reads. So did prefetching by hand.

/// Whether 512-bit loads are the fastest way to read memory on this processor, if it has them. Not
/// on AMD: Zen 4 does them in halves, and `--example zero_check` shows them slower than 256 bits
/// there. Nor on Intel before Ice Lake (which has VBMI2), where they lower the core's clock.
#[cfg(target_arch = "x86_64")]
fn wide_is_fast() -> bool {
    use std::arch::x86_64::__cpuid;
    #[allow(unused_unsafe, reason = "safe in newer toolchains")]
    // SAFETY: every x86-64 processor has the CPUID instruction.
    let vendor = unsafe { __cpuid(0) };
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"GenuineIntel" && std::arch::is_x86_feature_detected!("avx512vbmi2")
}

/// Words in a cache line.
const LINE_WORDS: usize = 8;
/// Words in a page.
const WORDS: usize = PAGE / size_of::<u64>();
/// Words between two looks at what was gathered.
const BLOCK_WORDS: usize = 32;

/// # Safety
/// As [`ZeroCheck::is_zero`].
unsafe fn is_zero_scalar(page: *const u8) -> bool {
    let words = page.cast::<u64>();
    // SAFETY: within the page, as `word` is below WORDS; aligned like the page.
    let read = |word: usize| unsafe { words.add(word).read_volatile() };
    if (0..LINE_WORDS).any(|word| read(word) != 0) {
        return false;
    }
    (0..WORDS).step_by(BLOCK_WORDS).all(|block| {
        let (mut a, mut b, mut c, mut d) = (0, 0, 0, 0);
        for word in (block..block + BLOCK_WORDS).step_by(4) {
            a |= read(word);
            b |= read(word + 1);
            c |= read(word + 2);
            d |= read(word + 3);
        }
        a | b | c | d == 0
    })
}

// Both wide variants are assembly functions of their own: no compiler gets to see the reads, and
// they are the same in a debug build. Each looks at the first cache line, which settles most pages
// with content, then ORs 512 bytes at a time into two accumulators. The argument is in rdi (System
// V ABI, 3.2.3), the answer in eax; vector registers belong to the callee, which leaves their
// upper halves clean.

/// # Safety
/// As [`ZeroCheck::is_zero`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "sysv64" fn is_zero_avx2(page: *const u8) -> u32 {
    core::arch::naked_asm!(
        "vmovdqa ymm0, [rdi]",
        "vpor ymm0, ymm0, [rdi + 32]",
        "vptest ymm0, ymm0",
        "jnz 3f",
        "lea rcx, [rdi + 4096]",
        ".p2align 4",
        "2:",
        "vmovdqa ymm0, [rdi]",
        "vmovdqa ymm1, [rdi + 32]",
        "vpor ymm0, ymm0, [rdi + 64]",
        "vpor ymm1, ymm1, [rdi + 96]",
        "vpor ymm0, ymm0, [rdi + 128]",
        "vpor ymm1, ymm1, [rdi + 160]",
        "vpor ymm0, ymm0, [rdi + 192]",
        "vpor ymm1, ymm1, [rdi + 224]",
        "vpor ymm0, ymm0, [rdi + 256]",
        "vpor ymm1, ymm1, [rdi + 288]",
        "vpor ymm0, ymm0, [rdi + 320]",
        "vpor ymm1, ymm1, [rdi + 352]",
        "vpor ymm0, ymm0, [rdi + 384]",
        "vpor ymm1, ymm1, [rdi + 416]",
        "vpor ymm0, ymm0, [rdi + 448]",
        "vpor ymm1, ymm1, [rdi + 480]",
        "vpor ymm0, ymm0, ymm1",
        "vptest ymm0, ymm0",
        "jnz 3f",
        "add rdi, 512",
        "cmp rdi, rcx",
        "jne 2b",
        "mov eax, 1",
        "vzeroupper",
        "ret",
        "3:",
        "xor eax, eax",
        "vzeroupper",
        "ret",
    )
}

/// # Safety
/// As [`ZeroCheck::is_zero`], and the processor has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "sysv64" fn is_zero_avx512(page: *const u8) -> u32 {
    core::arch::naked_asm!(
        "vmovdqa64 zmm0, [rdi]",
        "vptestmq k1, zmm0, zmm0",
        "kortestw k1, k1",
        "jnz 3f",
        "lea rcx, [rdi + 4096]",
        ".p2align 4",
        "2:",
        "vmovdqa64 zmm0, [rdi]",
        "vmovdqa64 zmm1, [rdi + 64]",
        "vporq zmm0, zmm0, [rdi + 128]",
        "vporq zmm1, zmm1, [rdi + 192]",
        "vporq zmm0, zmm0, [rdi + 256]",
        "vporq zmm1, zmm1, [rdi + 320]",
        "vporq zmm0, zmm0, [rdi + 384]",
        "vporq zmm1, zmm1, [rdi + 448]",
        "vporq zmm0, zmm0, zmm1",
        "vptestmq k1, zmm0, zmm0",
        "kortestw k1, k1",
        "jnz 3f",
        "add rdi, 512",
        "cmp rdi, rcx",
        "jne 2b",
        "mov eax, 1",
        "vzeroupper",
        "ret",
        "3:",
        "xor eax, eax",
        "vzeroupper",
        "ret",
    )
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
