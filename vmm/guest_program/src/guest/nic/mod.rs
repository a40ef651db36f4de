//! Network cards, driven by polling: numbered frames go out on every queue pair, a loopback sends
//! them back, and they are compared. The first pair of a card gets most of them, so that its
//! indices wrap soon; the others a few.
//!
//! A card has its turn about every millisecond, and a tick has room for a few turns, so that the
//! heartbeat stays what it is. What a turn does is bounded: frames by the window, kicks by the
//! pairs it looks at.

mod frame;
mod queue;
mod registers;
mod setup;

use crate::Base;
use crate::abi::{self, NicCounters, NicPair, NicParameters, NicWork, Parameters};
use frame::{Found, LEAD, Label, NET_HEADER_BYTES};
use queue::Queue;
use registers::Registers;

/// Pairs besides the first that are looked at in one turn.
const COLD_POLLS: u64 = 4;
/// Frames sent on pairs besides the first in one turn.
const COLD_SENDS: u64 = 2;
/// Time that counts for credit in one turn, in turns: after a stop nothing is made up for.
const CREDIT_TURNS: u64 = 4;
/// Turns without a frame after which those under way are given up: about four seconds.
const STALL_TURNS: u64 = 4096;

/// Adds to a counter of a card, at once for whoever reads it from outside.
macro_rules! count {
    ($card:expr, $field:ident += $value:expr) => {{
        let counter = &raw mut (*$card.counters).$field;
        counter.write_volatile(counter.read_volatile().wrapping_add($value));
    }};
    ($card:expr, $field:ident = $value:expr) => {
        (&raw mut (*$card.counters).$field).write_volatile($value)
    };
}

/// One card. All it knows is in guest memory.
pub struct Card {
    base: Base,
    parameters: *const NicParameters,
    counters: *mut NicCounters,
    work: *mut NicWork,
    registers: Registers,
}

/// Receive and transmit queue of a pair.
fn pair_queues(pair: u64) -> (u64, u64) {
    (pair * 2, pair * 2 + 1)
}

/// One of the cards of a vCPU.
///
/// # Safety
/// `parameters` is the vCPU's.
unsafe fn card(base: Base, parameters: *const Parameters, index: u64) -> Card {
    // SAFETY: `index` is below the number of cards, which is at most the array's length.
    unsafe {
        let nics = (&raw const (*parameters).nics).cast::<u64>();
        let parameters: *const NicParameters = base.at(nics.add(index as usize).read());
        Card {
            base,
            parameters,
            counters: base.at((*parameters).counters),
            work: base.at((*parameters).work),
            registers: Registers(base.at((*parameters).registers)),
        }
    }
}

/// Sets up all cards of a vCPU.
///
/// # Safety
/// `parameters` is the vCPU's.
pub unsafe fn set_up_all(base: Base, parameters: *const Parameters) {
    // SAFETY: the VMM's parameters name memory and cards that are this vCPU's alone.
    unsafe {
        let mut index = 0;
        while index < (*parameters).nics_count {
            let card = card(base, parameters, index);
            let state = if setup::set_up(&card) { abi::NIC_RUNS } else { abi::NIC_REFUSED };
            count!(card, pairs = (*card.parameters).pairs);
            count!(card, state = state);
            index += 1;
        }
    }
}

/// Gives as many cards their turn as a tick has room for, of those that are due, from `*next` on.
///
/// # Safety
/// `parameters` is the vCPU's, and its cards were set up.
pub unsafe fn take_turns(base: Base, parameters: *const Parameters, next: &mut u64) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut cards = (*parameters).nics_count;
        let mut turns = (*parameters).nic_turns_per_tick;
        while turns > 0 && cards > 0 {
            cards -= 1;
            if *next >= (*parameters).nics_count {
                *next = 0;
            }
            let card = card(base, parameters, *next);
            *next += 1;
            let runs = (&raw const (*card.counters).state).read_volatile() == abi::NIC_RUNS;
            if runs && card.turn() {
                turns -= 1;
            }
        }
    }
}

impl Card {
    fn queue(&self, number: u64) -> Queue {
        // SAFETY: the parameters are this card's.
        unsafe {
            let at = (*self.parameters).rings + number * (*self.parameters).ring_stride;
            let size = (*self.parameters).queue_size;
            // One queue interrupts, though nobody listens: a driver on the other side has no other
            // sign of when frames are served.
            Queue { at: self.base.at(at), gpa: at, size, interrupts: number == 0 }
        }
    }

    fn pair(&self, pair: u64) -> *mut NicPair {
        // SAFETY: as above.
        unsafe { self.base.at((*self.parameters).pair_states + pair * size_of::<NicPair>() as u64) }
    }

    /// Guest physical address of a queue's buffer.
    fn buffer(&self, queue: u64, slot: u64) -> u64 {
        // SAFETY: as above.
        unsafe {
            let index = queue * (*self.parameters).queue_size + slot;
            (*self.parameters).buffers + index * (*self.parameters).buffer_bytes
        }
    }

    /// What the card is given of a buffer: guest physical address and length.
    fn space(&self, queue: u64, slot: u64) -> (u64, u64) {
        // SAFETY: as above.
        let bytes = unsafe { (*self.parameters).buffer_bytes };
        (self.buffer(queue, slot) + LEAD, bytes - LEAD)
    }

    fn frame_and_header_bytes(&self) -> u64 {
        // SAFETY: as above.
        NET_HEADER_BYTES + unsafe { (*self.parameters).frame_bytes }
    }

    /// Takes what came, gives up what does not come, sends what is due. Returns whether it was time
    /// for that.
    unsafe fn turn(&self) -> bool {
        // SAFETY: the card and its memory are this vCPU's.
        unsafe {
            let (parameters, work) = (&*self.parameters, self.work);
            let now = crate::tsc();
            let elapsed = now.wrapping_sub((*work).last_turn);
            if elapsed < parameters.turn_cycles {
                return false;
            }
            (*work).last_turn = now;
            (*work).turns += 1;
            let elapsed = min(elapsed, parameters.turn_cycles * CREDIT_TURNS);
            let limit = parameters.window << 32;
            (*work).hot_credit = min((*work).hot_credit + elapsed * parameters.hot_rate, limit);
            (*work).cold_credit = min((*work).cold_credit + elapsed * parameters.cold_rate, limit);
            self.look_at(0);
            self.look_at_others();
            let sent = self.send(0, (*work).hot_credit >> 32);
            (*work).hot_credit -= sent << 32;
            self.send_on_others();
            true
        }
    }

    unsafe fn look_at_others(&self) {
        // SAFETY: as in `turn`.
        unsafe {
            let (pairs, work) = ((*self.parameters).pairs, self.work);
            let mut left = min(COLD_POLLS, pairs - 1);
            while left > 0 {
                (*work).cold_poll += 1;
                if (*work).cold_poll >= pairs {
                    (*work).cold_poll = 1;
                }
                self.look_at((*work).cold_poll);
                left -= 1;
            }
        }
    }

    unsafe fn send_on_others(&self) {
        // SAFETY: as in `turn`.
        unsafe {
            let (pairs, work) = ((*self.parameters).pairs, self.work);
            let mut left = min(COLD_SENDS, pairs - 1);
            while left > 0 && (*work).cold_credit >> 32 > 0 {
                (*work).cold_send += 1;
                if (*work).cold_send >= pairs {
                    (*work).cold_send = 1;
                }
                (*work).cold_credit -= self.send((*work).cold_send, 1) << 32;
                left -= 1;
            }
        }
    }

    /// Sends at most `wanted` frames on a pair and returns how many.
    unsafe fn send(&self, number: u64, wanted: u64) -> u64 {
        // SAFETY: as in `turn`.
        unsafe {
            let (parameters, pair) = (&*self.parameters, self.pair(number));
            let under_way = (*pair).next_sequence.wrapping_sub((*pair).expected);
            let in_queue = (*pair).tx_available - (*pair).tx_used;
            let room = min(
                parameters.window.saturating_sub(under_way),
                parameters.queue_size.saturating_sub(in_queue),
            );
            let frames = min(wanted, room);
            if frames == 0 {
                return 0;
            }
            if under_way == 0 {
                (*pair).progress_turn = (*self.work).turns;
            }
            let (_, transmit) = pair_queues(number);
            let queue = self.queue(transmit);
            let before = (*pair).tx_available;
            let mut left = frames;
            while left > 0 {
                let slot = (*pair).tx_available & (parameters.queue_size - 1);
                let label = Label {
                    card: parameters.number,
                    pair: number,
                    sequence: (*pair).next_sequence,
                };
                let buffer = self.base.at(self.buffer(transmit, slot));
                frame::write(buffer, parameters.frame_bytes, (*self.work).mac, label);
                (*pair).next_sequence += 1;
                (*pair).tx_available += 1;
                left -= 1;
            }
            count!(self, sent += frames);
            count!(self, index_wraps += ((*pair).tx_available >> 16) - (before >> 16));
            queue.publish((*pair).tx_available);
            if queue.kick_if_asked(self.registers, transmit) {
                count!(self, kicks += 1);
            }
            frames
        }
    }

    /// Takes back what the card has used of a pair.
    unsafe fn look_at(&self, number: u64) {
        // SAFETY: as in `turn`.
        unsafe {
            let pair = self.pair(number);
            self.take_sent(number, pair);
            let came = self.take_received(number, pair);
            let (turns, under_way) =
                ((*self.work).turns, (*pair).next_sequence.wrapping_sub((*pair).expected));
            if came || under_way == 0 {
                (*pair).progress_turn = turns;
            } else if turns - (*pair).progress_turn > STALL_TURNS {
                count!(self, stalls += 1);
                count!(self, lost += under_way);
                (*pair).expected = (*pair).next_sequence;
            }
        }
    }

    unsafe fn take_sent(&self, number: u64, pair: *mut NicPair) {
        // SAFETY: as in `turn`.
        unsafe {
            let (_, transmit) = pair_queues(number);
            let (queue, size) = (self.queue(transmit), (*self.parameters).queue_size);
            let mut left = queue.used_since((*pair).tx_used);
            if left > (*pair).tx_available - (*pair).tx_used {
                // More than was given to it.
                count!(self, damaged += 1);
                return;
            }
            while left > 0 {
                // Frames leave in the order in which they were given.
                if queue.used_entry((*pair).tx_used).0 != (*pair).tx_used & (size - 1) {
                    count!(self, damaged += 1);
                }
                (*pair).tx_used += 1;
                left -= 1;
            }
        }
    }

    /// Compares what was received and gives the buffers back. Returns whether there was anything.
    unsafe fn take_received(&self, number: u64, pair: *mut NicPair) -> bool {
        // SAFETY: as in `turn`.
        unsafe {
            let (receive, _) = pair_queues(number);
            let (queue, size) = (self.queue(receive), (*self.parameters).queue_size);
            let came = queue.used_since((*pair).rx_used);
            if came > (*pair).rx_available - (*pair).rx_used {
                count!(self, damaged += 1);
                return false;
            }
            let mut left = came;
            while left > 0 {
                let (slot, bytes) = queue.used_entry((*pair).rx_used);
                (*pair).rx_used += 1;
                left -= 1;
                if slot >= size {
                    count!(self, damaged += 1);
                    continue;
                }
                self.compare(receive, slot, bytes);
                queue.offer((*pair).rx_available, slot);
                (*pair).rx_available += 1;
            }
            // Some together, for each may cost a kick. The card still has three quarters of them,
            // and the window is half of them.
            if (*pair).rx_available - (*pair).rx_shown > size / 4 {
                (*pair).rx_shown = (*pair).rx_available;
                queue.publish((*pair).rx_available);
                if queue.kick_if_asked(self.registers, receive) {
                    count!(self, kicks += 1);
                }
            }
            came > 0
        }
    }

    /// Compares a frame with what its pair waits for, which may have been sent on another one.
    unsafe fn compare(&self, queue: u64, slot: u64, bytes: u64) {
        // SAFETY: as in `turn`.
        unsafe {
            let parameters = &*self.parameters;
            let buffer = self.base.at(self.buffer(queue, slot));
            let found = frame::read(buffer, parameters.frame_bytes);
            let label = match found {
                Found::Good(label)
                    if label.card == parameters.number
                        && label.pair < parameters.pairs
                        && bytes == self.frame_and_header_bytes() =>
                {
                    label
                }
                _ => {
                    count!(self, damaged += 1);
                    return;
                }
            };
            let pair = self.pair(label.pair);
            let expected = (*pair).expected;
            if label.sequence < expected {
                count!(self, repeated += 1);
                return;
            }
            if label.sequence >= (*pair).next_sequence {
                // Never sent.
                count!(self, damaged += 1);
                return;
            }
            count!(self, lost += label.sequence - expected);
            count!(self, received += 1);
            (*pair).expected = label.sequence + 1;
            (*pair).progress_turn = (*self.work).turns;
        }
    }
}

fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
