//! A split virtqueue as the device works on it (virtio 1.3, section 2.7).
//!
//! The guest owns all bytes of it and may change them at any time. What can't be is an error of
//! the ring, and the queue stops for good (state ERR).

use super::view::{Reach, View};
use crate::keys::AccessError;
use crate::num::{low16, low32, to_u64};
use std::sync::atomic::{Ordering, fence};

const DESCRIPTOR_BYTES: u64 = 16;
const RING_HEADER_BYTES: u64 = 4;
const USED_BYTES: u64 = 8;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

/// Entries that are read, or published, together.
const BATCH: usize = 32;

/// Why a ring can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingError {
    /// Memory that the queue must not reach.
    Access(AccessError),
    /// The guest's index is more than a ring ahead.
    Index { taken: u16, found: u16 },
    /// A descriptor's number is beyond the table, or a chain is longer than it.
    Chain { head: u16 },
    /// A descriptor that the device can't use: indirect, empty, or for the wrong direction.
    Descriptor { head: u16 },
}

impl From<AccessError> for RingError {
    fn from(error: AccessError) -> RingError {
        RingError::Access(error)
    }
}

/// Where the parts of a ring lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingPlace {
    pub(crate) descriptors: u64,
    pub(crate) driver: u64,
    pub(crate) device: u64,
}

/// A buffer in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) at: u64,
    pub(crate) bytes: u32,
}

/// Which way a queue's buffers go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The device writes them: a receive queue.
    Receive,
    /// The device reads them: a transmit queue.
    Transmit,
}

/// The device's side of a ring.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) place: RingPlace,
    pub(crate) view: View,
    size: u16,
    direction: Direction,
    /// Entries of the driver's ring before this one were taken.
    taken: u16,
    /// Entries of the device's ring before this one are published.
    published: u16,
    /// The guest's index as it was read last.
    seen: u16,
    heads: Heads,
    used: Vec<(u16, u32)>,
    /// Whether NO_NOTIFY stands in the ring; `None` as long as somebody else wrote it last.
    quiet: Option<bool>,
}

/// Entries of the driver's ring that were read ahead.
#[derive(Debug, Default)]
struct Heads {
    first: u16,
    count: u16,
    heads: [u16; BATCH],
}

impl Ring {
    /// A ring of `size` descriptors, a power of two.
    pub(crate) fn new(size: u16, direction: Direction, place: RingPlace, view: View) -> Ring {
        assert!(size.is_power_of_two(), "checked when the queue was made");
        Ring {
            place,
            view,
            size,
            direction,
            taken: 0,
            published: 0,
            seen: 0,
            heads: Heads::default(),
            used: Vec::with_capacity(BATCH),
            quiet: None,
        }
    }

    /// Goes on from these indices.
    pub(crate) fn set_taken(&mut self, index: u16) {
        self.taken = index;
        self.forget();
    }

    /// As [`Ring::set_taken`], for the device's ring.
    pub(crate) fn set_published(&mut self, index: u16) {
        self.published = index;
    }

    /// Forgets what was read ahead.
    pub(crate) fn forget(&mut self) {
        self.seen = self.taken;
        self.heads = Heads::default();
    }

    fn read(&mut self, reach: Reach<'_>, at: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.view.read(reach, at, into)
    }

    fn write(&mut self, reach: Reach<'_>, at: u64, from: &[u8]) -> Result<(), AccessError> {
        self.view.write(reach, at, from)
    }

    /// How many entries of the driver's ring were taken.
    pub(crate) fn taken(&self) -> u16 {
        self.taken
    }

    /// How many entries of the device's ring were published.
    pub(crate) fn published(&self) -> u16 {
        self.published
    }

    /// Whether a publication is due before more is taken.
    pub(crate) fn is_full_of_used(&self) -> bool {
        self.used.len() >= BATCH
    }

    /// How many entries of the driver's ring wait to be taken.
    pub(crate) fn waiting(&mut self, reach: Reach<'_>) -> Result<u16, RingError> {
        if self.seen != self.taken {
            return Ok(self.seen.wrapping_sub(self.taken));
        }
        self.look(reach)
    }

    /// Whether entries wait that were seen already.
    pub(crate) fn has_waiting(&self) -> bool {
        self.seen != self.taken
    }

    /// As [`Ring::waiting`], with the guest's index read again in any case.
    pub(crate) fn look(&mut self, reach: Reach<'_>) -> Result<u16, RingError> {
        let mut index = [0; 2];
        self.read(reach, self.place.driver.wrapping_add(2), &mut index)?;
        // Acquires the entries, descriptors and buffers behind the index; the guest's partner is
        // its barrier before it writes the index (virtio 2.7.13.3).
        fence(Ordering::Acquire);
        let found = u16::from_le_bytes(index);
        let waiting = found.wrapping_sub(self.taken);
        if waiting > self.size {
            return Err(RingError::Index { taken: self.taken, found });
        }
        self.seen = found;
        Ok(waiting)
    }

    /// The first descriptor of the `ahead`th chain that waits. It must wait.
    fn head(&mut self, reach: Reach<'_>, ahead: u16) -> Result<u16, RingError> {
        let index = self.taken.wrapping_add(ahead);
        if index.wrapping_sub(self.heads.first) >= self.heads.count {
            self.read_heads(reach, index)?;
        }
        let at = usize::from(index.wrapping_sub(self.heads.first));
        let head = self.heads.heads.get(at).copied().unwrap_or(0);
        if head < self.size { Ok(head) } else { Err(RingError::Chain { head }) }
    }

    fn read_heads(&mut self, reach: Reach<'_>, index: u16) -> Result<(), RingError> {
        let slot = index % self.size;
        let waiting = self.seen.wrapping_sub(index);
        let count = usize::from(waiting.min(self.size - slot)).min(BATCH);
        let mut bytes = [0; BATCH * 2];
        let bytes = bytes.get_mut(..count * 2).unwrap_or_default();
        let at = self.place.driver.wrapping_add(RING_HEADER_BYTES + u64::from(slot) * 2);
        self.read(reach, at, bytes)?;
        for (head, entry) in self.heads.heads.iter_mut().zip(bytes.chunks_exact(2)) {
            *head = u16::from_le_bytes([entry[0], entry[1]]);
        }
        self.heads.first = index;
        self.heads.count = u16::try_from(count).unwrap_or(0);
        Ok(())
    }

    /// Appends the buffers of the `ahead`th chain that waits to `buffers`; its first descriptor and
    /// its length in bytes.
    pub(crate) fn chain(
        &mut self,
        reach: Reach<'_>,
        ahead: u16,
        buffers: &mut Vec<Buffer>,
    ) -> Result<(u16, u64), RingError> {
        let head = self.head(reach, ahead)?;
        let (mut next, mut bytes) = (head, 0_u64);
        for _ in 0..self.size {
            if next >= self.size {
                return Err(RingError::Chain { head });
            }
            let mut raw = [0; 16];
            let offset = u64::from(next) * DESCRIPTOR_BYTES;
            self.read(reach, self.place.descriptors.wrapping_add(offset), &mut raw)?;
            let descriptor = Descriptor::parse(&raw);
            let wanted = match self.direction {
                Direction::Receive => WRITE,
                Direction::Transmit => 0,
            };
            if descriptor.flags & INDIRECT != 0 || descriptor.flags & WRITE != wanted {
                return Err(RingError::Descriptor { head });
            }
            if descriptor.bytes > 0 {
                buffers.push(Buffer { at: descriptor.at, bytes: descriptor.bytes });
                bytes += u64::from(descriptor.bytes);
            }
            if descriptor.flags & NEXT == 0 {
                return Ok((head, bytes));
            }
            next = descriptor.next;
        }
        Err(RingError::Chain { head })
    }

    /// Takes a chain, and gives it back to the guest with the next publication.
    pub(crate) fn use_chain(&mut self, head: u16, written: u32) {
        self.taken = self.taken.wrapping_add(1);
        self.used.push((head, written));
    }

    /// Tells the guest of all chains that were used; whether it wants to be interrupted for them.
    pub(crate) fn publish(&mut self, reach: Reach<'_>) -> Result<bool, RingError> {
        if self.used.is_empty() {
            self.view.flush_log(reach)?;
            return Ok(false);
        }
        let mut bytes = [0; BATCH * 8];
        let mut done = 0;
        while done < self.used.len() {
            let slot = self.published.wrapping_add(low16_of(done)) % self.size;
            let run = (self.used.len() - done).min(usize::from(self.size - slot)).min(BATCH);
            let entries = self.used.iter().skip(done).take(run);
            for (entry, (head, written)) in bytes.chunks_exact_mut(8).zip(entries) {
                entry[..4].copy_from_slice(&u32::from(*head).to_le_bytes());
                entry[4..].copy_from_slice(&written.to_le_bytes());
            }
            let at = self.place.device.wrapping_add(RING_HEADER_BYTES);
            let at = at.wrapping_add(u64::from(slot) * USED_BYTES);
            self.write(reach, at, bytes.get(..run * 8).unwrap_or_default())?;
            done += run;
        }
        let index = self.published.wrapping_add(low16_of(done));
        // Entries and buffers before the index; the guest's partner is its barrier after reading
        // the index (virtio 2.7.14).
        fence(Ordering::Release);
        self.write(reach, self.place.device.wrapping_add(2), &index.to_le_bytes())?;
        self.published = index;
        self.used.clear();
        self.view.flush_log(reach)?;
        self.wants_interrupt(reach)
    }

    fn wants_interrupt(&mut self, reach: Reach<'_>) -> Result<bool, RingError> {
        // The index is visible before the flag is read: a guest that clears the flag and then
        // looks at the index sees either the index or an interrupt (virtio 2.7.7.2).
        fence(Ordering::SeqCst);
        let mut flags = [0; 2];
        self.read(reach, self.place.driver, &mut flags)?;
        Ok(u16::from_le_bytes(flags) & NO_INTERRUPT == 0)
    }

    /// Whether the guest may have been asked not to kick.
    pub(crate) fn may_be_quiet(&self) -> bool {
        self.quiet != Some(false)
    }

    /// Asks the guest not to kick, or to kick again. After asking for kicks the driver's ring must
    /// be looked at once more: the guest may have decided before (virtio 2.7.10).
    pub(crate) fn set_quiet(&mut self, reach: Reach<'_>, quiet: bool) -> Result<(), RingError> {
        if self.quiet != Some(quiet) {
            let flags = if quiet { NO_NOTIFY } else { 0 };
            self.write(reach, self.place.device, &flags.to_le_bytes())?;
            self.quiet = Some(quiet);
            fence(Ordering::SeqCst);
            self.view.flush_log(reach)?;
        }
        Ok(())
    }

    /// Whoever served the ring before may have left NO_NOTIFY in it.
    pub(crate) fn forget_quiet(&mut self) {
        self.quiet = None;
    }
}

struct Descriptor {
    at: u64,
    bytes: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn parse(raw: &[u8; 16]) -> Descriptor {
        let [a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, f0, f1, n0, n1] = *raw;
        Descriptor {
            at: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            bytes: u32::from_le_bytes([b0, b1, b2, b3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        }
    }
}

fn low16_of(count: usize) -> u16 {
    low16(low32(to_u64(count)))
}
