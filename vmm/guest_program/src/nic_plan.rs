//! What the program's network cards take of guest memory.
//!
//! ```text
//! | counters of all cards | per card: parameters, work, pair states, control queue, rings, buffers |
//! ```
//! All of a card is written by the vCPU that drives it, and by the card.

use crate::abi::{NIC_PAIRS_MAX, NicCounters, NicPair, NicParameters, NicWork};
use crate::params::ProgramParams;
use crate::plan::{NicPlace, Words, address, bytes_of, narrow};
use martlet_units::{Gpa, PAGE_SIZE};
use std::mem::size_of;
use std::time::Duration;

/// Descriptors of each queue, where the card has as many.
const QUEUE_SIZE: u16 = 128;
/// Least time between two turns of a card.
const TURN: Duration = Duration::from_millis(1);
/// One of so many frames goes out on a pair that is not the first: each of those costs a kick, and
/// dirties pages of its own.
const COLD_SHARE: u128 = 64;
/// Bytes of a buffer that are not the frame: see `guest/nic/frame.rs`.
const BUFFER_LEAD: u64 = 4 + 12;
/// Parameters, work, pair states, control queue.
const FIXED_PAGES: u64 = 4;

const _: () = assert!(size_of::<NicParameters>() as u64 <= PAGE_SIZE);
const _: () = assert!(size_of::<NicCounters>() as u64 <= PAGE_SIZE);
const _: () = assert!(size_of::<NicWork>() as u64 <= PAGE_SIZE);
const _: () = assert!((size_of::<NicPair>() * NIC_PAIRS_MAX) as u64 <= PAGE_SIZE);

/// Page numbers, counted over the memory that there is.
pub(crate) struct NicsShape {
    start: u64,
    nics: Vec<NicShape>,
    end: u64,
}

struct NicShape {
    place: NicPlace,
    start: u64,
    pairs: u64,
    queue_size: u64,
    window: u64,
    ring_pages: u64,
    buffer_bytes: u64,
    buffers_pages: u64,
}

impl NicsShape {
    /// The cards' memory from page `start` on.
    pub(crate) fn new(start: u64, places: &[NicPlace], params: &ProgramParams) -> NicsShape {
        let mut end = start + places.len() as u64;
        let nics = places
            .iter()
            .map(|place| {
                let nic = NicShape::new(end, *place, params);
                end = nic.end();
                nic
            })
            .collect();
        NicsShape { start, nics, end }
    }

    /// One past the last page.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn count(&self) -> u64 {
        self.nics.len() as u64
    }

    /// The first card's counters; the others' are in the pages behind it.
    pub(crate) fn counters(&self) -> u64 {
        self.start
    }

    /// Pages of the parameters of the cards that a vCPU drives.
    pub(crate) fn of_vcpu(&self, vcpu: u64, vcpus: u64) -> Vec<u64> {
        let cards = (0..).zip(&self.nics);
        cards.filter(|(card, _)| card % vcpus == vcpu).map(|(_, nic)| nic.start).collect()
    }

    /// How many of so many cards must have their turn in a tick.
    pub(crate) fn turns_per_tick(cards: usize, tick: Duration) -> u64 {
        let due = (cards as u128 * tick.as_nanos()).div_ceil(TURN.as_nanos());
        narrow(due.min(cards as u128))
    }

    /// What the VMM writes: the cards' parameters.
    pub(crate) fn writes(&self, params: &ProgramParams, tsc_khz: u32) -> Vec<(Gpa, Vec<u8>)> {
        let cycles_per_ms = u128::from(tsc_khz);
        let per_card = params.nic.frames_per_ms(params.tick) / (self.nics.len() as u128).max(1);
        let write = |(number, nic): (u64, &NicShape)| {
            let cold = if nic.pairs > 1 { per_card / COLD_SHARE } else { 0 };
            let parameters = NicParameters {
                counters: address(self.start + number).0,
                number,
                turn_cycles: narrow(TURN.as_millis() * cycles_per_ms),
                hot_rate: narrow((per_card - cold) / cycles_per_ms),
                cold_rate: narrow(cold / cycles_per_ms),
                frame_bytes: params.nic.frame.0,
                ..nic.parameters()
            };
            (address(nic.start), bytes_of(&parameters))
        };
        (0..).zip(&self.nics).map(write).collect()
    }
}

impl NicShape {
    fn new(start: u64, place: NicPlace, params: &ProgramParams) -> NicShape {
        let pairs = u64::from(place.pairs).min(NIC_PAIRS_MAX as u64);
        let queue_size = u64::from(place.queue_size_max.min(QUEUE_SIZE));
        // Descriptors, driver's and device's ring: see `guest/nic/queue.rs`.
        let ring_bytes =
            (16 * queue_size + 6 + 2 * queue_size).next_multiple_of(4) + 6 + 8 * queue_size;
        let buffer_bytes = (params.nic.frame.0 + BUFFER_LEAD).next_power_of_two();
        NicShape {
            place,
            start,
            pairs,
            queue_size,
            window: u64::from(params.nic.window).min(queue_size / 2).max(1),
            ring_pages: ring_bytes.div_ceil(PAGE_SIZE),
            buffer_bytes,
            buffers_pages: (queue_size * buffer_bytes * pairs * 2).div_ceil(PAGE_SIZE),
        }
    }

    fn rings(&self) -> u64 {
        self.start + FIXED_PAGES
    }

    fn buffers(&self) -> u64 {
        self.rings() + self.pairs * 2 * self.ring_pages
    }

    fn end(&self) -> u64 {
        self.buffers() + self.buffers_pages
    }

    /// What follows from the card alone.
    fn parameters(&self) -> NicParameters {
        NicParameters {
            registers: self.place.registers.0,
            counters: 0,
            work: address(self.start + 1).0,
            pair_states: address(self.start + 2).0,
            control: address(self.start + 3).0,
            rings: address(self.rings()).0,
            ring_stride: self.ring_pages * PAGE_SIZE,
            buffers: address(self.buffers()).0,
            buffer_bytes: self.buffer_bytes,
            number: 0,
            pairs: self.pairs,
            queue_size: self.queue_size,
            frame_bytes: 0,
            window: self.window,
            turn_cycles: 0,
            hot_rate: 0,
            cold_rate: 0,
        }
    }
}

impl Words for NicParameters {
    fn words(&self) -> Vec<u64> {
        let words = vec![
            self.registers,
            self.counters,
            self.work,
            self.pair_states,
            self.control,
            self.rings,
            self.ring_stride,
            self.buffers,
            self.buffer_bytes,
            self.number,
            self.pairs,
            self.queue_size,
            self.frame_bytes,
            self.window,
            self.turn_cycles,
            self.hot_rate,
            self.cold_rate,
        ];
        assert_eq!(words.len() * 8, size_of::<NicParameters>(), "every field is listed");
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cards(count: usize, pairs: u16) -> Vec<NicPlace> {
        vec![NicPlace { registers: Gpa(0xd000_0000), pairs, queue_size_max: 256 }; count]
    }

    #[test]
    fn four_cards_of_sixteen_pairs_take_few_of_64_mebibytes() {
        let shape = NicsShape::new(300, &cards(4, 16), &ProgramParams::default());
        let pages = shape.end() - 300;
        // A ring a page, 128 buffers of 256 bytes 8 pages, for 32 queues.
        assert_eq!(pages, 4 * (1 + FIXED_PAGES + 32 * 9));
    }

    #[test]
    fn cards_are_divided_among_vcpus() {
        let shape = NicsShape::new(300, &cards(4, 1), &ProgramParams::default());
        assert_eq!(shape.of_vcpu(0, 3).len(), 2);
        assert_eq!((shape.of_vcpu(1, 3).len(), shape.of_vcpu(2, 3).len()), (1, 1));
        assert_eq!(shape.of_vcpu(7, 8), Vec::<u64>::new());
        let tick = Duration::from_micros(200);
        assert_eq!([0, 1, 4, 8].map(|n| NicsShape::turns_per_tick(n, tick)), [0, 1, 1, 2]);
        assert_eq!(NicsShape::turns_per_tick(3, Duration::from_secs(1)), 3);
    }

    #[test]
    fn a_small_card_and_a_large_window_agree() {
        let params: ProgramParams = "fill=4M,window=1000".parse().unwrap();
        let place = NicPlace { queue_size_max: 16, ..cards(1, 1)[0] };
        let shape = NicsShape::new(0, &[place], &params);
        assert_eq!((shape.nics[0].queue_size, shape.nics[0].window), (16, 8));
    }
}
