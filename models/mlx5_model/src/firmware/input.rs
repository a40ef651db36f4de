//! A command's input. Page lists are taken as they come, mailbox by mailbox, and kept as runs: the
//! list of a 1 GiB key has 2 MiB.

use crate::num::{to_u64, to_usize};
use crate::pages::Pages;
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::memory::{CreateMkeyIn, access_mode};
use zerocopy::FromBytes;

/// Bytes of CREATE_MKEY before its list.
const KEY_HEAD_BYTES: usize = size_of::<CreateMkeyIn>();

/// Bytes of an entry of a page list.
const PAGE_ENTRY_BYTES: u64 = 8;

/// What a driver asks for.
#[derive(Debug)]
pub(super) struct Input {
    pub(super) opcode: Opcode,
    /// How long it is in all.
    pub(super) length: usize,
    /// All of it but a page list.
    pub(super) head: Vec<u8>,
    /// The page list of a key; `None` if there are no pages of the size that it names.
    pub(super) pages: Option<Pages>,
    in_list: bool,
}

impl Input {
    pub(super) fn new(opcode: Opcode, length: usize) -> Input {
        let head = Vec::with_capacity(length.min(KEY_HEAD_BYTES));
        Input { opcode, length, head, pages: None, in_list: false }
    }

    /// Takes the next bytes.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if self.opcode == Opcode::CREATE_MKEY && !self.in_list {
            let missing = KEY_HEAD_BYTES - self.head.len().min(KEY_HEAD_BYTES);
            let (now, later) = rest.split_at(missing.min(rest.len()));
            self.head.extend_from_slice(now);
            rest = later;
            if self.head.len() == KEY_HEAD_BYTES {
                self.begin_list();
            }
        }
        match (&mut self.pages, self.in_list) {
            // The list begins at a multiple of 8, and mailboxes end at one: no entry is cut.
            (Some(pages), _) => pages.extend(rest),
            (None, _) => self.head.extend_from_slice(rest),
        }
    }

    fn begin_list(&mut self) {
        self.in_list = true;
        let Ok((key, _)) = CreateMkeyIn::read_from_prefix(&self.head) else { return };
        if key.context.access_mode() == access_mode::MTT {
            self.pages = Pages::new(key.context.log_page_size.get() & 0x3f);
        }
    }

    /// Entries of a page list, as far as its length tells.
    pub(super) fn list_entries(&self) -> u64 {
        if self.opcode != Opcode::CREATE_MKEY {
            return 0;
        }
        to_u64(self.length.saturating_sub(KEY_HEAD_BYTES)) / PAGE_ENTRY_BYTES
    }

    /// The 24-bit object of a short input.
    pub(super) fn object(&self) -> u32 {
        let field = self.head.get(8..12).unwrap_or_default();
        let word = field.iter().fold(0_u32, |word, byte| (word << 8) | u32::from(*byte));
        word & 0x00ff_ffff
    }

    /// The list that follows `head_bytes` bytes: big-endian words of 32 bits, `count` of them.
    pub(super) fn words(&self, head_bytes: usize, count: u32) -> Option<Vec<u32>> {
        let list = self.head.get(head_bytes..)?.chunks_exact(4).take(to_usize(count));
        let words: Vec<_> = list
            .map(|word| word.iter().fold(0, |all, byte| (all << 8) | u32::from(*byte)))
            .collect();
        (words.len() == to_usize(count)).then_some(words)
    }

    /// The list that follows `head_bytes` bytes: big-endian words of 64 bits, `count` of them.
    pub(super) fn long_words(&self, head_bytes: usize, count: u64) -> Option<Vec<u64>> {
        let count = usize::try_from(count).ok()?;
        let list = self.head.get(head_bytes..)?.chunks_exact(8).take(count);
        let words: Vec<_> = list
            .map(|word| word.iter().fold(0, |all, byte| (all << 8) | u64::from(*byte)))
            .collect();
        (words.len() == count).then_some(words)
    }
}
