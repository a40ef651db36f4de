//! The instructions that hand descriptors over and wait for records.
//!
//! The compiler has no intrinsics for them in stable Rust. Each is a function of its own in
//! assembly, so that a test can compare its bytes with the processor manual's, on any host.
#![allow(unsafe_code)]
// UNSAFETY: they exist on some processors only, and store to device memory. Every caller has asked
// `Instructions::detect`.

use std::arch::naked_asm;

/// Which of them this processor has: CPUID leaf 7, subleaf 0, ECX (Intel SDM, volume 2, CPUID).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// ENQCMD, bit 29: shared work queues.
    pub enqcmd: bool,
    /// MOVDIR64B, bit 28: dedicated work queues.
    pub movdir64b: bool,
    /// UMONITOR, UMWAIT and TPAUSE (WAITPKG), bit 5.
    pub umwait: bool,
}

impl Instructions {
    /// Asks the processor.
    pub fn detect() -> Instructions {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        #[allow(unused_unsafe, reason = "safe in newer toolchains")]
        // SAFETY: every x86-64 processor has the CPUID instruction.
        let leaf_max = unsafe { __cpuid(0) }.eax;
        if leaf_max < 7 {
            return Instructions::default();
        }
        #[allow(unused_unsafe, reason = "safe in newer toolchains")]
        // SAFETY: as above, and the leaf exists.
        Instructions::from_ecx(unsafe { __cpuid_count(7, 0) }.ecx)
    }

    fn from_ecx(ecx: u32) -> Instructions {
        let has = |bit: u32| ecx >> bit & 1 != 0;
        Instructions { enqcmd: has(29), movdir64b: has(28), umwait: has(5) }
    }
}

// Arguments are in rdi and rsi, the answer in eax (System V ABI, 3.2.3). Both submissions are
// weakly ordered stores: the fence orders the descriptors and records that were written before.

/// ENQCMD: hands 64 bytes to a shared work queue. Whether the queue had no room (ZF).
///
/// # Safety
/// The processor has ENQCMD, the process a PASID; `portal` is a mapped portal of a shared work
/// queue at a multiple of 64, `descriptor` points to 64 bytes.
#[unsafe(naked)]
pub(crate) unsafe extern "sysv64" fn enqcmd(portal: *mut u8, descriptor: *const u8) -> u32 {
    naked_asm!("sfence", "xor eax, eax", "enqcmd rdi, [rsi]", "setz al", "ret")
}

/// MOVDIR64B: hands 64 bytes to a dedicated work queue, which does not answer.
///
/// # Safety
/// The processor has MOVDIR64B; `portal` is a mapped portal of a dedicated work queue at a multiple
/// of 64, `descriptor` points to 64 bytes.
#[unsafe(naked)]
pub(crate) unsafe extern "sysv64" fn movdir64b(portal: *mut u8, descriptor: *const u8) {
    naked_asm!("sfence", "movdir64b rdi, [rsi]", "ret")
}

/// UMONITOR: watches the cache line of an address for the next UMWAIT.
///
/// # Safety
/// The processor has WAITPKG; the address is mapped.
#[unsafe(naked)]
pub(crate) unsafe extern "sysv64" fn umonitor(address: u64) {
    naked_asm!("umonitor rdi", "ret")
}

/// UMWAIT in the deeper of both states (C0.2, control bit 0 clear): until the watched line is
/// written, for as many cycles of the time stamp counter at most.
///
/// # Safety
/// The processor has WAITPKG.
#[unsafe(naked)]
pub(crate) unsafe extern "sysv64" fn umwait(cycles: u64) {
    naked_asm!(
        "rdtsc",
        "shl rdx, 32",
        "or rax, rdx",
        "add rax, rdi",
        "mov rdx, rax",
        "shr rdx, 32",
        "xor ecx, ecx",
        "umwait ecx",
        "ret",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code of a function, as far as it is known to go.
    fn code<const N: usize>(function: *const ()) -> [u8; N] {
        // SAFETY: the function's code is mapped, and at least as long as what it is compared with,
        // which ends with its `ret`.
        unsafe { function.cast::<[u8; N]>().read() }
    }

    #[test]
    fn encodings_are_the_manuals() {
        // SFENCE is 0f ae f8. ENQCMD r64, m512 is f2 0f 38 f8 /r; its register is the destination.
        // (F3 instead of F2 would be ENQCMDS, which only a kernel may use.)
        let fence = [0x0f, 0xae, 0xf8];
        let bytes: [u8; 14] = code(enqcmd as *const ());
        assert_eq!(bytes[..3], fence);
        assert_eq!(bytes[3..5], [0x31, 0xc0]);
        assert_eq!(bytes[5..10], [0xf2, 0x0f, 0x38, 0xf8, 0x3e]);
        assert_eq!(bytes[10..], [0x0f, 0x94, 0xc0, 0xc3]);
        // MOVDIR64B r64, m512 is 66 0f 38 f8 /r.
        let bytes: [u8; 9] = code(movdir64b as *const ());
        assert_eq!(bytes[..3], fence);
        assert_eq!(bytes[3..], [0x66, 0x0f, 0x38, 0xf8, 0x3e, 0xc3]);
        // UMONITOR r64 is f3 0f ae /6, UMWAIT r32 is f2 0f ae /6.
        let bytes: [u8; 5] = code(umonitor as *const ());
        assert_eq!(bytes, [0xf3, 0x0f, 0xae, 0xf7, 0xc3]);
        let bytes: [u8; 26] = code(umwait as *const ());
        assert_eq!(bytes[..2], [0x0f, 0x31]);
        assert_eq!(bytes[21..], [0xf2, 0x0f, 0xae, 0xf1, 0xc3]);
    }

    #[test]
    fn features_are_the_manuals_bits() {
        assert_eq!(Instructions::from_ecx(0), Instructions::default());
        let all = Instructions { enqcmd: true, movdir64b: true, umwait: true };
        assert_eq!(Instructions::from_ecx(1 << 29 | 1 << 28 | 1 << 5), all);
        assert!(Instructions::from_ecx(1 << 29).enqcmd);
        assert!(Instructions::from_ecx(1 << 28).movdir64b);
        let _ = Instructions::detect();
    }
}
