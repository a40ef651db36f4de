//! Mailboxes: DMA memory for messages that are longer than an entry, with a limit.

use martlet_device_io::{BusAddress, Dma, DmaBlock};
use martlet_mlx5_abi::command::{
    MAILBOX_ALIGN, MAILBOX_BYTES, MAILBOX_CONTROL_OFFSET, MAILBOX_DATA_BYTES, MailboxControl,
};
use martlet_mlx5_abi::{U32, U64};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Mailboxes in a piece of DMA memory; one bit of a word each.
const CHUNK_MAILBOXES: usize = 64;
const CHUNK_BYTES: usize = CHUNK_MAILBOXES * MAILBOX_ALIGN;

/// Chunks that are kept when nothing needs them: enough for a batch of virtqueue commands.
const CHUNKS_KEPT: usize = 1;

/// Mailboxes that belong to one message, in its order.
#[derive(Debug, Default)]
pub(crate) struct Chain(Vec<Place>);

/// Where a mailbox is.
#[derive(Clone, Copy, Debug)]
struct Place {
    chunk: usize,
    index: usize,
}

impl Place {
    fn offset(self) -> usize {
        self.index * MAILBOX_ALIGN
    }
}

struct Chunk {
    memory: DmaBlock,
    free: u64,
}

/// A pool of mailboxes. Grows by 64 KiB up to its limit, and gives back what is not in use when
/// [`MailboxPool::trim`] is called.
pub(crate) struct MailboxPool {
    dma: Arc<dyn Dma>,
    chunks: Vec<Chunk>,
    chunks_max: usize,
    used: usize,
}

impl MailboxPool {
    /// An empty pool of at most `bytes_max` bytes of DMA memory, but at least one chunk.
    pub(crate) fn new(dma: Arc<dyn Dma>, bytes_max: usize) -> MailboxPool {
        let chunks_max = (bytes_max / CHUNK_BYTES).max(1);
        MailboxPool { dma, chunks: Vec::new(), chunks_max, used: 0 }
    }

    /// Takes `count` mailboxes; `None` if there are not as many, and no memory for more.
    pub(crate) fn take(&mut self, count: usize) -> Option<Chain> {
        while self.chunks.len() * CHUNK_MAILBOXES - self.used < count {
            if self.chunks.len() >= self.chunks_max {
                return None;
            }
            let memory = self.dma.alloc(CHUNK_BYTES, MAILBOX_ALIGN).ok()?;
            self.chunks.push(Chunk { memory, free: u64::MAX });
        }
        let mut places = Vec::with_capacity(count);
        for (chunk, entry) in self.chunks.iter_mut().enumerate() {
            while entry.free != 0 && places.len() < count {
                let index = entry.free.trailing_zeros() as usize;
                entry.free &= !(1 << index);
                places.push(Place { chunk, index });
            }
        }
        assert_eq!(places.len(), count, "the free mailboxes were counted");
        self.used += count;
        Some(Chain(places))
    }

    /// Gives mailboxes back, that the device does not use any more.
    pub(crate) fn give(&mut self, chain: &Chain) {
        for place in &chain.0 {
            let free = &mut self.chunks[place.chunk].free;
            assert_eq!(*free >> place.index & 1, 0, "a mailbox is given back once");
            *free |= 1 << place.index;
        }
        self.used -= chain.0.len();
    }

    /// Gives memory back to the host that nothing has needed lately.
    pub(crate) fn trim(&mut self) {
        while self.chunks.len() > CHUNKS_KEPT
            && self.chunks.last().is_some_and(|chunk| chunk.free == u64::MAX)
        {
            self.chunks.pop();
        }
    }

    fn at(&self, place: Place) -> BusAddress {
        BusAddress(self.chunks[place.chunk].memory.at().0 + place.offset() as u64)
    }

    /// Where the device finds the first mailbox; zero for an empty chain.
    pub(crate) fn first(&self, chain: &Chain) -> u64 {
        chain.0.first().map_or(0, |place| self.at(*place).0)
    }

    /// Writes the control part of every mailbox: numbers, token, and where the next one is.
    pub(crate) fn link(&self, chain: &Chain, token: u8) {
        for (number, place) in chain.0.iter().enumerate() {
            let next = chain.0.get(number + 1).map_or(0, |next| self.at(*next).0);
            let number = u32::try_from(number).expect("messages have a limit");
            let control = MailboxControl {
                next: U64::new(next),
                block_number: U32::new(number),
                reserved: 0,
                token,
                control_signature: 0,
                signature: 0,
            };
            let offset = place.offset() + MAILBOX_CONTROL_OFFSET;
            self.chunks[place.chunk].memory.write(offset, control.as_bytes());
        }
    }

    /// Clears the data of every mailbox, so that an answer that is cut short reads as zeros.
    pub(crate) fn clear(&self, chain: &Chain) {
        for place in &chain.0 {
            let memory = &self.chunks[place.chunk].memory;
            memory.clear(place.offset(), MAILBOX_CONTROL_OFFSET);
        }
    }

    /// Writes the data of one mailbox from its begin.
    pub(crate) fn write_data(&self, chain: &Chain, number: usize, data: &[u8]) {
        assert!(data.len() <= MAILBOX_DATA_BYTES, "data fits a mailbox");
        let place = chain.0[number];
        self.chunks[place.chunk].memory.write(place.offset(), data);
    }

    /// Reads the data of one mailbox from its begin.
    pub(crate) fn read_data(&self, chain: &Chain, number: usize, into: &mut [u8]) {
        assert!(into.len() <= MAILBOX_DATA_BYTES, "data fits a mailbox");
        let place = chain.0[number];
        self.chunks[place.chunk].memory.read(place.offset(), into);
    }
}

const _: () = assert!(MAILBOX_BYTES <= MAILBOX_ALIGN);
