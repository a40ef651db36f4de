//! Writes an input into an entry and its mailboxes.

use super::pool::{Chain, MailboxPool};
use martlet_mlx5_abi::command::{INLINE_BYTES, MAILBOX_DATA_BYTES};

/// Where a command's input is written, from its begin to its end.
pub(crate) struct InputWriter<'a> {
    pool: &'a MailboxPool,
    chain: &'a Chain,
    inline: [u8; INLINE_BYTES],
    block: [u8; MAILBOX_DATA_BYTES],
    written: usize,
    bytes: usize,
}

impl<'a> InputWriter<'a> {
    pub(crate) fn new(pool: &'a MailboxPool, chain: &'a Chain, bytes: usize) -> InputWriter<'a> {
        let (inline, block) = ([0; INLINE_BYTES], [0; MAILBOX_DATA_BYTES]);
        InputWriter { pool, chain, inline, block, written: 0, bytes }
    }

    /// Appends.
    ///
    /// # Panics
    /// If the message becomes longer than it was said to be.
    pub(crate) fn write(&mut self, mut from: &[u8]) {
        assert!(from.len() <= self.bytes - self.written, "a message is as long as it said");
        if let Some(room) = self.inline.get_mut(self.written..).filter(|room| !room.is_empty()) {
            let (now, later) = from.split_at(from.len().min(room.len()));
            room[..now.len()].copy_from_slice(now);
            self.written += now.len();
            from = later;
        }
        while !from.is_empty() {
            let begin = (self.written - INLINE_BYTES) % MAILBOX_DATA_BYTES;
            let (now, later) = from.split_at(from.len().min(MAILBOX_DATA_BYTES - begin));
            self.block[begin..begin + now.len()].copy_from_slice(now);
            self.written += now.len();
            from = later;
            if begin + now.len() == MAILBOX_DATA_BYTES {
                self.flush(MAILBOX_DATA_BYTES);
            }
        }
    }

    /// Ends the message; gives the part that goes into the entry.
    pub(crate) fn finish(mut self) -> [u8; INLINE_BYTES] {
        assert_eq!(self.written, self.bytes, "a message is as long as it said");
        let rest = self.written.saturating_sub(INLINE_BYTES) % MAILBOX_DATA_BYTES;
        if rest > 0 {
            self.flush(rest);
        }
        self.inline
    }

    /// Copies the block that has been filled up to `bytes`.
    fn flush(&mut self, bytes: usize) {
        let number = (self.written - INLINE_BYTES - 1) / MAILBOX_DATA_BYTES;
        self.pool.write_data(self.chain, number, &self.block[..bytes]);
    }
}
