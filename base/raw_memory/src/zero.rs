//! Whether a page is all zero, as fast as memory can be read.
#![allow(unsafe_code)]
// UNSAFETY: as in `access`; and the wide variants use instructions that not every processor has.

use crate::MemoryFault;

const PAGE_BYTES: usize = 4096;

/// How a page is looked at. All ways give the same answer; they differ in speed. A value exists
/// only for what this processor can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroTest(Width);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// 64 bits at a time.
    Words,
    /// 256 bits at a time.
    Avx2,
    /// 512 bits at a time.
    Avx512,
}

impl ZeroTest {
    /// 64 bits at a time: every processor.
    pub const WORDS: ZeroTest = ZeroTest(Width::Words);

    /// 256 bits at a time, if this processor has AVX2.
    pub fn avx2() -> Option<ZeroTest> {
        std::arch::is_x86_feature_detected!("avx2").then_some(ZeroTest(Width::Avx2))
    }

    /// 512 bits at a time, if this processor has AVX-512F.
    pub fn avx512() -> Option<ZeroTest> {
        std::arch::is_x86_feature_detected!("avx512f").then_some(ZeroTest(Width::Avx512))
    }

    /// Whether all 4096 bytes are zero. Reads a page with content only as far as it must, so it may
    /// not notice that the rest can't be read.
    ///
    /// # Safety
    /// `page` is the address of a mapped page, a multiple of 4096, that stays mapped during the
    /// call. Others may write it meanwhile.
    #[inline]
    pub unsafe fn run(self, page: *const u8) -> Result<bool, MemoryFault> {
        debug_assert!(page.addr().is_multiple_of(PAGE_BYTES));
        // SAFETY: the caller's promise; this value exists only where the instructions do.
        let answer = unsafe {
            match self.0 {
                Width::Words => martlet_raw_memory_is_zero(page),
                Width::Avx2 => martlet_raw_memory_is_zero_avx2(page),
                Width::Avx512 => martlet_raw_memory_is_zero_avx512(page),
            }
        };
        match answer {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(MemoryFault),
        }
    }
}

unsafe extern "sysv64" {
    /// 1 if the page is zero, 0 if it is not, something else after a fault.
    fn martlet_raw_memory_is_zero(page: *const u8) -> u32;
    /// The same.
    fn martlet_raw_memory_is_zero_avx2(page: *const u8) -> u32;
    /// The same.
    fn martlet_raw_memory_is_zero_avx512(page: *const u8) -> u32;
}
