//! The driver's side of an event queue.

use martlet_device_io::{Dma, DmaBlock, DmaError, Registers};
use martlet_mlx5_abi::capability::GeneralCapabilities;
use martlet_mlx5_abi::event::{
    self, CreateEqIn, EVENT_BYTES, EventEntry, EventType, OWNER_INITIAL, OWNER_OFFSET,
};
use martlet_mlx5_abi::init_segment::{UAR_EQ_ARM, UAR_PAGE_BYTES, eq_doorbell};
use martlet_mlx5_abi::message::InHeader;
use martlet_mlx5_abi::{Opcode, U24, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// log2 of the entries. All 32 commands may end with an event each; the rest is for page requests
/// and link changes, which are few.
const LOG_ENTRIES: u8 = 8;
const ENTRIES: usize = 1 << LOG_ENTRIES;
const RING_BYTES: usize = ENTRIES * EVENT_BYTES;
/// log2 of a page of the ring, less 12: one page of the size of the ring.
const LOG_PAGE_LESS_12: u8 = LOG_ENTRIES + 6 - 12;

/// What there is to know after events were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Commands that are done.
    pub(super) commands: u32,
    /// Pages that the firmware wants (or gives, if negative), by function.
    pub(super) pages: Vec<(u16, i32)>,
    /// The link may have changed.
    pub(super) link: bool,
}

/// An event queue in this driver's memory.
#[derive(Debug)]
pub(super) struct EventQueue {
    ring: DmaBlock,
    uar: u32,
    eqn: u8,
    /// Free-running: how many events were read.
    consumer: u32,
}

impl EventQueue {
    /// A ring that no device knows yet.
    pub(super) fn new(dma: &dyn Dma, uar: u32) -> Result<EventQueue, DmaError> {
        let ring = dma.alloc(RING_BYTES, RING_BYTES)?;
        for index in 0..ENTRIES {
            ring.store8(index * EVENT_BYTES + OWNER_OFFSET, OWNER_INITIAL);
        }
        Ok(EventQueue { ring, uar, eqn: 0, consumer: 0 })
    }

    /// The input of the command that makes it known to the device.
    pub(super) fn create_input(&self, function: &GeneralCapabilities) -> Vec<u8> {
        let mut input = CreateEqIn::new_zeroed();
        input.header = InHeader::new(Opcode::CREATE_EQ, 0);
        input.context.log_size = LOG_ENTRIES;
        input.context.uar_page = U24::new(self.uar);
        input.context.log_page_size = LOG_PAGE_LESS_12;
        let kinds = [EventType::COMMAND, EventType::PAGE_REQUEST, EventType::PORT_CHANGE];
        // Who may not ask for a kind is refused the whole queue (Linux `eq.c`,
        // `gather_async_events_mask`).
        let vports = function.manages_vports().then_some(EventType::NIC_VPORT_CHANGE);
        let mask = kinds.iter().chain(&vports).fold(0, |mask, kind| mask | kind.mask());
        input.event_bitmask[0] = U64::new(mask);
        let page = U64::new(self.ring.at().0);
        [input.as_bytes(), page.as_bytes()].concat()
    }

    /// The device knows it by this number.
    pub(super) fn set_number(&mut self, eqn: u8) {
        self.eqn = eqn;
    }

    /// Reads the events that are there, one ring's worth at most: a device that never stops
    /// writing shall not keep its driver. Arms the queue again.
    pub(super) fn drain(&mut self, registers: &dyn Registers) -> News {
        let mut news = News::default();
        let before = self.consumer;
        for _ in 0..ENTRIES {
            let offset = (self.consumer as usize % ENTRIES) * EVENT_BYTES;
            // Pairs with the device's release of the owner: the rest of the entry is there.
            let owner = self.ring.load8(offset + OWNER_OFFSET);
            if !event::is_for_software(owner, self.consumer, LOG_ENTRIES) {
                break;
            }
            let mut bytes = [0; EVENT_BYTES];
            self.ring.read(offset, &mut bytes);
            let entry = EventEntry::read_from_bytes(&bytes).expect("as long as an entry");
            news.add(&entry);
            self.consumer = self.consumer.wrapping_add(1);
        }
        if self.consumer != before {
            self.arm(registers);
        }
        news
    }

    /// Tells the device how far the driver has read, and that the next event shall interrupt.
    pub(super) fn arm(&self, registers: &dyn Registers) {
        let register = u64::from(self.uar) * UAR_PAGE_BYTES + UAR_EQ_ARM;
        registers.write32(register, eq_doorbell(self.eqn, self.consumer).to_be());
    }
}

impl News {
    fn add(&mut self, entry: &EventEntry) {
        match EventType(entry.kind) {
            EventType::COMMAND => self.commands |= entry.data0.get(),
            EventType::PAGE_REQUEST => {
                let [.., high, low] = entry.data0.get().to_be_bytes();
                let function = u16::from_be_bytes([high, low]);
                self.pages.push((function, entry.data1.get().cast_signed()));
            }
            EventType::PORT_CHANGE | EventType::NIC_VPORT_CHANGE => self.link = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_device_io::{BusAddress, BusMemory};
    use martlet_soft_bus::{Addressing, SoftBus};
    use std::sync::Mutex;

    #[derive(Default)]
    struct Doorbells(Mutex<Vec<(u64, u32)>>);

    impl Registers for Doorbells {
        fn read32(&self, _: u64) -> u32 {
            0
        }
        fn write32(&self, offset: u64, value: u32) {
            self.0.lock().unwrap().push((offset, u32::from_be(value)));
        }
        fn read64(&self, _: u64) -> u64 {
            0
        }
        fn write64(&self, _: u64, _: u64) {}
    }

    /// `gather_async_events_mask`: bits 0x0a, 0x0b and 9 for everybody, 0x0d for managers of vports.
    #[test]
    fn a_function_asks_for_the_events_that_it_may_have() {
        let bus = SoftBus::new(Addressing::Iommu);
        let queue = EventQueue::new(&*bus, 3).unwrap();
        let mut function = GeneralCapabilities::new_zeroed();
        for (manages, mask) in [(0, 0x0c00_u64 | 1 << 9), (0x80, 0x2c00 | 1 << 9)] {
            function.vport_group_manager = manages;
            let input = queue.create_input(&function);
            let found = u64::from_be_bytes(input[0x58..0x60].try_into().unwrap());
            assert_eq!(found, mask, "{found:#x}");
        }
    }

    #[test]
    fn events_are_read_once_around_the_ring_and_again() {
        let bus = SoftBus::new(Addressing::Iommu);
        let mut queue = EventQueue::new(&*bus, 3).unwrap();
        queue.set_number(9);
        let doorbells = Doorbells::default();
        assert_eq!(queue.drain(&doorbells), News::default());
        let ring = queue.ring.at().0;
        let write = |index: u32| {
            let mut entry = EventEntry::new_zeroed();
            entry.kind = EventType::COMMAND.0;
            entry.data0 = martlet_mlx5_abi::U32::new(1 << (index % 32));
            entry.owner = event::owner_at(index, LOG_ENTRIES);
            let at = ring + u64::from(index % 256) * 64;
            bus.write(BusAddress(at), entry.as_bytes()).unwrap();
        };
        for index in 0..300_u32 {
            write(index);
        }
        // The device has overrun the ring: entries 0..44 are of its second walk, and not read.
        let news = queue.drain(&doorbells);
        assert_eq!(news.commands, 0, "an overrun ring does not look like events");
        for index in 0..256 {
            write(index);
        }
        assert_eq!(queue.drain(&doorbells).commands, u32::MAX);
        assert_eq!(queue.consumer, 256);
        assert_eq!(doorbells.0.lock().unwrap()[..], [(3 * 4096 + 0x40, 0x0900_0100)]);
    }
}
