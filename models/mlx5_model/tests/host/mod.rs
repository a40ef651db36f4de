//! A tiny driver for tests: writes commands as bytes, and knows nothing of the model.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod objects;
pub mod ring;

use martlet_device_io::{BusAddress, Dma, DmaBlock, Registers, Waiter};
use martlet_mlx5_abi::command::{
    CommandEntry, ENTRY_BYTES, ENTRY_TYPE, INLINE_BYTES, MAILBOX_ALIGN, MAILBOX_CONTROL_OFFSET,
    MAILBOX_DATA_BYTES, MailboxControl, OWNED_BY_DEVICE, STATUS_OWN_OFFSET, delivery_status,
    mailboxes_for,
};
use martlet_mlx5_abi::event::{
    CreateEqIn, CreateEqOut, EVENT_BYTES, EventEntry, EventType, OWNER_INITIAL, OWNER_OFFSET,
    is_for_software,
};
use martlet_mlx5_abi::init_segment::{
    CMDQ_ADDR_HIGH, CMDQ_ADDR_LOW, COMMAND_DOORBELL, UAR_EQ_ARM, UAR_PAGE_BYTES, eq_doorbell,
};
use martlet_mlx5_abi::message::{InHeader, OutHeader, ShortIn, ShortOut};
use martlet_mlx5_abi::setup::{
    ISSI, MANAGE_PAGES_GIVE, PagesIn, QUERY_PAGES_INIT, QueryPagesOut, SetIssiIn,
};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode, U16, U24, U32, U64};
use martlet_mlx5_model::{Model, ModelConfig};
use martlet_soft_bus::{Addressing, Seat, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const SLOTS: usize = 32;
const LOG_EVENTS: u8 = 5;

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub delivery: DeliveryStatus,
    pub output: Vec<u8>,
    pub token: u8,
    pub token_now: u8,
}

impl Reply {
    pub fn status(&self) -> CommandStatus {
        OutHeader::read_from_prefix(&self.output).unwrap().0.status()
    }

    pub fn ok(self) -> Vec<u8> {
        assert_eq!(self.delivery, DeliveryStatus::OK);
        assert_eq!(self.status(), CommandStatus::OK, "{:?}", self.output);
        self.output
    }

    pub fn parse<T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable>(self) -> T {
        T::read_from_prefix(&self.ok()).unwrap().0
    }
}

/// A command that was written.
pub struct Sent {
    pub slot: usize,
    token: u8,
    out_bytes: usize,
    boxes: Vec<DmaBlock>,
    out_boxes: Vec<DmaBlock>,
}

/// One device with its driver's memory.
pub struct Host {
    pub bus: Arc<SoftBus>,
    pub stage: Arc<Stage>,
    pub model: Arc<Model>,
    pub seat: Arc<Seat>,
    pub registers: Arc<dyn Registers>,
    page: DmaBlock,
    pages: Vec<DmaBlock>,
    pub events: DmaBlock,
    event_index: u32,
    eqn: Option<u8>,
    uar: u32,
    token: u8,
    pub domain: u32,
    busy: u32,
}

impl Host {
    /// A device in virtual time whose driver has not begun.
    pub fn cold(config: ModelConfig) -> Host {
        let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
        Host::on(&stage, &SoftBus::new(Addressing::Iommu), config)
    }

    /// As [`Host::cold`], beside others.
    pub fn on(stage: &Arc<Stage>, bus: &Arc<SoftBus>, config: ModelConfig) -> Host {
        let model = Model::new(config, Arc::clone(bus) as _, stage.clock());
        let seat = stage.seat(Arc::clone(&model) as _);
        let page = bus.alloc(4096, 4096).unwrap();
        let events = bus.alloc(EVENT_BYTES << LOG_EVENTS, 4096).unwrap();
        let registers = model.registers();
        Host {
            bus: Arc::clone(bus),
            stage: Arc::clone(stage),
            registers,
            model,
            seat,
            page,
            pages: Vec::new(),
            events,
            event_index: 0,
            eqn: None,
            uar: 0,
            token: 0,
            domain: 0,
            busy: 0,
        }
    }

    /// A device that runs: with an event queue and a domain.
    pub fn new(config: ModelConfig) -> Host {
        let mut host = Host::cold(config);
        host.bring_up();
        host
    }

    /// SET_HCA_CAP of general capabilities: 16 bytes, and the 4096 that a query gives.
    pub fn set_capabilities(&mut self) -> Reply {
        let mut input = InHeader::new(Opcode::SET_HCA_CAP, 0).as_bytes().to_vec();
        input.resize(0x1010, 0);
        self.run(&input, 16)
    }

    /// INIT_HCA: 32 bytes.
    pub fn init(&mut self) -> Reply {
        let mut input = InHeader::new(Opcode::INIT_HCA, 0).as_bytes().to_vec();
        input.resize(32, 0);
        self.run(&input, 16)
    }

    pub fn bring_up(&mut self) {
        self.write_queue_address();
        self.run(PagesIn::new(Opcode::ENABLE_HCA, 0, 0, 0).as_bytes(), 16).ok();
        let mut issi = SetIssiIn::new_zeroed();
        issi.header = InHeader::new(Opcode::SET_ISSI, 0);
        issi.issi = U16::new(ISSI);
        self.run(issi.as_bytes(), 16).ok();
        let query = PagesIn::new(Opcode::QUERY_PAGES, QUERY_PAGES_INIT, 0, 0);
        let wanted: QueryPagesOut = self.run(query.as_bytes(), 16).parse();
        self.give_pages(wanted.pages.get()).ok();
        self.set_capabilities().ok();
        self.init().ok();
        let uar: ShortOut = self.short(Opcode::ALLOC_UAR, 0).parse();
        self.uar = uar.object.get();
        let domain: ShortOut = self.short(Opcode::ALLOC_PD, 0).parse();
        self.domain = domain.object.get();
        self.make_event_queue();
    }

    pub fn write_queue_address(&self) {
        let at = self.page.at().0;
        let (high, low) = ((at >> 32) as u32, at as u32);
        self.registers.write32(CMDQ_ADDR_HIGH, high.to_be());
        self.registers.write32(CMDQ_ADDR_LOW, low.to_be());
    }

    pub fn give_pages(&mut self, count: u32) -> Reply {
        let give = PagesIn::new(Opcode::MANAGE_PAGES, MANAGE_PAGES_GIVE, 0, count);
        let mut input = give.as_bytes().to_vec();
        for _ in 0..count {
            let page = self.bus.alloc(4096, 4096).unwrap();
            input.extend_from_slice(&page.at().0.to_be_bytes());
            self.pages.push(page);
        }
        self.run(&input, 16)
    }

    fn make_event_queue(&mut self) {
        for index in 0..1 << LOG_EVENTS {
            self.events.store8(index * EVENT_BYTES + OWNER_OFFSET, OWNER_INITIAL);
        }
        let mut create = CreateEqIn::new_zeroed();
        create.header = InHeader::new(Opcode::CREATE_EQ, 0);
        create.context.log_size = LOG_EVENTS;
        create.context.uar_page = U24::new(self.uar);
        let kinds = [EventType::COMMAND, EventType::PORT_CHANGE, EventType::PAGE_REQUEST];
        create.event_bitmask[0] = U64::new(kinds.iter().fold(0, |mask, kind| mask | kind.mask()));
        let mut input = create.as_bytes().to_vec();
        input.extend_from_slice(&self.events.at().0.to_be_bytes());
        let made: CreateEqOut = self.run(&input, 16).parse();
        self.event_index = 0;
        self.eqn = Some(made.eqn);
        self.arm();
    }

    /// Tells how far events were read, and arms the queue.
    pub fn arm(&self) {
        let Some(eqn) = self.eqn else { return };
        let value = eq_doorbell(eqn, self.event_index);
        let at = u64::from(self.uar) * UAR_PAGE_BYTES + UAR_EQ_ARM;
        self.registers.write32(at, value.to_be());
    }

    /// Reads the next event, if there is one.
    pub fn event(&mut self) -> Option<EventEntry> {
        self.eqn?;
        let at = (self.event_index as usize % (1 << LOG_EVENTS)) * EVENT_BYTES;
        let owner = self.events.load8(at + OWNER_OFFSET);
        if !is_for_software(owner, self.event_index, LOG_EVENTS) {
            return None;
        }
        let mut raw = [0; EVENT_BYTES];
        self.events.read(at, &mut raw);
        self.event_index += 1;
        Some(EventEntry::read_from_bytes(&raw).unwrap())
    }

    /// Reads all events, and arms the queue again.
    pub fn events(&mut self) -> Vec<EventEntry> {
        let events = std::iter::from_fn(|| self.event()).collect();
        self.arm();
        events
    }

    fn chain(&self, bytes: usize, message: &[u8], token: u8) -> Vec<DmaBlock> {
        let count = mailboxes_for(bytes);
        let boxes: Vec<_> =
            (0..count).map(|_| self.bus.alloc(MAILBOX_ALIGN, MAILBOX_ALIGN).unwrap()).collect();
        let mut pieces = message.get(INLINE_BYTES..).unwrap_or_default().chunks(MAILBOX_DATA_BYTES);
        for (number, block) in boxes.iter().enumerate() {
            block.write(0, pieces.next().unwrap_or_default());
            let mut control = MailboxControl::new_zeroed();
            control.next = U64::new(boxes.get(number + 1).map_or(0, |next| next.at().0));
            control.block_number = U32::new(number as u32);
            control.token = token;
            block.write(MAILBOX_CONTROL_OFFSET, control.as_bytes());
        }
        boxes
    }

    /// Writes a command into a free entry, lets `spoil` change it, and rings no bell.
    pub fn write(
        &mut self,
        input: &[u8],
        out_bytes: usize,
        spoil: impl FnOnce(&mut CommandEntry, &[DmaBlock]),
    ) -> Sent {
        let slot = (0..SLOTS).find(|slot| self.busy >> slot & 1 == 0).expect("a free slot");
        self.token = self.token.wrapping_add(1).max(1);
        let boxes = self.chain(input.len(), input, self.token);
        let out_boxes = self.chain(out_bytes, &[], self.token);
        let mut entry = CommandEntry::new_zeroed();
        entry.kind = ENTRY_TYPE;
        entry.in_length = U32::new(input.len() as u32);
        entry.in_pointer = U64::new(boxes.first().map_or(0, |block| block.at().0));
        let inline = input.len().min(INLINE_BYTES);
        entry.in_inline[..inline].copy_from_slice(&input[..inline]);
        entry.out_pointer = U64::new(out_boxes.first().map_or(0, |block| block.at().0));
        entry.out_length = U32::new(out_bytes as u32);
        entry.token = self.token;
        entry.status_own = OWNED_BY_DEVICE;
        entry.sign();
        spoil(&mut entry, &boxes);
        self.page.write(slot * ENTRY_BYTES, &entry.as_bytes()[..STATUS_OWN_OFFSET]);
        self.page.store8(slot * ENTRY_BYTES + STATUS_OWN_OFFSET, entry.status_own);
        self.busy |= 1 << slot;
        Sent { slot, token: self.token, out_bytes, boxes, out_boxes }
    }

    /// Rings for commands.
    pub fn ring(&self, sent: &[&Sent]) {
        let bits = sent.iter().fold(0_u32, |bits, sent| bits | 1 << sent.slot);
        self.registers.write32(COMMAND_DOORBELL, bits.to_be());
    }

    pub fn is_done(&self, sent: &Sent) -> bool {
        let own = self.page.load8(sent.slot * ENTRY_BYTES + STATUS_OWN_OFFSET);
        own & OWNED_BY_DEVICE == 0
    }

    /// Takes the answer, which must be there.
    pub fn finish(&mut self, sent: Sent) -> Reply {
        assert!(self.is_done(&sent), "an answer to a command");
        self.busy &= !(1 << sent.slot);
        let mut raw = [0; ENTRY_BYTES];
        self.page.read(sent.slot * ENTRY_BYTES, &mut raw);
        let entry = CommandEntry::read_from_bytes(&raw).unwrap();
        let mut output = entry.out_inline.to_vec();
        for block in &sent.out_boxes {
            let mut piece = [0; MAILBOX_DATA_BYTES];
            block.read(0, &mut piece);
            output.extend_from_slice(&piece);
        }
        output.truncate(sent.out_bytes);
        drop(sent.boxes);
        let delivery = delivery_status(entry.status_own);
        Reply { delivery, output, token: sent.token, token_now: entry.token }
    }

    /// Lets time pass until the command is done, or until there is no hope.
    pub fn wait(&mut self, sent: &Sent) -> bool {
        let deadline = self.stage.clock().now().after(Duration::from_secs(1));
        loop {
            let next = self.stage.turn_all();
            if self.is_done(sent) || self.stage.clock().now() >= deadline {
                break;
            }
            self.stage.clock().advance_to(next.unwrap_or(deadline).min(deadline));
        }
        self.events();
        self.is_done(sent)
    }

    /// Runs one command.
    pub fn run(&mut self, input: &[u8], out_bytes: usize) -> Reply {
        self.run_spoiled(input, out_bytes, |_, _| {})
    }

    /// Runs one command that is not as it should be.
    pub fn run_spoiled(
        &mut self,
        input: &[u8],
        out_bytes: usize,
        spoil: impl FnOnce(&mut CommandEntry, &[DmaBlock]),
    ) -> Reply {
        let sent = self.write(input, out_bytes, spoil);
        self.ring(&[&sent]);
        assert!(self.wait(&sent), "an answer in a second");
        self.finish(sent)
    }

    /// Runs several commands at once; how long they took.
    pub fn batch(&mut self, inputs: &[Vec<u8>], out_bytes: usize) -> (Vec<Reply>, Duration) {
        let sent: Vec<_> =
            inputs.iter().map(|input| self.write(input, out_bytes, |_, _| {})).collect();
        let begin = self.stage.clock().now();
        self.ring(&sent.iter().collect::<Vec<_>>());
        while !sent.iter().all(|sent| self.is_done(sent)) {
            self.seat.wait(Some(begin.after(Duration::from_secs(1))));
            self.events();
        }
        let time = self.seat.now().since(begin);
        (sent.into_iter().map(|sent| self.finish(sent)).collect(), time)
    }

    /// Runs a command that is nothing but a header and an object.
    pub fn short(&mut self, opcode: Opcode, object: u32) -> Reply {
        self.run(ShortIn::new(opcode, 0, object).as_bytes(), 16)
    }
}

/// A place in a block.
pub fn at(block: &DmaBlock, offset: u64) -> BusAddress {
    BusAddress(block.at().0 + offset)
}

impl Host {
    /// Gives the device a turn; whether it has interrupted.
    pub fn seat_poll(&self) -> bool {
        self.seat.poll()
    }
}
