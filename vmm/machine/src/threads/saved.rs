//! The saved state of a vCPU that is a thread. Field numbers are never used again for something
//! else; new fields are optional.

use super::frame::{FpState, Register, sanitize_flags};
use super::signals::Passage;
use crate::saved::decode;
use crate::vcpu::backend::BackendError;
use martlet_ram::GuestRam;
use martlet_units::Gpa;
use minicbor::{Decode, Encode};

/// Most bytes of a state; what is longer is refused unread.
const STATE_BYTES_MAX: usize = 64 << 10;

/// See the module's comment.
#[derive(Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(super) struct SavedVcpu {
    /// In the order of [`Register::GENERAL`].
    #[n(0)]
    pub(super) general: [u64; 16],
    #[n(1)]
    pub(super) rip: u64,
    #[n(2)]
    pub(super) flags: u64,
    /// XSAVE components that are not in their initial state.
    #[n(3)]
    pub(super) present: u64,
    /// x87 and SSE registers as FXSAVE stores them.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub(super) legacy: Vec<u8>,
    /// Empty: once what is behind them, which no guest uses.
    #[n(5)]
    pub(super) components: Vec<u8>,
}

impl SavedVcpu {
    /// Takes the registers of a guest that is out.
    pub(super) fn take(passage: &mut Passage) -> SavedVcpu {
        let general = Register::GENERAL.map(|register| passage.register(register));
        let rip = passage.register(Register::RIP);
        let flags = sanitize_flags(passage.register(Register::FLAGS));
        let fp: &FpState = passage.fp();
        SavedVcpu {
            general,
            rip,
            flags,
            present: fp.guest_present(),
            legacy: fp.legacy().to_vec(),
            components: Vec::new(),
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("writing to a vector can't fail")
    }

    /// Reads foreign bytes. What is well-formed need not be loadable yet.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<SavedVcpu, BackendError> {
        if bytes.len() > STATE_BYTES_MAX {
            return Err(BackendError::state(format!("{} bytes of a vCPU's state", bytes.len())));
        }
        decode(bytes).map_err(BackendError::state)
    }

    /// Gives the registers to a guest that is out, if they can be entered with: code and stack in
    /// the guest's memory, no flag or vector state that the processor or the kernel refuses. The
    /// guest keeps what it had if not.
    pub(super) fn give(
        self,
        passage: &mut Passage,
        ram: &GuestRam,
        base: u64,
    ) -> Result<(), BackendError> {
        let in_ram = |address: u64| {
            let gpa = address.checked_sub(base).map(Gpa);
            gpa.is_some_and(|gpa| ram.find(gpa.to_gfn()).is_some())
        };
        let rsp = Register::GENERAL.iter().position(|register| *register == Register::RSP);
        let rsp = rsp.and_then(|index| self.general.get(index)).copied().unwrap_or_default();
        for (what, address, inside) in
            [("instruction", self.rip, self.rip), ("stack", rsp, rsp.wrapping_sub(1))]
        {
            if !in_ram(inside) {
                let reason = format!("{what} pointer {address:#x} is not in the guest's memory");
                return Err(BackendError::state(reason));
            }
        }
        if !self.components.is_empty() {
            return Err(BackendError::state("components behind x87 and SSE, which no guest has"));
        }
        passage.fp().load(self.present, &self.legacy)?;
        for (register, value) in Register::GENERAL.into_iter().zip(self.general) {
            passage.set_register(register, value);
        }
        passage.set_register(Register::RIP, self.rip);
        passage.set_register(Register::FLAGS, sanitize_flags(self.flags));
        Ok(())
    }
}
