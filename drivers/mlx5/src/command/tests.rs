//! Tests of the command queue, and the stand-in for firmware that they use: it reads entries and
//! mailboxes from the bus like the device, and answers when it is told to.

use super::*;
use martlet_device_io::{BusAddress, BusMemory};
use martlet_mlx5_abi::command::{
    CommandEntry, MAILBOX_BYTES, Mailbox, OWNED_BY_DEVICE, STATUS_OWN_OFFSET, status_own, xor8,
};
use martlet_mlx5_abi::init_segment::CommandQueueShape;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use martlet_soft_bus::{Addressing, SoftBus};
use martlet_units::Instant;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const QUERY: Opcode = Opcode::QUERY_GENERAL_OBJECT;
const MS: Duration = Duration::from_millis(1);
const NOW: Instant = Instant(0);

/// A MODIFY of 208 bytes, as for a virtqueue.
pub(crate) fn modify(number: u32) -> Request {
    let mut bytes = [0_u8; 208];
    bytes[..2].copy_from_slice(&Opcode::MODIFY_GENERAL_OBJECT.0.to_be_bytes());
    bytes[8..12].copy_from_slice(&number.to_be_bytes());
    Request::with_output(Opcode::MODIFY_GENERAL_OBJECT, &bytes, 16)
}

/// The stand-in's good answer.
pub(crate) fn output_of(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| if n < 8 { 0 } else { u8::try_from(n % 251).unwrap() }).collect()
}

pub(crate) struct Firmware {
    bus: Arc<SoftBus>,
    page: BusAddress,
    owned: u32,
    status: Option<(CommandStatus, u32)>,
    delivery: Option<DeliveryStatus>,
    spoil_token: bool,
}

impl Firmware {
    pub(crate) fn new() -> (CommandQueue, Firmware) {
        Firmware::with_mailboxes(1 << 20)
    }

    pub(crate) fn with_mailboxes(mailbox_bytes_max: usize) -> (CommandQueue, Firmware) {
        let bus = SoftBus::new(Addressing::Iommu);
        let shape = CommandQueueShape { log_entries: 5, log_stride: 6 };
        let queue = CommandQueue::new(bus.clone(), shape, mailbox_bytes_max).unwrap().unwrap();
        let page = queue.page_at();
        let firmware =
            Firmware { bus, page, owned: 0, status: None, delivery: None, spoil_token: false };
        (queue, firmware)
    }

    /// The doorbell: how many commands came with it.
    pub(crate) fn ring(&mut self, queue: &mut CommandQueue) -> u32 {
        let vector = queue.poll_doorbell().unwrap_or(0);
        assert_eq!(self.owned & vector, 0, "a slot is not used twice");
        self.owned |= vector;
        for index in (0..32).filter(|index| vector >> index & 1 == 1) {
            self.check(index);
        }
        vector.count_ones()
    }

    fn entry_at(&self, index: u32) -> BusAddress {
        BusAddress(self.page.0 + u64::from(index) * 64)
    }

    fn entry(&self, index: u32) -> CommandEntry {
        let mut bytes = [0; 64];
        self.bus.read(self.entry_at(index), &mut bytes).unwrap();
        CommandEntry::read_from_bytes(&bytes).unwrap()
    }

    /// The mailboxes of a chain, checked.
    fn chain(&self, first: u64, message_bytes: u32, token: u8) -> Vec<(u64, Mailbox)> {
        let mut mailboxes = Vec::new();
        let mut at = first;
        let count = martlet_mlx5_abi::command::mailboxes_for(message_bytes as usize);
        while at != 0 {
            let mut bytes = [0; MAILBOX_BYTES];
            self.bus.read(BusAddress(at), &mut bytes).unwrap();
            let mailbox = Mailbox::read_from_bytes(&bytes).unwrap();
            assert_eq!(mailbox.control.token, token);
            assert_eq!(mailbox.control.block_number.get() as usize, mailboxes.len());
            mailboxes.push((at, mailbox));
            at = mailbox.control.next.get();
            assert!(mailboxes.len() <= count);
        }
        assert_eq!(mailboxes.len(), count);
        mailboxes
    }

    /// Checks everything that the device would check.
    fn check(&self, index: u32) {
        let entry = self.entry(index);
        assert_eq!(entry.kind, 7);
        assert_eq!(xor8(entry.as_bytes()), 0xff);
        assert_eq!(entry.status_own, OWNED_BY_DEVICE);
        assert_ne!(entry.token, 0);
        self.chain(entry.in_pointer.get(), entry.in_length.get(), entry.token);
        self.chain(entry.out_pointer.get(), entry.out_length.get(), entry.token);
    }

    pub(crate) fn input(&self, index: u32) -> Vec<u8> {
        let entry = self.entry(index);
        let mut bytes = entry.in_inline.to_vec();
        for (_, mailbox) in self.chain(entry.in_pointer.get(), entry.in_length.get(), entry.token) {
            bytes.extend(mailbox.data);
        }
        bytes.truncate(entry.in_length.get() as usize);
        bytes
    }

    pub(crate) fn fail_next(&mut self, status: CommandStatus, syndrome: u32) {
        self.status = Some((status, syndrome));
    }

    pub(crate) fn deliver_next(&mut self, status: DeliveryStatus) {
        self.delivery = Some(status);
    }

    pub(crate) fn spoil_token(&mut self) {
        self.spoil_token = true;
    }

    /// Answers the command in a slot; the vector for the event.
    pub(crate) fn answer(&mut self, index: u32) -> u32 {
        assert_eq!(self.owned >> index & 1, 1, "the device has this slot");
        let entry = self.entry(index);
        let mut output = output_of(entry.out_length.get() as usize);
        if let Some((status, syndrome)) = self.status.take() {
            output[0] = status.0;
            output[4..8].copy_from_slice(&syndrome.to_be_bytes());
        }
        let at = self.entry_at(index).0;
        let (inline, rest) = output.split_at(output.len().min(16));
        self.bus.write(BusAddress(at + 0x20), inline).unwrap();
        let chain = self.chain(entry.out_pointer.get(), entry.out_length.get(), entry.token);
        for ((at, _), piece) in chain.iter().zip(rest.chunks(512)) {
            self.bus.write(BusAddress(*at), piece).unwrap();
        }
        if std::mem::take(&mut self.spoil_token) {
            self.bus.store8(BusAddress(at + 0x3c), entry.token ^ 0x80).unwrap();
        }
        let status = self.delivery.take().unwrap_or(DeliveryStatus::OK);
        self.bus.store8(BusAddress(at + STATUS_OWN_OFFSET as u64), status_own(status)).unwrap();
        self.owned &= !(1 << index);
        1 << index
    }

    pub(crate) fn answer_all(&mut self) -> u32 {
        let owned = self.owned;
        (0..32).filter(|index| owned >> index & 1 == 1).fold(0, |v, index| v | self.answer(index))
    }

    /// Answers one of those that it has, or none.
    pub(crate) fn answer_one_of(&mut self, pick: u32) -> u32 {
        let owned: Vec<u32> = (0..32).filter(|index| self.owned >> index & 1 == 1).collect();
        match owned.len() {
            0 => 0,
            count => self.answer(owned[pick as usize % count]),
        }
    }
}

fn submit(queue: &mut CommandQueue, request: &Request) -> CommandId {
    queue.submit(NOW, 5 * MS, request).unwrap()
}

#[test]
fn a_shape_that_cannot_be_is_refused() {
    let bus = SoftBus::new(Addressing::Iommu);
    let fits = |log_entries, log_stride| {
        let shape = CommandQueueShape { log_entries, log_stride };
        CommandQueue::new(bus.clone(), shape, 1 << 20).unwrap().is_some()
    };
    assert!(fits(5, 6));
    assert!(fits(1, 11));
    for (entries, stride) in [(0, 6), (6, 6), (5, 8), (15, 15), (5, 5)] {
        assert!(!fits(entries, stride), "2^{entries} entries of 2^{stride} bytes");
    }
}

#[test]
fn slots_are_taken_lowest_first_and_one_doorbell_starts_many() {
    let (mut queue, mut firmware) = Firmware::new();
    for number in 0..3 {
        submit(&mut queue, &modify(number));
    }
    assert_eq!(firmware.ring(&mut queue), 3);
    assert_eq!(firmware.owned, 0b111);
    let vector = firmware.answer(1);
    queue.on_completion(NOW, vector);
    submit(&mut queue, &modify(3));
    firmware.ring(&mut queue);
    assert_eq!(firmware.input(1)[8..12], [0, 0, 0, 3]);
}

#[test]
fn the_last_slot_is_for_pages() {
    let (mut queue, mut firmware) = Firmware::new();
    let key = Request::with_output(Opcode::CREATE_MKEY, &[0_u8; 16], 16);
    for _ in 0..31 {
        submit(&mut queue, &key);
    }
    assert_eq!(queue.submit(NOW, MS, &key), Err(SubmitError::Busy));
    let pages = Request::with_output(Opcode::MANAGE_PAGES, &[0_u8; 24], 16);
    submit(&mut queue, &pages);
    assert_eq!(queue.submit(NOW, MS, &pages), Err(SubmitError::Busy));
    firmware.ring(&mut queue);
    assert_eq!(firmware.owned, u32::MAX);
}

#[test]
fn throttled_commands_leave_slots_for_others() {
    let (mut queue, _) = Firmware::new();
    for number in 0..16 {
        submit(&mut queue, &modify(number));
    }
    assert_eq!(queue.submit(NOW, MS, &modify(16)), Err(SubmitError::Busy));
    submit(&mut queue, &Request::with_output(Opcode::DESTROY_MKEY, &[0_u8; 16], 16));
}

#[test]
fn long_messages_go_through_mailboxes_both_ways() {
    let (mut queue, mut firmware) = Firmware::new();
    for bytes in [8, 15, 16, 17, 527, 528, 529, 5000] {
        let input: Vec<u8> = (0..bytes).map(|n: usize| n.to_le_bytes()[0]).collect();
        let input = Input::Bytes(input.into());
        let request = Request { opcode: QUERY, input, out_bytes: bytes, keep: None };
        let id = submit(&mut queue, &request);
        firmware.ring(&mut queue);
        let Input::Bytes(input) = request.input else { unreachable!() };
        assert_eq!(firmware.input(0), input.to_vec());
        let vector = firmware.answer_all();
        queue.on_completion(NOW, vector);
        let output = queue.take_done(id).unwrap().result.unwrap();
        assert_eq!(output.bytes(), output_of(bytes));
    }
}

#[test]
fn messages_of_no_possible_length_are_refused() {
    let (mut queue, _) = Firmware::new();
    for (in_bytes, out_bytes) in [(7, 16), (16, 7), (16, (4 << 20) + 1)] {
        let input = Input::Bytes(vec![0; in_bytes].into());
        let request = Request { opcode: QUERY, input, out_bytes, keep: None };
        let refused = SubmitError::BadLength { opcode: QUERY, in_bytes, out_bytes };
        assert_eq!(queue.submit(NOW, MS, &request), Err(refused));
    }
}

#[test]
fn delivery_and_status_are_told_apart() {
    let (mut queue, mut firmware) = Firmware::new();
    let end = |queue: &mut CommandQueue, firmware: &mut Firmware| {
        let id = submit(queue, &modify(0));
        firmware.ring(queue);
        let vector = firmware.answer_all();
        queue.on_completion(NOW, vector);
        queue.take_done(id).unwrap().result.unwrap_err()
    };
    let opcode = Opcode::MODIFY_GENERAL_OBJECT;
    firmware.deliver_next(DeliveryStatus::BLOCK_NUMBER);
    let status = DeliveryStatus::BLOCK_NUMBER;
    assert_eq!(end(&mut queue, &mut firmware), CommandError::Delivery { opcode, status });
    firmware.fail_next(CommandStatus::BAD_RESOURCE_STATE, 0xabcd);
    let (status, syndrome) = (CommandStatus::BAD_RESOURCE_STATE, 0xabcd);
    let error = end(&mut queue, &mut firmware);
    assert_eq!(error, CommandError::Status { opcode, status, syndrome });
    assert!(!error.may_be_done());
    firmware.spoil_token();
    let error = end(&mut queue, &mut firmware);
    assert!(matches!(error, CommandError::Token { .. }) && error.may_be_done());
}

#[test]
fn an_event_alone_does_not_free_a_slot() {
    let (mut queue, mut firmware) = Firmware::new();
    let id = submit(&mut queue, &modify(0));
    firmware.ring(&mut queue);
    queue.on_completion(NOW, u32::MAX);
    assert!(queue.take_done(id).is_none());
    assert!(!queue.is_idle());
}

#[test]
fn an_answer_whose_event_is_lost_is_found() {
    let (mut queue, mut firmware) = Firmware::new();
    let id = submit(&mut queue, &modify(0));
    firmware.ring(&mut queue);
    firmware.answer_all();
    let at = queue.poll_timeout().unwrap();
    assert_eq!(at, NOW.after(5 * MS / 2), "half of the deadline");
    queue.on_timeout(at);
    assert!(queue.take_done(id).unwrap().result.is_ok());
}

#[test]
fn a_command_that_is_not_answered_ends_the_queue() {
    let (mut queue, mut firmware) = Firmware::new();
    let first = submit(&mut queue, &modify(0));
    firmware.ring(&mut queue);
    queue.on_timeout(queue.poll_timeout().unwrap());
    let over = queue.poll_timeout().unwrap();
    assert_eq!(over, NOW.after(5 * MS));
    let keep = Arc::new(0_u8);
    let young = queue.submit(NOW.after(MS), 5 * MS, &modify(1).keeping(keep.clone())).unwrap();
    let answered = submit(&mut queue, &modify(2));
    firmware.ring(&mut queue);
    firmware.answer(2);
    let entries = firmware.bus.entries();
    // One that the device has not heard of yet.
    let unheard = submit(&mut queue, &modify(3));
    queue.on_timeout(over);
    assert_eq!(queue.end(), Some(End::Tainted));
    let mut end = |id| queue.take_done(id).unwrap().result;
    let opcode = Opcode::MODIFY_GENERAL_OBJECT;
    assert!(matches!(end(first), Err(CommandError::Timeout { waited, .. }) if waited == 5 * MS));
    assert_eq!(end(young), Err(CommandError::Tainted { opcode }));
    assert!(end(answered).is_ok(), "its event had not come");
    assert!(end(unheard).is_err());
    // Nothing more is sent, and nothing is free that the device may use.
    assert_eq!(queue.poll_doorbell(), None);
    assert_eq!(queue.submit(over, MS, &modify(4)), Err(SubmitError::Tainted));
    assert!(queue.is_idle() && queue.poll_timeout().is_none());
    let vector = firmware.answer(0);
    queue.on_completion(over, vector);
    assert!(queue.take_done(first).is_none(), "a late answer says nothing");
    assert_eq!((firmware.bus.entries(), Arc::strong_count(&keep)), (entries, 2));
}

#[test]
fn an_answer_that_does_not_tell_what_was_done_ends_the_queue() {
    let denied = [CommandStatus::BAD_RESOURCE, CommandStatus::BAD_INDEX];
    for status in denied.map(Some).into_iter().chain([None]) {
        let (mut queue, mut firmware) = Firmware::new();
        let ids = [0, 1].map(|number| submit(&mut queue, &modify(number)));
        firmware.ring(&mut queue);
        match status {
            Some(status) => firmware.fail_next(status, 1),
            None => firmware.spoil_token(),
        }
        let vector = firmware.answer(0);
        queue.on_completion(NOW, vector);
        assert!(ids.map(|id| queue.take_done(id).unwrap().result.is_err()) == [true; 2]);
        assert_eq!(queue.end(), Some(End::Tainted));
    }
}

#[test]
fn without_an_event_queue_answers_are_looked_for() {
    let (mut queue, mut firmware) = Firmware::new();
    let id = submit(&mut queue, &modify(0));
    firmware.ring(&mut queue);
    queue.on_poll(NOW);
    assert!(queue.take_done(id).is_none());
    firmware.answer_all();
    queue.on_poll(NOW);
    assert!(queue.take_done(id).unwrap().result.is_ok());
}

#[test]
fn with_the_device_gone_everything_ends() {
    let (mut queue, mut firmware) = Firmware::new();
    let ids = [0, 1].map(|number| submit(&mut queue, &modify(number)));
    firmware.ring(&mut queue);
    firmware.answer(0);
    queue.on_end(NOW, End::Gone);
    assert!(queue.take_done(ids[0]).unwrap().result.is_ok(), "this had been answered");
    let opcode = Opcode::MODIFY_GENERAL_OBJECT;
    let gone = CommandError::Gone { opcode };
    assert_eq!(queue.take_done(ids[1]).unwrap().result, Err(gone));
    assert_eq!(queue.submit(NOW, MS, &modify(2)), Err(SubmitError::Gone));
    assert!(queue.poll_doorbell().is_none());
}

#[test]
fn memory_goes_back_when_it_is_not_needed() {
    let (mut queue, mut firmware) = Firmware::with_mailboxes(16 << 20);
    let request = Request::with_output(Opcode::CREATE_MKEY, &[1_u8; 1 << 20], 16);
    let id = submit(&mut queue, &request);
    firmware.ring(&mut queue);
    queue.trim();
    let vector = firmware.answer_all();
    queue.on_completion(NOW, vector);
    assert!(queue.take_done(id).is_some());
    let before = firmware.bus.entries();
    queue.trim();
    assert_eq!(before - firmware.bus.entries(), 31, "of 32 chunks one is kept");
}

proptest! {
    /// A device that writes anything anywhere it may, and tells of anything: commands end, slots
    /// that it owns are not used, nothing panics.
    #[test]
    fn a_hostile_device_does_no_harm(
        steps in prop::collection::vec((any::<u8>(), any::<u32>(), any::<[u8; 16]>()), 1..120),
    ) {
        let (mut queue, mut firmware) = Firmware::new();
        let mut time = 0;
        for (step, number, bytes) in steps {
            let now = Instant(time);
            match step % 6 {
                0 => {
                    let _ = queue.submit(now, 5 * MS, &modify(number));
                    // What the device has is not told apart here.
                    firmware.owned = 0;
                    queue.poll_doorbell();
                }
                1 => {
                    let offset = u64::from(number % (4096 - 16));
                    firmware.bus.write(BusAddress(firmware.page.0 + offset), &bytes).unwrap();
                }
                2 => {
                    let entry = u64::from(number % 32) * 64 + STATUS_OWN_OFFSET as u64;
                    firmware.bus.store8(BusAddress(firmware.page.0 + entry), bytes[0]).unwrap();
                }
                3 => queue.on_completion(now, number),
                4 => {
                    queue.on_timeout(now);
                }
                _ => queue.on_poll(now),
            }
            while queue.poll_done().is_some() {}
            time += u64::from(number % 3_000_000);
        }
        // Everything ends in time.
        for _ in 0..3 {
            time += 10_000_000;
            queue.on_timeout(Instant(time));
        }
        prop_assert!(queue.is_idle());
        prop_assert!(queue.poll_timeout().is_none());
    }
}
