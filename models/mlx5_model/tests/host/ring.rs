//! The guest's side of a pair of queues, in a block of memory behind a key.

use super::Host;
use super::objects::QueueSpec;
use martlet_device_io::{Dma, DmaBlock};
use martlet_mlx5_abi::virtq::VirtqState;

/// Bytes of a pair's memory.
pub const PAIR_BYTES: u64 = 1 << 20;

const QUEUE_BYTES: u64 = PAIR_BYTES / 2;
const DESCRIPTORS: u64 = 0;
const DRIVER: u64 = 0x8000;
const DEVICE: u64 = 0xa000;
const BUFFERS: u64 = 0x10000;
pub const BUFFER_BYTES: u32 = 2048;

/// The guest's side of one queue.
pub struct GuestRing {
    /// Where its memory begins, in the block and behind the key.
    base: u64,
    pub index: u16,
    pub size: u16,
    pub available: u16,
    pub used: u16,
}

impl GuestRing {
    pub fn new(index: u16, size: u16, pair: u64, start: u16) -> GuestRing {
        let base = pair * PAIR_BYTES + u64::from(index % 2) * QUEUE_BYTES;
        GuestRing { base, index, size, available: start, used: start }
    }

    /// Writes both indices into the rings, as they are when a guest is taken over.
    pub fn begin(&self, memory: &DmaBlock) {
        self.put(memory, DRIVER + 2, &self.available.to_le_bytes());
        self.put(memory, DEVICE + 2, &self.used.to_le_bytes());
    }

    pub fn spec(&self, key: u32, features: u16) -> QueueSpec {
        QueueSpec {
            index: self.index,
            size: self.size,
            key,
            descriptors: self.base + DESCRIPTORS,
            driver: self.base + DRIVER,
            device: self.base + DEVICE,
            start_index: self.available,
            features,
            counters: 0,
        }
    }

    fn put(&self, memory: &DmaBlock, offset: u64, bytes: &[u8]) {
        memory.write((self.base + offset) as usize, bytes);
    }

    fn get<const N: usize>(&self, memory: &DmaBlock, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        memory.read((self.base + offset) as usize, &mut bytes);
        bytes
    }

    pub fn buffer(&self, number: u16) -> u64 {
        self.base + BUFFERS + u64::from(number) * u64::from(BUFFER_BYTES)
    }

    pub fn describe(
        &self,
        memory: &DmaBlock,
        number: u16,
        at: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&at.to_le_bytes());
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        self.put(memory, DESCRIPTORS + u64::from(number) * 16, &raw);
    }

    /// Offers a chain to the device.
    pub fn offer(&mut self, memory: &DmaBlock, head: u16) {
        let slot = u64::from(self.available % self.size);
        self.put(memory, DRIVER + 4 + slot * 2, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.put(memory, DRIVER + 2, &self.available.to_le_bytes());
    }

    pub fn set_available(&mut self, memory: &DmaBlock, index: u16) {
        self.available = index;
        self.put(memory, DRIVER + 2, &index.to_le_bytes());
    }

    pub fn set_no_interrupt(&self, memory: &DmaBlock, on: bool) {
        self.put(memory, DRIVER, &u16::from(on).to_le_bytes());
    }

    pub fn is_quiet(&self, memory: &DmaBlock) -> bool {
        u16::from_le_bytes(self.get(memory, DEVICE)) & 1 == 1
    }

    /// Offers an empty receive buffer.
    pub fn offer_buffer(&mut self, memory: &DmaBlock) {
        let number = self.available % self.size;
        self.describe(memory, number, self.buffer(number), BUFFER_BYTES, 2, 0);
        self.offer(memory, number);
    }

    /// Offers a frame, in two buffers: the header and the rest.
    pub fn offer_frame(&mut self, memory: &DmaBlock, payload: &[u8]) {
        let half = self.size / 2;
        let number = self.available % half;
        let at = self.buffer(number);
        memory.write(at as usize, &[0; 12]);
        memory.write(at as usize + 12, payload);
        self.describe(memory, number, at, 12, 1, half + number);
        self.describe(memory, half + number, at + 12, payload.len() as u32, 0, 0);
        self.offer(memory, number);
    }

    /// The device's index in the ring.
    pub fn published(&self, memory: &DmaBlock) -> u16 {
        u16::from_le_bytes(self.get(memory, DEVICE + 2))
    }

    /// Takes the next used chain: its head and what was written.
    pub fn take(&mut self, memory: &DmaBlock) -> Option<(u16, u32)> {
        if self.published(memory) == self.used {
            return None;
        }
        let slot = u64::from(self.used % self.size);
        let raw: [u8; 8] = self.get(memory, DEVICE + 4 + slot * 8);
        self.used = self.used.wrapping_add(1);
        let word = u64::from_le_bytes(raw);
        Some((word as u16, (word >> 32) as u32))
    }

    /// Takes the next received frame, without its header.
    pub fn take_frame(&mut self, memory: &DmaBlock) -> Option<Vec<u8>> {
        let (head, bytes) = self.take(memory)?;
        let mut frame = vec![0; bytes as usize];
        memory.read(self.buffer(head) as usize, &mut frame);
        assert_eq!(frame[10..12], [1, 0], "one buffer");
        Some(frame.split_off(12))
    }
}

/// A pair of queues in its guest's memory.
pub struct Pair {
    pub rx: GuestRing,
    pub tx: GuestRing,
    pub rx_id: u32,
    pub tx_id: u32,
    sent: u32,
    received: u32,
}

/// Pairs of queues and the memory that they are in.
pub struct Guest {
    pub memory: DmaBlock,
    pub direct: u32,
    pub key: u32,
    pub pairs: Vec<Pair>,
}

impl Guest {
    /// Makes memory, keys and queues, which are not started.
    pub fn new(host: &mut Host, pairs: u16, size: u16, start: u16) -> Guest {
        Guest::with_features(host, pairs, size, start, 0)
    }

    pub fn with_features(
        host: &mut Host,
        pairs: u16,
        size: u16,
        start: u16,
        features: u16,
    ) -> Guest {
        let bytes = u64::from(pairs) * PAIR_BYTES;
        let memory = host.bus.alloc(bytes as usize, 4096).unwrap();
        let direct = host.direct_key(memory.at().0, bytes);
        let key = host.indirect_key(&[(bytes as u32, direct)]);
        let pairs = (0..pairs)
            .map(|pair| {
                let mut ring = |index| {
                    let ring = GuestRing::new(index, size, u64::from(pair), start);
                    ring.begin(&memory);
                    let id = host.create_queue(&ring.spec(key, features));
                    (ring, id)
                };
                let ((rx, rx_id), (tx, tx_id)) = (ring(pair * 2), ring(pair * 2 + 1));
                Pair { rx, tx, rx_id, tx_id, sent: 0, received: 0 }
            })
            .collect();
        Guest { memory, direct, key, pairs }
    }

    pub fn ids(&self) -> Vec<u32> {
        self.pairs.iter().flat_map(|pair| [pair.rx_id, pair.tx_id]).collect()
    }

    /// Starts or resumes all queues, and kicks them.
    pub fn start(&self, host: &mut Host) {
        for id in self.ids() {
            host.set_state(id, VirtqState::RDY).ok();
        }
        self.kick(host);
    }

    pub fn suspend(&self, host: &mut Host) {
        for id in self.ids() {
            host.set_state(id, VirtqState::SUSPEND).ok();
        }
    }

    pub fn kick(&self, host: &Host) {
        for pair in &self.pairs {
            host.kick(pair.rx.index);
            host.kick(pair.tx.index);
        }
    }

    /// Fills receive rings with buffers.
    pub fn refill(&mut self) {
        for pair in &mut self.pairs {
            while pair.rx.available.wrapping_sub(pair.rx.used) < pair.rx.size {
                pair.rx.offer_buffer(&self.memory);
            }
        }
    }

    /// Puts the next numbered frame into each transmit ring, as long as there is room.
    pub fn send(&mut self) -> u32 {
        let mut count = 0;
        for (number, pair) in self.pairs.iter_mut().enumerate() {
            while pair.tx.take(&self.memory).is_some() {}
            if pair.tx.available.wrapping_sub(pair.tx.used) < pair.tx.size / 2 {
                pair.tx.offer_frame(&self.memory, &payload(number, pair.sent));
                pair.sent += 1;
                count += 1;
            }
        }
        count
    }

    /// Takes received frames and checks that they are the next ones.
    pub fn receive(&mut self) -> u32 {
        let mut count = 0;
        for (number, pair) in self.pairs.iter_mut().enumerate() {
            while let Some(frame) = pair.rx.take_frame(&self.memory) {
                assert_eq!(frame, payload(number, pair.received), "the next frame of its pair");
                pair.received += 1;
                count += 1;
            }
        }
        count
    }

    pub fn missing(&self) -> u32 {
        self.pairs.iter().map(|pair| pair.sent - pair.received).sum()
    }
}

fn payload(pair: usize, number: u32) -> Vec<u8> {
    let mut payload = vec![pair as u8; 14 + (number as usize * 37) % 1400];
    payload.extend(number.to_le_bytes());
    payload
}

impl Host {
    /// Rings a queue's doorbell, and lets the device have a turn.
    pub fn kick(&self, index: u16) {
        self.registers.write32(1 << 20, u32::from(index));
        self.stage.turn_all();
    }
}
