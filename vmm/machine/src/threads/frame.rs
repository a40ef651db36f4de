//! A guest's registers in the form in which the kernel takes and gives them: a signal frame.
//!
//! The kernel writes one when it calls a signal handler and loads one in `rt_sigreturn`
//! (arch/x86/kernel/signal_64.c, arch/x86/include/uapi/asm/sigcontext.h). The floating point part
//! is an XSAVE area in the standard format (Intel SDM volume 1, 13.4) whose software-reserved
//! bytes say how long it is.

#![allow(unsafe_code)]
// UNSAFETY: reads the kernel's frame.

use crate::vcpu::backend::BackendError;

/// `uc_mcontext.gregs` and what else of `struct ucontext` the kernel reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SignalContext {
    pub(super) flags: u64,
    pub(super) link: u64,
    pub(super) stack: libc::stack_t,
    pub(super) gregs: [u64; 23],
    /// Address of the floating point part.
    pub(super) fpstate: u64,
    pub(super) reserved: [u64; 8],
    /// Signals that are blocked once it is loaded, one bit each, from signal 1.
    pub(super) mask: u64,
}

// The kernel's order of registers is that of the C library's numbers.
const _: () = assert!(core::mem::offset_of!(SignalContext, gregs) == 40);
const _: () = assert!(core::mem::offset_of!(SignalContext, fpstate) == 40 + 184);
const _: () = assert!(core::mem::offset_of!(SignalContext, mask) == 296);

/// A register's place in [`SignalContext::gregs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register(usize);

impl Register {
    pub(super) const RAX: Register = Register(libc::REG_RAX as usize);
    pub(super) const RDX: Register = Register(libc::REG_RDX as usize);
    pub(super) const RDI: Register = Register(libc::REG_RDI as usize);
    pub(super) const RSI: Register = Register(libc::REG_RSI as usize);
    pub(super) const RSP: Register = Register(libc::REG_RSP as usize);
    pub(super) const RIP: Register = Register(libc::REG_RIP as usize);
    pub(super) const FLAGS: Register = Register(libc::REG_EFL as usize);
    pub(super) const SEGMENTS: Register = Register(libc::REG_CSGSFS as usize);
    pub(super) const TRAP: Register = Register(libc::REG_TRAPNO as usize);
    pub(super) const FAULT_ADDRESS: Register = Register(libc::REG_CR2 as usize);
    /// The general registers in the processor's own order, as they are saved.
    pub(super) const GENERAL: [Register; 16] = [
        Register::RAX,
        Register(libc::REG_RCX as usize),
        Register::RDX,
        Register(libc::REG_RBX as usize),
        Register::RSP,
        Register(libc::REG_RBP as usize),
        Register::RSI,
        Register::RDI,
        Register(libc::REG_R8 as usize),
        Register(libc::REG_R9 as usize),
        Register(libc::REG_R10 as usize),
        Register(libc::REG_R11 as usize),
        Register(libc::REG_R12 as usize),
        Register(libc::REG_R13 as usize),
        Register(libc::REG_R14 as usize),
        Register(libc::REG_R15 as usize),
    ];
}

impl Register {
    /// Its place in [`SignalContext::gregs`].
    pub(super) const fn index(self) -> usize {
        self.0
    }
}

/// What a program may set in the flags register: carry, parity, adjust, zero, sign, direction,
/// overflow. Not the trap flag, whose traps nobody would understand.
const FLAGS_OF_PROGRAM: u64 = 0xcd5;
/// Always set: bit 1 by the processor, interrupts by the kernel.
const FLAGS_ALWAYS: u64 = 0x202;

/// The flags as a guest may have them.
pub(super) fn sanitize_flags(flags: u64) -> u64 {
    flags & FLAGS_OF_PROGRAM | FLAGS_ALWAYS
}

/// Most bytes of a floating point part; with AMX it has 11 KiB.
pub(super) const FP_BYTES_MAX: usize = 16 << 10;
/// x87 and SSE registers at its beginning, without what is reserved.
pub(super) const LEGACY_BYTES: usize = 416;
/// Place of `struct _fpx_sw_bytes`: magic, length with a second magic at the end, ...
const SOFTWARE_AT: usize = 464;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2_BYTES: usize = 4;
const CONTROL_WORD_AT: usize = 0;
const CONTROL_WORD_RESET: u16 = 0x37f;
const MXCSR_AT: usize = 24;
const MXCSR_MASK_AT: usize = 28;
/// All exceptions masked, rounding to nearest: what every function expects.
const MXCSR_RESET: u32 = 0x1f80;
/// What a mask of 0 means (Intel SDM volume 1, 11.6.6).
const MXCSR_MASK_DEFAULT: u32 = 0xffbf;
/// The XSAVE header: which components are not in their initial state.
const PRESENT_AT: usize = 512;
const HEADER_END: usize = 576;

/// Components that the built-in program uses, which is compiled for every x86-64 processor: x87 and
/// SSE.
const GUEST_COMPONENTS: u64 = 0b11;
/// Those that a guest finds in their initial state: AVX and the three of AVX-512, too. Others
/// (protection keys, AMX) belong to the process.
const RESET_COMPONENTS: u64 = 0b1110_0111;

/// The floating point part of a frame.
#[repr(C, align(64))]
#[derive(Clone)]
pub(super) struct FpState([u8; FP_BYTES_MAX]);

/// Bytes of a floating point part that the kernel made, with all magics.
///
/// # Safety
/// `fp` points to one.
pub(super) unsafe fn fp_bytes(fp: *const u8) -> usize {
    // SAFETY: each has the 512 bytes of FXSAVE at least, whose end is for software.
    let [magic, length] = unsafe { fp.add(SOFTWARE_AT).cast::<[u32; 2]>().read_unaligned() };
    if magic == MAGIC1 { usize::try_from(length).unwrap_or(usize::MAX) } else { PRESENT_AT }
}

impl FpState {
    /// Where the kernel's bytes go.
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array_at(at))
    }

    fn array_at<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Bytes without the second magic; 512 where there is no XSAVE.
    fn length(&self) -> usize {
        if self.u32_at(SOFTWARE_AT) != MAGIC1 {
            return PRESENT_AT;
        }
        let length = usize::try_from(self.u32_at(SOFTWARE_AT + 4)).unwrap_or(FP_BYTES_MAX);
        length.saturating_sub(MAGIC2_BYTES).clamp(PRESENT_AT, FP_BYTES_MAX)
    }

    fn has_header(&self) -> bool {
        self.length() >= HEADER_END
    }

    fn present(&self) -> u64 {
        if self.has_header() {
            u64::from_le_bytes(self.array_at(PRESENT_AT))
        } else {
            GUEST_COMPONENTS
        }
    }

    fn set_present(&mut self, guest: u64) {
        if self.has_header() {
            let others = self.present() & !RESET_COMPONENTS;
            self.put(PRESENT_AT, &(others | guest).to_le_bytes());
        }
    }

    /// Puts the guest's components in their initial state. What belongs to the process stays.
    pub(super) fn reset(&mut self) {
        let mask = self.u32_at(MXCSR_MASK_AT);
        self.0[..LEGACY_BYTES].fill(0);
        self.put(CONTROL_WORD_AT, &CONTROL_WORD_RESET.to_le_bytes());
        self.put(MXCSR_AT, &MXCSR_RESET.to_le_bytes());
        self.put(MXCSR_MASK_AT, &mask.to_le_bytes());
        self.set_present(0);
    }

    /// The guest's components that are not in their initial state.
    pub(super) fn guest_present(&self) -> u64 {
        self.present() & GUEST_COMPONENTS
    }

    /// The legacy part, without what only describes the processor.
    pub(super) fn legacy(&self) -> [u8; LEGACY_BYTES] {
        let mut legacy = self.array_at(0);
        legacy[MXCSR_MASK_AT..MXCSR_MASK_AT + 4].fill(0);
        legacy
    }

    /// Loads foreign bytes, which loading into the processor must not be able to refuse. `self`
    /// is as a kernel of this host made it; nothing is changed if it fails.
    pub(super) fn load(&mut self, present: u64, legacy: &[u8]) -> Result<(), BackendError> {
        let foreign = present & !GUEST_COMPONENTS;
        if foreign != 0 {
            let reason = format!("vector registers that no guest has: components {foreign:#x}");
            return Err(BackendError::state(reason));
        }
        let legacy: &[u8; LEGACY_BYTES] = legacy.try_into().map_err(|_| {
            BackendError::state(format!("{} bytes of x87 and SSE registers", legacy.len()))
        })?;
        let own_mask = self.u32_at(MXCSR_MASK_AT);
        let mask = if own_mask == 0 { MXCSR_MASK_DEFAULT } else { own_mask };
        let [a, b, c, d] = [0, 1, 2, 3].map(|byte| legacy[MXCSR_AT + byte]);
        let mxcsr = u32::from_le_bytes([a, b, c, d]);
        if mxcsr & !mask != 0 {
            return Err(BackendError::state(format!("MXCSR {mxcsr:#x} has reserved bits")));
        }
        self.put(0, legacy);
        self.put(MXCSR_MASK_AT, &own_mask.to_le_bytes());
        self.set_present(present);
        Ok(())
    }
}
