//! Commands about keys, as the firmware wants them, and what it says.

use crate::command::{InputWriter, Message, Request};
use crate::memory::translation::{KLM_BYTES, Klm, MTT_BYTES, Mtts};
use martlet_mlx5_abi::memory::{
    CreateMkeyIn, CreateMkeyOut, KLM_LIST_ALIGN, Klm as KlmEntry, MkeyContext, OCTWORD_BYTES,
    access_mode,
};
use martlet_mlx5_abi::message::{InHeader, ShortIn, ShortOut};
use martlet_mlx5_abi::{Opcode, U24, U32, U64};
use martlet_vdpa::Access;
use zerocopy::{FromZeros, IntoBytes};

/// What all keys of a device have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyContext {
    /// Protection domain of the keys.
    pub pd: u32,
    /// The null key, which stands for holes (QUERY_SPECIAL_CONTEXTS).
    pub null_key: u32,
}

/// CREATE_MKEY. Its input is made piece by piece, where it is to lie: the input for 1 GiB
/// in steps of 4 KiB has 2 MiB.
#[derive(Debug)]
pub(crate) struct KeyCommand {
    head: Vec<u8>,
    list: List,
}

/// The translation list behind the head.
#[derive(Debug)]
enum List {
    Mtts(Mtts),
    Klms(Vec<Klm>),
}

impl KeyCommand {
    /// DESTROY_MKEY.
    pub(crate) fn destroy(index: u32) -> Request {
        let input = ShortIn::new(Opcode::DESTROY_MKEY, 0, index);
        Request::new::<ShortOut>(Opcode::DESTROY_MKEY, &input)
    }

    /// CREATE_MKEY of a direct key: `bytes` bytes from address 0 on, for `access`, behind `mtts`.
    pub(crate) fn direct(
        context: &KeyContext,
        bytes: u64,
        access: Access,
        mtts: Mtts,
    ) -> KeyCommand {
        let allowed = match access {
            Access::Read => MkeyContext::LOCAL_READ,
            Access::Write => MkeyContext::LOCAL_WRITE,
            Access::ReadWrite => MkeyContext::LOCAL_READ | MkeyContext::LOCAL_WRITE,
        };
        let mode = MkeyContext::mode_flags(access_mode::MTT);
        let list = List::Mtts(mtts);
        let mut input = create(context, mode | allowed, (0, bytes), &list);
        if let List::Mtts(mtts) = &list {
            input.context.log_page_size = U32::new(mtts.granule_shift());
        }
        KeyCommand { head: input.as_bytes().to_vec(), list }
    }

    /// CREATE_MKEY of an indirect key over `span`, its first address and its length. It allows
    /// everything: each entry's own key decides.
    pub(crate) fn indirect(context: &KeyContext, span: (u64, u64), klms: Vec<Klm>) -> KeyCommand {
        let allowed = MkeyContext::LOCAL_READ | MkeyContext::LOCAL_WRITE;
        let mode = MkeyContext::mode_flags(access_mode::KLM);
        let list = List::Klms(klms);
        let input = create(context, mode | allowed, span, &list);
        KeyCommand { head: input.as_bytes().to_vec(), list }
    }

    /// Length of a direct key's input, without making it.
    pub(crate) fn direct_bytes(mtts: &Mtts) -> usize {
        size_of::<CreateMkeyIn>() + mtts_bytes(mtts)
    }

    /// What is asked of the firmware.
    pub(crate) fn into_request(self) -> Request {
        Request::lazy(Opcode::CREATE_MKEY, self, size_of::<CreateMkeyOut>())
    }

    /// Length of its input. The output is 16 bytes long.
    fn input_bytes(&self) -> usize {
        self.head.len() + self.list.bytes()
    }

    /// Fills `into` with the input from `offset` on, zeros beyond its end. Costs as much as the
    /// bytes asked for, wherever they are.
    fn fill(&self, offset: usize, into: &mut [u8]) {
        let head = self.head.get(offset..).unwrap_or(&[]);
        let (begin, rest) = into.split_at_mut(head.len().min(into.len()));
        begin.copy_from_slice(head.get(..begin.len()).unwrap_or(&[]));
        self.list.fill((offset + begin.len()).saturating_sub(self.head.len()), rest);
    }
}

impl Message for KeyCommand {
    fn bytes(&self) -> usize {
        self.input_bytes()
    }

    fn write(&self, to: &mut InputWriter<'_>) {
        let mut block = [0; 512];
        let bytes = self.input_bytes();
        for offset in (0..bytes).step_by(block.len()) {
            let part = &mut block[..(bytes - offset).min(512)];
            self.fill(offset, part);
            to.write(part);
        }
    }
}

/// The head of CREATE_MKEY for a list.
fn create(context: &KeyContext, flags: u32, span: (u64, u64), list: &List) -> CreateMkeyIn {
    let octwords = list.bytes() / OCTWORD_BYTES;
    let octwords = U32::new(u32::try_from(octwords).expect("lists are limited far below"));
    let mut input = CreateMkeyIn::new_zeroed();
    input.header = InHeader::new(Opcode::CREATE_MKEY, 0);
    input.context.flags = U32::new(flags);
    input.context.qpn = U24::new(MkeyContext::ANY_QP);
    input.context.length64_pd = U32::new(context.pd & U24::MAX);
    input.context.start_addr = U64::new(span.0);
    input.context.length = U64::new(span.1);
    input.context.translations_octword_size = octwords;
    input.translations_octword_actual_size = octwords;
    input
}

/// Length of an MTT list: whole octwords.
fn mtts_bytes(mtts: &Mtts) -> usize {
    let count = usize::try_from(mtts.count()).expect("a direct key has up to 2^18 entries");
    (count * MTT_BYTES).next_multiple_of(OCTWORD_BYTES)
}

impl List {
    /// Its length, padded.
    fn bytes(&self) -> usize {
        match self {
            List::Mtts(mtts) => mtts_bytes(mtts),
            List::Klms(klms) => klms.len().next_multiple_of(KLM_LIST_ALIGN) * KLM_BYTES,
        }
    }

    fn fill(&self, offset: usize, into: &mut [u8]) {
        match self {
            List::Mtts(mtts) => {
                let first = u64::try_from(offset / MTT_BYTES).unwrap_or(u64::MAX);
                fill_entries(offset, into, mtts.entries(first).map(u64::to_be_bytes));
            }
            List::Klms(klms) => {
                let rest = klms.get(offset / KLM_BYTES..).unwrap_or(&[]);
                let padding = std::iter::repeat([0; KLM_BYTES]);
                fill_entries(offset, into, rest.iter().map(klm_entry).chain(padding));
            }
        }
    }
}

fn klm_entry(klm: &Klm) -> [u8; KLM_BYTES] {
    // Direct keys are zero-based: the piece begins at address 0 under its key.
    let (byte_count, mkey) = (U32::new(klm.bytes), U32::new(klm.key));
    let mut entry = [0; KLM_BYTES];
    entry.copy_from_slice(KlmEntry { byte_count, mkey, address: U64::new(0) }.as_bytes());
    entry
}

/// Fills `into` with a list of entries of `N` bytes, from its byte `offset` on: `entries` begin
/// with the one that is there.
fn fill_entries<const N: usize>(
    offset: usize,
    into: &mut [u8],
    mut entries: impl Iterator<Item = [u8; N]>,
) {
    let mut skip = offset % N;
    let mut rest = into;
    while !rest.is_empty() {
        let entry = entries.next().unwrap_or([0; N]);
        let (now, later) = rest.split_at_mut((N - skip).min(rest.len()));
        now.copy_from_slice(&entry[skip..skip + now.len()]);
        (rest, skip) = (later, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Input;
    use martlet_device_io::{BusAddress, BusRun};
    use proptest::prelude::*;

    const CONTEXT: KeyContext = KeyContext { pd: 0x00ab_cdef, null_key: 0x500 };

    fn input(command: &KeyCommand) -> Vec<u8> {
        let mut bytes = vec![0xff; command.input_bytes()];
        command.fill(0, &mut bytes);
        bytes
    }

    fn at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
        bytes[offset..offset + N].try_into().unwrap()
    }

    /// Offsets and bits typed from the documents, not from the layouts that the code uses.
    #[test]
    fn a_direct_key_as_documented() {
        let run = |at, bytes| BusRun { at: BusAddress(at), bytes };
        let runs = [run(0x7_0000_2000, 0x4000), run(0x9_0000_0000, 0x2000)];
        let mtts = Mtts::new(runs).unwrap();
        let expected = KeyCommand::direct_bytes(&mtts);
        let command = KeyCommand::direct(&CONTEXT, 0x6000, Access::Write, mtts);
        let bytes = input(&command);
        assert_eq!((bytes.len(), expected), (272 + 32, 272 + 32));
        assert_eq!(at(&bytes, 0), [0x02, 0x00, 0, 0, 0, 0, 0, 0]);
        // Access mode MTT in bits 9:8, lw bit 11, no lr.
        assert_eq!(at(&bytes, 0x10), (1_u32 << 8 | 1 << 11).to_be_bytes());
        assert_eq!(at(&bytes, 0x14), [0xff, 0xff, 0xff, 0]);
        assert_eq!(at(&bytes, 0x1c), [0, 0xab, 0xcd, 0xef]);
        assert_eq!(at(&bytes, 0x20), [0; 8]);
        assert_eq!(at(&bytes, 0x28), 0x6000_u64.to_be_bytes());
        assert_eq!(at(&bytes, 0x44), 2_u32.to_be_bytes());
        assert_eq!(at(&bytes, 0x48), 13_u32.to_be_bytes());
        assert_eq!(at(&bytes, 0x60), 2_u32.to_be_bytes());
        let list: Vec<u64> =
            bytes[0x110..].chunks(8).map(|entry| u64::from_be_bytes(at(entry, 0))).collect();
        assert_eq!(list, [0x7_0000_2000, 0x7_0000_4000, 0x9_0000_0000, 0]);
    }

    #[test]
    fn an_indirect_key_as_documented() {
        let klm = |bytes, key| Klm { bytes, key };
        let list = vec![klm(0x4000_0000, 0x100), klm(0x1000, 0x500), klm(0x1000, 0x200)];
        let list = [list, vec![klm(0x2000, 0x300), klm(0x1000, 0x400)]].concat();
        let command = KeyCommand::indirect(&CONTEXT, (0x8000_0000, 0x4000_5000), list);
        let bytes = input(&command);
        assert_eq!(bytes.len(), 272 + 8 * 16);
        // Access mode KLM, lw and lr.
        assert_eq!(at(&bytes, 0x10), (2_u32 << 8 | 1 << 11 | 1 << 10).to_be_bytes());
        assert_eq!(at(&bytes, 0x20), 0x8000_0000_u64.to_be_bytes());
        assert_eq!(at(&bytes, 0x28), 0x4000_5000_u64.to_be_bytes());
        assert_eq!(at(&bytes, 0x44), 8_u32.to_be_bytes());
        assert_eq!(at(&bytes, 0x48), [0; 4]);
        assert_eq!(at(&bytes, 0x60), 8_u32.to_be_bytes());
        let first = [0x40, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(at(&bytes, 0x110), first);
        let fifth = [0, 0, 0x10, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(at(&bytes, 0x150), fifth);
        assert_eq!(at(&bytes, 0x160), [0; 48]);
    }

    #[test]
    fn a_destruction_as_documented() {
        let request = KeyCommand::destroy(0x00fe_dcba);
        let bytes = [0x02, 0x02, 0, 0, 0, 0, 0, 0, 0, 0xfe, 0xdc, 0xba, 0, 0, 0, 0];
        assert!(matches!(request.input, Input::Bytes(input) if *input == bytes));
    }

    proptest! {
        #[test]
        fn an_input_is_the_same_in_any_pieces(
            pages in 1_u64..300,
            offset in 0_usize..3000,
            bytes in 0_usize..600,
        ) {
            let runs = (0..pages).map(|page| BusRun { at: BusAddress(page << 20), bytes: 4096 });
            let mtts = Mtts::new(runs).unwrap();
            let command = KeyCommand::direct(&CONTEXT, pages << 12, Access::Read, mtts);
            let mut whole = input(&command);
            whole.resize(4000, 0);
            let mut part = vec![0xff; bytes];
            command.fill(offset, &mut part);
            prop_assert_eq!(&part, &whole[offset..offset + bytes]);
        }
    }
}
