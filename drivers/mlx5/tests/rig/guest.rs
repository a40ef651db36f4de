//! A guest: numbered frames through split rings, checked when they come back.

use super::memory::GuestMemory;
use martlet_vdpa::{Iova, QueueConfig, QueueState};
use std::collections::BTreeSet;

/// Bytes of a queue's part of memory: rings and buffers.
const QUEUE_BYTES: u64 = 1 << 18;
const DESCRIPTORS: u64 = 0;
const DRIVER: u64 = 0x2000;
const DEVICE: u64 = 0x3000;
const BUFFERS: u64 = 0x4000;
const BUFFER_BYTES: u32 = 2048;

/// Size of all queues.
pub(crate) const SIZE: u16 = 64;

struct Ring {
    base: u64,
    available: u16,
    used: u16,
}

impl Ring {
    fn slot(index: u16) -> u64 {
        u64::from(index % SIZE)
    }

    fn offer(&mut self, memory: &GuestMemory, bytes: u32, flags: u16) {
        let number = Ring::slot(self.available);
        let buffer = self.base + BUFFERS + number * u64::from(BUFFER_BYTES);
        let mut raw = buffer.to_le_bytes().to_vec();
        raw.extend(bytes.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend([0; 2]);
        memory.write(self.base + DESCRIPTORS + number * 16, &raw);
        let head = u16::try_from(number).unwrap();
        memory.write(self.base + DRIVER + 4 + number * 2, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        memory.write(self.base + DRIVER + 2, &self.available.to_le_bytes());
    }

    fn buffer(&self, index: u16) -> u64 {
        self.base + BUFFERS + Ring::slot(index) * u64::from(BUFFER_BYTES)
    }

    fn take(&mut self, memory: &GuestMemory) -> Option<(u64, usize)> {
        if u16::from_le_bytes(memory.read(self.base + DEVICE + 2)) == self.used {
            return None;
        }
        let entry: [u8; 8] = memory.read(self.base + DEVICE + 4 + Ring::slot(self.used) * 8);
        self.used = self.used.wrapping_add(1);
        let word = u64::from_le_bytes(entry);
        let head = u16::try_from(word & 0xffff).unwrap();
        Some((self.buffer(head), usize::try_from(word >> 32).unwrap()))
    }
}

struct Pair {
    rx: Ring,
    tx: Ring,
    sent: u32,
    /// Frames that came, by number. On whichever queue: where a frame goes to is decided by the
    /// table of receive queues, which changes.
    received: BTreeSet<u32>,
}

/// A guest with its memory and its queues.
pub(crate) struct Guest {
    pub(crate) memory: GuestMemory,
    /// Frames may come twice.
    pub(crate) takes_repeats: bool,
    pairs: Vec<Pair>,
}

impl Guest {
    /// A guest whose queues stand at `start`.
    pub(crate) fn new(pairs: usize, start: u16) -> Guest {
        let memory = GuestMemory::new(pairs * 2 * usize::try_from(QUEUE_BYTES).unwrap());
        let ring = |number: usize| {
            let base = number as u64 * QUEUE_BYTES;
            memory.write(base + DRIVER + 2, &start.to_le_bytes());
            memory.write(base + DEVICE + 2, &start.to_le_bytes());
            Ring { base, available: start, used: start }
        };
        let pair = |n: usize| Pair {
            rx: ring(2 * n),
            tx: ring(2 * n + 1),
            sent: 0,
            received: BTreeSet::new(),
        };
        let pairs = (0..pairs).map(pair).collect();
        Guest { memory, takes_repeats: false, pairs }
    }

    pub(crate) fn queues(&self) -> u16 {
        u16::try_from(self.pairs.len() * 2).unwrap()
    }

    pub(crate) fn config(&self, queue: u16) -> QueueConfig {
        let base = u64::from(queue) * QUEUE_BYTES;
        QueueConfig {
            size: SIZE,
            descriptors: Iova(base + DESCRIPTORS),
            driver: Iova(base + DRIVER),
            device: Iova(base + DEVICE),
        }
    }

    /// Where the device's ring says that a queue is: that is where the device has to go on.
    pub(crate) fn at(&self, queue: u16) -> QueueState {
        let base = u64::from(queue) * QUEUE_BYTES;
        let used_index = u16::from_le_bytes(self.memory.read(base + DEVICE + 2));
        QueueState { avail_index: used_index, used_index }
    }

    /// Fills receive rings, and puts a frame into each transmit ring that has room, of the first
    /// `pairs` pairs.
    pub(crate) fn offer(&mut self, pairs: usize) {
        for (number, pair) in self.pairs.iter_mut().take(pairs).enumerate() {
            while pair.rx.available.wrapping_sub(pair.rx.used) < SIZE {
                pair.rx.offer(&self.memory, BUFFER_BYTES, 2);
            }
            while pair.tx.take(&self.memory).is_some() {}
            if pair.tx.available.wrapping_sub(pair.tx.used) < SIZE {
                let frame = frame(number, pair.sent);
                let mut bytes = vec![0; 12];
                bytes.extend(&frame);
                self.memory.write(pair.tx.buffer(pair.tx.available), &bytes);
                pair.tx.offer(&self.memory, u32::try_from(bytes.len()).unwrap(), 0);
                pair.sent += 1;
            }
        }
    }

    /// Takes received frames and checks them: none is repeated or damaged. How many.
    pub(crate) fn receive(&mut self) -> u32 {
        let mut count = 0;
        for queue in 0..self.pairs.len() {
            while let Some((buffer, bytes)) = self.pairs[queue].rx.take(&self.memory) {
                let bytes = self.memory.read_vec(buffer, bytes);
                let (pair, number) = parse(&bytes);
                assert_eq!(bytes[12..], frame(pair, number), "a frame of pair {pair}");
                let is_new = self.pairs[pair].received.insert(number);
                assert!(is_new || self.takes_repeats, "frame {number} of pair {pair} came twice");
                count += u32::from(is_new);
            }
        }
        count
    }

    /// Frames that were sent and not received.
    pub(crate) fn missing(&self) -> u32 {
        let missing = |pair: &Pair| pair.sent - u32::try_from(pair.received.len()).unwrap();
        self.pairs.iter().map(missing).sum()
    }
}

/// Which frame it says that it is.
fn parse(bytes: &[u8]) -> (usize, u32) {
    (usize::from(bytes[12]), u32::from_le_bytes(*bytes.last_chunk().unwrap()))
}

fn frame(pair: usize, number: u32) -> Vec<u8> {
    let mut frame = vec![u8::try_from(pair).unwrap(); 14 + (number as usize * 37) % 1000];
    frame.extend(number.to_le_bytes());
    frame
}
