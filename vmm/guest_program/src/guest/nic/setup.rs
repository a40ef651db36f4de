//! Setting a card up: the handshake of virtio 1.3, 3.1.1 and 4.2.3.1, all queues, the number of
//! pairs.

use super::queue::{NEXT, Queue, WRITE};
use super::registers::*;
use super::{Card, pair_queues};
use crate::tsc;

/// Low half of the features: address, link state, control queue, several pairs.
const MAC: u32 = 1 << 5;
const LINK_STATUS: u32 = 1 << 16;
const CONTROL_QUEUE: u32 = 1 << 17;
const MULTI_QUEUE: u32 = 1 << 22;
/// High half.
const VERSION_1: u32 = 1;

/// `struct virtio_net_ctrl` (5.1.6.5): class MQ, command VQ_PAIRS_SET, answer OK.
const CLASS_MULTI_QUEUE: u8 = 4;
const PAIRS_SET: u8 = 0;
const ANSWER_OK: u8 = 0;
const ANSWER_NONE: u8 = 0xff;

/// Descriptors of the control queue.
const CONTROL_SIZE: u64 = 8;
/// Where the command lies behind its rings, and the answer behind it.
const COMMAND_OFFSET: u64 = 2048;
const ANSWER_OFFSET: u64 = COMMAND_OFFSET + 64;
/// How long an answer may take, in cycles: some seconds.
const ANSWER_CYCLES: u64 = 1 << 34;

/// Sets the card up, up to the first receive buffers. Returns whether it took everything.
///
/// # Safety
/// The card and its memory are this vCPU's.
pub unsafe fn set_up(card: &Card) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let registers = card.registers;
        if registers.read(MAGIC_VALUE) != MAGIC
            || registers.read(VERSION) != VERSION_NOT_LEGACY
            || registers.read(DEVICE_ID) != NETWORK_CARD
        {
            return false;
        }
        registers.write(STATUS, 0);
        registers.write(STATUS, ACKNOWLEDGE);
        registers.write(STATUS, ACKNOWLEDGE | DRIVER);
        let Some(has_pairs) = accept_features(registers) else { return false };
        let pairs = (*card.parameters).pairs;
        let max_pairs = if has_pairs { u64::from(registers.read(CONFIG + 8) & 0xffff) } else { 1 };
        if pairs > max_pairs {
            return false;
        }
        let mac = u64::from(registers.read(CONFIG)) | u64::from(registers.read(CONFIG + 4)) << 32;
        (*card.work).mac = mac & 0xffff_ffff_ffff;
        let mut number = 0;
        while number < pairs * 2 {
            if !enable(registers, number, card.queue(number)) {
                return false;
            }
            number += 1;
        }
        let gpa = (*card.parameters).control;
        let control = Queue { at: card.base.at(gpa), gpa, size: CONTROL_SIZE, interrupts: false };
        if has_pairs && !enable(registers, max_pairs * 2, control) {
            return false;
        }
        give_buffers(card);
        registers.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        if registers.read(STATUS) & NEEDS_RESET != 0 {
            return false;
        }
        if pairs > 1 && !set_pairs(card, control, max_pairs * 2) {
            return false;
        }
        let mut pair = 0;
        while pair < pairs {
            let (receive, _) = pair_queues(pair);
            card.queue(receive).kick_if_asked(registers, receive);
            pair += 1;
        }
        true
    }
}

/// Returns whether there are several pairs; `None` if the card refuses.
unsafe fn accept_features(registers: Registers) -> Option<bool> {
    // SAFETY: the caller's promise.
    unsafe {
        registers.write(DEVICE_FEATURES_SELECT, 0);
        let low = registers.read(DEVICE_FEATURES);
        registers.write(DEVICE_FEATURES_SELECT, 1);
        let high = registers.read(DEVICE_FEATURES);
        let has_pairs = low & CONTROL_QUEUE != 0 && low & MULTI_QUEUE != 0;
        let mut wanted = low & (MAC | LINK_STATUS);
        if has_pairs {
            wanted |= CONTROL_QUEUE | MULTI_QUEUE;
        }
        registers.write(DRIVER_FEATURES_SELECT, 0);
        registers.write(DRIVER_FEATURES, wanted);
        registers.write(DRIVER_FEATURES_SELECT, 1);
        registers.write(DRIVER_FEATURES, high & VERSION_1);
        registers.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        let is_ok = high & VERSION_1 != 0 && registers.read(STATUS) & FEATURES_OK != 0;
        if is_ok { Some(has_pairs) } else { None }
    }
}

unsafe fn enable(registers: Registers, number: u64, queue: Queue) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        registers.write(QUEUE_SELECT, number as u32);
        if u64::from(registers.read(QUEUE_SIZE_MAX)) < queue.size
            || registers.read(QUEUE_READY) != 0
        {
            return false;
        }
        registers.write(QUEUE_SIZE, queue.size as u32);
        registers.write_address(QUEUE_DESCRIPTORS, queue.guest_physical(0));
        registers.write_address(QUEUE_DRIVER, queue.guest_physical(queue.driver_offset()));
        registers.write_address(QUEUE_DEVICE, queue.guest_physical(queue.device_offset()));
        registers.write(QUEUE_READY, 1);
        registers.read(QUEUE_READY) == 1
    }
}

/// Gives every receive queue all its buffers, and describes those of the transmit queues, which
/// are sent in the order of their numbers.
unsafe fn give_buffers(card: &Card) {
    // SAFETY: the caller's promise.
    unsafe {
        let parameters = card.parameters;
        let size = (*parameters).queue_size;
        let mut pair = 0;
        while pair < (*parameters).pairs {
            let (receive, transmit) = pair_queues(pair);
            let mut slot = 0;
            while slot < size {
                let (address, space) = card.space(receive, slot);
                card.queue(receive).describe(slot, address, space as u32, WRITE, 0);
                card.queue(receive).offer(slot, slot);
                let (address, _) = card.space(transmit, slot);
                let length = card.frame_and_header_bytes();
                card.queue(transmit).describe(slot, address, length as u32, 0, 0);
                card.queue(transmit).offer(slot, slot);
                slot += 1;
            }
            let state = card.pair(pair);
            (*state).rx_available = size;
            (*state).rx_shown = size;
            card.queue(receive).publish(size);
            card.queue(transmit).publish(0);
            pair += 1;
        }
    }
}

/// Tells the card how many pairs are in use, and waits for its answer.
unsafe fn set_pairs(card: &Card, control: Queue, number: u64) -> bool {
    // SAFETY: the caller's promise; the command lies behind the rings of 8 descriptors.
    unsafe {
        let pairs = (*card.parameters).pairs;
        let command = control.at.wrapping_add(COMMAND_OFFSET as usize);
        let answer = control.at.wrapping_add(ANSWER_OFFSET as usize);
        command.write_volatile(CLASS_MULTI_QUEUE);
        command.add(1).write_volatile(PAIRS_SET);
        command.add(2).write_volatile(pairs as u8);
        command.add(3).write_volatile((pairs >> 8) as u8);
        answer.write_volatile(ANSWER_NONE);
        control.describe(0, control.guest_physical(COMMAND_OFFSET), 4, NEXT, 1);
        control.describe(1, control.guest_physical(ANSWER_OFFSET), 1, WRITE, 0);
        control.offer(0, 0);
        control.publish(1);
        control.kick_if_asked(card.registers, number);
        let begin = tsc();
        while control.used_since(0) == 0 {
            if tsc().wrapping_sub(begin) > ANSWER_CYCLES {
                return false;
            }
            core::hint::spin_loop();
        }
        answer.read_volatile() == ANSWER_OK
    }
}
