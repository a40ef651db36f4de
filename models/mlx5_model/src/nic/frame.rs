//! Frames between rings: gathered from a transmit queue, placed into a receive queue.

use super::queue::{Offloads, Work};
use super::ring::{Buffer, RingError};
use super::view::Reach;
use crate::num::{low32, to_u64};

/// Bytes of `struct virtio_net_hdr_v1` (virtio 1.3, section 5.1.6).
pub(crate) const HEADER_BYTES: usize = 12;

/// The largest frame with its header: what one IP packet can have, and some Ethernet.
const FRAME_BYTES_MAX: u64 = 65_536 + 64;

/// Receive buffers that one frame may fill.
const MERGED_MAX: usize = 64;

const FLAG_NEEDS_CHECKSUM: u8 = 1;
const FLAG_DATA_VALID: u8 = 2;
const GSO_NONE: u8 = 0;

/// Memory that frames are copied through; used again and again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    buffers: Vec<Buffer>,
    chains: Vec<Chain>,
    /// The frame, with its header.
    pub(crate) frame: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Chain {
    head: u16,
    buffers: usize,
    written: u32,
}

/// What was found in a transmit queue.
pub(crate) enum Gathered {
    /// A frame, in [`Scratch::frame`].
    Frame { head: u16 },
    /// Something that is no frame.
    Rubbish { head: u16 },
}

/// What became of a frame at a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placed {
    /// It is there, and given to the guest with the queue's next publication.
    Done,
    /// There are not enough buffers now.
    NoBuffers,
    /// The next buffer will never hold it.
    TooSmall,
}

/// Copies the frame of the chain that waits first; the chain stays where it is.
pub(crate) fn gather(
    work: &mut Work,
    reach: Reach<'_>,
    scratch: &mut Scratch,
) -> Result<Gathered, RingError> {
    scratch.buffers.clear();
    let (head, bytes) = work.ring.chain(reach, 0, &mut scratch.buffers)?;
    if bytes < to_u64(HEADER_BYTES) || bytes > FRAME_BYTES_MAX {
        return Ok(Gathered::Rubbish { head });
    }
    let length = usize::try_from(bytes).unwrap_or(0);
    scratch.frame.resize(length, 0);
    let mut rest = scratch.frame.as_mut_slice();
    for buffer in &scratch.buffers {
        let length = crate::num::to_usize(buffer.bytes).min(rest.len());
        let (now, later) = rest.split_at_mut(length);
        work.ring.view.read(reach, buffer.at, now)?;
        rest = later;
    }
    let good = finish_offloads(&mut scratch.frame, work.offloads);
    Ok(if good { Gathered::Frame { head } } else { Gathered::Rubbish { head } })
}

/// Does what the header asks for, as far as the queue offers it (5.1.6.2.1); false for more. The
/// frame is complete afterwards.
fn finish_offloads(frame: &mut [u8], offloads: Offloads) -> bool {
    let Some((header, packet)) = frame.split_at_mut_checked(HEADER_BYTES) else { return false };
    let [flags, gso, _, _, _, _, start_low, start_high, offset_low, offset_high, ..] = *header
    else {
        return false;
    };
    if gso != GSO_NONE {
        return false;
    }
    if flags & FLAG_NEEDS_CHECKSUM == 0 {
        return true;
    }
    let start = usize::from(u16::from_le_bytes([start_low, start_high]));
    let at = usize::from(u16::from_le_bytes([offset_low, offset_high]));
    let Some(summed) = packet.get_mut(start..) else { return false };
    let sum = internet_checksum(summed);
    let Some(field) = summed.get_mut(at..at + 2) else { return false };
    field.copy_from_slice(&sum.to_be_bytes());
    offloads.checksum
}

/// The Internet checksum (RFC 1071).
fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u64;
    let mut pairs = bytes.chunks_exact(2);
    for pair in &mut pairs {
        sum += u64::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        sum += u64::from(u16::from_be_bytes([*last, 0]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !crate::num::low16(low32(sum))
}

/// Copies the frame into the buffers that wait first. The queue must be running.
pub(crate) fn place(
    work: &mut Work,
    reach: Reach<'_>,
    scratch: &mut Scratch,
) -> Result<Placed, RingError> {
    let waiting = work.ring.waiting(reach)?;
    let needed = to_u64(scratch.frame.len());
    scratch.buffers.clear();
    scratch.chains.clear();
    let mut room = 0;
    while room < needed {
        let ahead = u16::try_from(scratch.chains.len()).unwrap_or(u16::MAX);
        let chains_max = if work.offloads.mergeable { MERGED_MAX } else { 1 };
        if scratch.chains.len() == chains_max {
            return Ok(Placed::TooSmall);
        }
        if ahead >= waiting {
            return Ok(Placed::NoBuffers);
        }
        let before = scratch.buffers.len();
        let (head, bytes) = work.ring.chain(reach, ahead, &mut scratch.buffers)?;
        let buffers = scratch.buffers.len() - before;
        scratch.chains.push(Chain { head, buffers, written: 0 });
        room += bytes;
    }
    let count = u16::try_from(scratch.chains.len()).unwrap_or(u16::MAX);
    write_header(&mut scratch.frame, work.offloads, count);
    let (mut rest, mut buffers) = (scratch.frame.as_slice(), scratch.buffers.iter());
    for chain in &mut scratch.chains {
        for buffer in buffers.by_ref().take(chain.buffers) {
            let length = crate::num::to_usize(buffer.bytes).min(rest.len());
            let (now, later) = rest.split_at(length);
            work.ring.view.write(reach, buffer.at, now)?;
            chain.written += low32(to_u64(length));
            rest = later;
        }
    }
    // Only when all of it is there: a frame that breaks the queue was not received.
    for chain in &scratch.chains {
        work.ring.use_chain(chain.head, chain.written);
    }
    Ok(Placed::Done)
}

/// The header of a received frame (5.1.6.3): nothing is left to do, and how many buffers it fills.
fn write_header(frame: &mut [u8], offloads: Offloads, buffers: u16) {
    let Some(header) = frame.get_mut(..HEADER_BYTES) else { return };
    let checked = header.first().is_some_and(|flags| flags & FLAG_NEEDS_CHECKSUM != 0);
    header.fill(0);
    if checked && offloads.guest_checksum {
        header[0] = FLAG_DATA_VALID;
    }
    header[10..].copy_from_slice(&buffers.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_filled_in() {
        // RFC 1071, section 3: these bytes sum to ddf2.
        let sum = internet_checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum, !0xddf2);
        let mut frame = [0; HEADER_BYTES + 8];
        frame[0] = FLAG_NEEDS_CHECKSUM;
        frame[6] = 2;
        frame[8] = 4;
        frame[HEADER_BYTES + 2] = 0x12;
        let offloads = Offloads { checksum: true, ..Offloads::default() };
        assert!(finish_offloads(&mut frame, offloads));
        assert_eq!(frame[HEADER_BYTES + 6..], (!0x1200_u16).to_be_bytes());
        assert!(!finish_offloads(&mut frame, Offloads::default()));
        frame[8] = 5;
        assert!(!finish_offloads(&mut frame, offloads));
    }
}
