//! The frames: numbered, with a checksum over everything behind their addresses.
//!
//! ```text
//! buffer + 4   16              32     40        48            56     64 ..
//!   | header   | to from type  | MAGIC sequence  card | pair  check  | body, one word each
//! ```
//! The header is virtio's, 12 bytes of zeros; the frame begins at 16, so that its words are
//! aligned. `check` is made of the three words before it and the whole body.

use crate::page;

/// Bytes between the begin of a buffer and what the card is given of it.
pub const LEAD: u64 = 4;
/// `struct virtio_net_hdr_v1` (5.1.6).
pub const NET_HEADER_BYTES: u64 = 12;
/// Bytes of a frame before its body.
const FRAME_HEADER_BYTES: u64 = 48;
/// An EtherType for experiments (IEEE 802, 9.2.4), two bytes of zeros behind it.
const ETHER_TYPE: u64 = 0xb588;
const MAGIC: u64 = u64::from_le_bytes(*b"martletF");

/// Which frame it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Label {
    pub card: u64,
    pub pair: u64,
    pub sequence: u64,
}

impl Label {
    fn origin(self) -> u64 {
        self.card << 32 | self.pair
    }

    fn key(self) -> u64 {
        page::key(self.sequence, self.origin() | 1 << 63)
    }
}

/// What was found in a frame's place.
pub enum Found {
    Good(Label),
    Damaged,
}

/// Adds a word to a checksum. Its place counts, too.
fn add(check: u64, word: u64) -> u64 {
    (check.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn start(origin: u64, sequence: u64) -> u64 {
    add(add(MAGIC, origin), sequence)
}

/// Writes a frame of `bytes` bytes into a buffer, from and to the card's own address.
///
/// # Safety
/// The buffer is this program's and as long as that, with the header and [`LEAD`].
pub unsafe fn write(buffer: *mut u8, bytes: u64, mac: u64, label: Label) {
    let words = (bytes - FRAME_HEADER_BYTES) / 8;
    let key = label.key();
    // SAFETY: the caller's promise.
    unsafe {
        let at: *mut u64 = buffer.cast();
        // Header; then two addresses of 6 bytes, the type and two bytes more.
        at.write(0);
        at.add(1).write(0);
        at.add(2).write(mac & 0xffff_ffff_ffff | mac << 48);
        at.add(3).write(mac >> 16 & 0xffff_ffff | ETHER_TYPE << 32);
        at.add(4).write(MAGIC);
        at.add(5).write(label.sequence);
        at.add(6).write(label.origin());
        let body = at.add(8);
        let mut check = start(label.origin(), label.sequence);
        let mut index = 0;
        while index < words {
            let word = page::body(key, index as usize);
            check = add(check, word);
            body.add(index as usize).write(word);
            index += 1;
        }
        at.add(7).write(check);
    }
}

/// Reads a frame of `bytes` bytes that a card has written.
///
/// # Safety
/// As for [`write`]; the card is done with the buffer.
pub unsafe fn read(buffer: *const u8, bytes: u64) -> Found {
    let words = (bytes - FRAME_HEADER_BYTES) / 8;
    // SAFETY: the caller's promise. Volatile, since the card wrote it, not this program.
    unsafe {
        let at: *const u64 = buffer.cast();
        let word = |index: u64| at.add(index as usize).read_volatile();
        if word(4) != MAGIC || word(3) >> 32 & 0xffff != ETHER_TYPE {
            return Found::Damaged;
        }
        let (sequence, origin) = (word(5), word(6));
        let mut check = start(origin, sequence);
        let mut index = 0;
        while index < words {
            check = add(check, word(8 + index));
            index += 1;
        }
        if check != word(7) {
            return Found::Damaged;
        }
        Found::Good(Label { card: origin >> 32, pair: origin & 0xffff_ffff, sequence })
    }
}
