//! When a page that was sent before goes as a list of what changed.

use core::time::Duration;
use martlet_units::{ByteCount, BytesPerSec, PAGE_SIZE};

/// Bytes of a changed word of 8 in a delta record.
const ENTRY_BYTES: u64 = 10;
/// What a record needs beside itself: its page's number and its length.
const HEADER_BYTES: u64 = 16;
/// A record must save at least this much of a page, in percent, to be worth two passes over memory
/// and the copy of the page that both sides keep.
const SAVED_PERCENT_MIN: u64 = 2;
/// The longest record that is worth sending: 399 changed words of the 512.
const RECORD_BYTES_MAX: u64 = {
    let worth = PAGE_SIZE * (100 - SAVED_PERCENT_MIN) / 100 - HEADER_BYTES;
    worth - worth % ENTRY_BYTES
};

/// Longest delta record, in bytes, that is worth sending instead of a page: the limit to give the
/// device, which then says that a page changed too much. `None` if no record is: the link sends a
/// whole page faster than the device compares two.
///
/// `page_time` is how long one record takes the device (two reads of a page: some 0.27 us). It
/// works while the link sends, so it only has to keep up.
pub fn delta_record_bytes_max(link: BytesPerSec, page_time: Duration) -> Option<u32> {
    let keeps_up = page_time < link.time_for(ByteCount(PAGE_SIZE));
    keeps_up.then(|| u32::try_from(RECORD_BYTES_MAX).unwrap_or(u32::MAX))
}
