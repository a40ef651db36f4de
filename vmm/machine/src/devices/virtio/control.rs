//! The control queue (virtio 1.3, 5.1.6.5), served by the machine itself.

use crate::memory::GuestMemory;
use martlet_units::Gpa;
use martlet_vdpa::QueueConfig;
use martlet_vdpa::virtio::split::{
    DESCRIPTOR_BYTES, DEVICE_HEADER_BYTES, DRIVER_HEADER_BYTES, NEXT, NO_INTERRUPT, USED_BYTES,
    WRITE,
};
use std::sync::atomic::{Ordering, fence};

/// Longest command that is looked at; one with more bytes is none that is known here.
const COMMAND_BYTES_MAX: u32 = 64;
/// Class and command of the only one that is known: VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET.
const CLASS_MULTI_QUEUE: u8 = 4;
const PAIRS_SET: u8 = 0;
const ANSWER_OK: u8 = 0;
const ANSWER_ERROR: u8 = 1;

/// How far the control queue has come; free-running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ControlIndices {
    pub(super) available: u16,
    pub(super) used: u16,
}

/// What the guest asks of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Use so many pairs.
    SetPairs(u16),
}

/// One chain of descriptors, as far as it matters.
struct Chain {
    head: u16,
    command: Vec<u8>,
    /// Where the answer, one byte, goes.
    answer: Option<Gpa>,
}

/// The queue while it is served.
pub(super) struct Control<'a> {
    pub(super) memory: &'a GuestMemory,
    pub(super) queue: QueueConfig,
    pub(super) indices: &'a mut ControlIndices,
}

impl Control<'_> {
    /// Serves everything that is in the queue by `perform`, which says whether it was done. Returns
    /// whether the guest is to be interrupted; an error says what makes no sense, and then the card
    /// is broken.
    pub(super) fn serve(
        &mut self,
        mut perform: impl FnMut(Command) -> bool,
    ) -> Result<bool, String> {
        let mut served = 0;
        loop {
            let waiting = self.word(self.queue.driver.0 + 2)?.wrapping_sub(self.indices.available);
            // Entries are read after the index that shows them.
            fence(Ordering::Acquire);
            if waiting > self.queue.size {
                return Err(format!("{waiting} commands in a queue of {}", self.queue.size));
            }
            if waiting == 0 || served >= self.queue.size {
                break;
            }
            let chain = self.chain()?;
            let done = parse(&chain.command).is_some_and(&mut perform);
            self.answer(&chain, if done { ANSWER_OK } else { ANSWER_ERROR })?;
            served += 1;
        }
        Ok(served > 0 && self.word(self.queue.driver.0)? & NO_INTERRUPT == 0)
    }

    fn place(&self, ring: u64, header: u64, index: u16, bytes: u64) -> u64 {
        ring + header + u64::from(index % self.queue.size) * bytes
    }

    fn read<const N: usize>(&self, at: u64) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        if self.memory.read(Gpa(at), &mut bytes) {
            Ok(bytes)
        } else {
            Err(format!("{N} bytes at {at:#x} are not memory"))
        }
    }

    fn word(&self, at: u64) -> Result<u16, String> {
        self.read(at).map(u16::from_le_bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        if self.memory.write(Gpa(at), bytes) {
            Ok(())
        } else {
            Err(format!("{} bytes at {at:#x} are not memory", bytes.len()))
        }
    }

    /// Follows the next chain, which has at most as many descriptors as the queue.
    fn chain(&self) -> Result<Chain, String> {
        let at = self.place(self.queue.driver.0, DRIVER_HEADER_BYTES, self.indices.available, 2);
        let head = self.word(at)?;
        let mut chain = Chain { head, command: Vec::new(), answer: None };
        let mut next = head;
        for _ in 0..self.queue.size {
            if next >= self.queue.size {
                return Err(format!("descriptor {next} of {}", self.queue.size));
            }
            let at = self.queue.descriptors.0 + u64::from(next) * DESCRIPTOR_BYTES;
            let address = u64::from_le_bytes(self.read(at)?);
            let length = u32::from_le_bytes(self.read(at + 8)?);
            let flags = self.word(at + 12)?;
            if flags & WRITE != 0 {
                // The answer is the first byte that the card may write.
                chain.answer = chain.answer.or((length > 0).then_some(Gpa(address)));
            } else {
                self.collect(&mut chain.command, address, length)?;
            }
            if flags & NEXT == 0 {
                return Ok(chain);
            }
            next = self.word(at + 14)?;
        }
        Err("descriptors in a circle".into())
    }

    fn collect(&self, command: &mut Vec<u8>, address: u64, length: u32) -> Result<(), String> {
        let known = u32::try_from(command.len()).unwrap_or(COMMAND_BYTES_MAX);
        let take = length.min(COMMAND_BYTES_MAX.saturating_sub(known));
        for offset in 0..u64::from(take) {
            let at = address.checked_add(offset).ok_or("a buffer at the end of all addresses")?;
            command.extend(self.read::<1>(at)?);
        }
        Ok(())
    }

    fn answer(&mut self, chain: &Chain, answer: u8) -> Result<(), String> {
        let written = match chain.answer {
            Some(at) => {
                self.write(at.0, &[answer])?;
                1_u32
            }
            None => 0,
        };
        let at =
            self.place(self.queue.device.0, DEVICE_HEADER_BYTES, self.indices.used, USED_BYTES);
        self.write(at, &u32::from(chain.head).to_le_bytes())?;
        self.write(at + 4, &written.to_le_bytes())?;
        self.indices.available = self.indices.available.wrapping_add(1);
        self.indices.used = self.indices.used.wrapping_add(1);
        // The entry and the answer are there before the index that shows them.
        fence(Ordering::Release);
        self.write(self.queue.device.0 + 2, &self.indices.used.to_le_bytes())
    }
}

fn parse(command: &[u8]) -> Option<Command> {
    match *command {
        [CLASS_MULTI_QUEUE, PAIRS_SET, low, high] => {
            Some(Command::SetPairs(u16::from_le_bytes([low, high])))
        }
        _ => None,
    }
}
