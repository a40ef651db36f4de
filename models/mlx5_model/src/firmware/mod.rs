//! The firmware: takes commands from memory, and answers them when their time has come.
//!
//! A command's input is read when its doorbell rings, as by a device that is quick to fetch; it
//! has its effect at the moment of its answer. When that is follows from the doorbell's moment
//! alone, so a late turn changes nothing but when the driver hears of it.

mod answer;
mod dispatch;
mod events;
mod input;
mod memory;
mod setup;
mod tables;
mod transport;
mod virtq;

use crate::config::ModelConfig;
use crate::faults::{Fault, Faults, Point};
use crate::latency::{Class, Latency};
use crate::nic::Nic;
use crate::nic::queue::QueueCounts;
use answer::{Answer, Refusal, refuse};
use events::EventQueues;
use input::Input;
use martlet_device_io::BusAddress;
use martlet_mlx5_abi::event::{EventType, port_change};
use martlet_mlx5_abi::init_segment::{COMMAND_ENTRIES_MAX, nic_interface};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode, U24, U32};
use martlet_simulation::{Agenda, Chance};
use martlet_units::Instant;
use memory::Umem;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use transport::{Checks, Delivered, ReplyTo};
use virtq::Virtq;

/// Where in BAR 0 the virtqueues' doorbell is.
pub(crate) const VIRTQ_DOORBELL_OFFSET: u64 = 1 << 20;

/// Pages of doorbells that can be had.
pub(crate) const UARS_MAX: u32 = 64;

/// Objects of each other kind that can be had.
const OBJECTS_MAX: usize = 1 << 16;

/// log2 of the umems that can be had.
const LOG_UMEMS_MAX: u8 = 16;

/// log2 of the bytes of a command entry.
pub(crate) const LOG_COMMAND_STRIDE: u8 = 6;

/// The port of the only vport, as events name it.
const PORT: u32 = 1;

/// How far the function has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Off,
    Enabled,
    Running,
}

/// A command on its way.
struct InFlight {
    opcode: Opcode,
    reply: ReplyTo,
    input: Result<Input, DeliveryStatus>,
    fault: Option<Fault>,
    wake: Duration,
}

/// What became of a turn's commands.
#[derive(Default)]
struct Finished {
    /// One bit for each entry.
    slots: u32,
    /// When the first of them was done, and its interrupt's delay.
    first: Option<Instant>,
}

/// Something that happens by itself.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The command of a slot is done.
    Done { slot: u8 },
    /// The driver is interrupted.
    Interrupt,
    /// The link goes up.
    LinkUp,
    /// The function has stopped.
    Disabled,
}

/// The firmware of one device.
pub(crate) struct Firmware {
    config: ModelConfig,
    /// When it takes commands.
    ready_at: Instant,
    nic: Arc<Nic>,
    function: Function,
    issi: u16,
    capabilities_set: bool,
    /// What was set about signatures of mailboxes: they have to have some.
    signs_mailboxes: bool,
    /// The page of command entries, and the high half of a new one.
    queue: Option<u64>,
    queue_high: u32,
    /// The address and the interface, as a driver reads them back.
    queue_at: u64,
    interface: u32,
    /// The interface is to be disabled, and is not yet.
    is_disabling: bool,
    slots: Vec<Option<InFlight>>,
    agenda: Agenda<Instant, Event>,
    /// The exclusive section is free from then on.
    section_free: Instant,
    pub(crate) events: EventQueues,
    interrupt_pending: bool,
    /// The firmware has stopped for good.
    hangs: bool,
    pages: BTreeSet<u64>,
    domains: BTreeMap<u32, u32>,
    uars: BTreeSet<u32>,
    umems: BTreeMap<u32, Umem>,
    virtqs: BTreeMap<u32, Virtq>,
    counters: BTreeMap<u32, QueueCounts>,
    tables: BTreeMap<u32, Vec<u32>>,
    table_sizes: BTreeMap<u32, u16>,
    last_object: u32,
    chance: Chance,
    pub(crate) faults: Faults,
    pub(crate) commands: u64,
    pub(crate) failed: u64,
    pub(crate) unexpected: u64,
}

impl Firmware {
    /// Firmware that takes commands from `ready_at` on. The port of its configuration is the
    /// network card's already.
    pub(crate) fn new(mut config: ModelConfig, ready_at: Instant, nic: Arc<Nic>) -> Firmware {
        let faults = std::mem::take(&mut config.faults);
        let chance = Chance::new(config.seed);
        let slots = (0..1_u32 << config.log_command_entries).map(|_| None).collect();
        Firmware {
            config,
            ready_at,
            nic,
            function: Function::Off,
            issi: 0,
            capabilities_set: false,
            signs_mailboxes: false,
            queue: None,
            queue_high: 0,
            queue_at: 0,
            interface: nic_interface::FULL,
            is_disabling: false,
            slots,
            agenda: Agenda::default(),
            section_free: Instant(0),
            events: EventQueues::default(),
            interrupt_pending: false,
            hangs: false,
            pages: BTreeSet::new(),
            domains: BTreeMap::new(),
            uars: BTreeSet::new(),
            umems: BTreeMap::new(),
            virtqs: BTreeMap::new(),
            counters: BTreeMap::new(),
            tables: BTreeMap::new(),
            table_sizes: BTreeMap::new(),
            last_object: 0,
            chance,
            faults,
            commands: 0,
            failed: 0,
            unexpected: 0,
        }
    }

    /// The high half of the command page's address; the low half makes it count.
    pub(crate) fn set_queue_high(&mut self, high: u32) {
        self.queue_high = high;
    }

    /// The low half of the command page's address, and the interface. So a driver begins, with a
    /// function as after a reset: commands on their way are forgotten.
    ///
    /// A function whose interface is disabled goes on until it has stopped, which the field tells
    /// (Linux `fw.c`, `mlx5_cmd_fast_teardown_hca`). What a driver writes before that is unexpected
    /// and changes nothing.
    pub(crate) fn set_queue_low(&mut self, low: u32, now: Instant) {
        if self.is_disabling {
            self.unexpected += u64::from(nic_interface::from_register(low) == nic_interface::FULL);
            return;
        }
        let at = (u64::from(self.queue_high) << 32) | u64::from(low & !0xfff);
        let interface = nic_interface::from_register(low);
        if interface == nic_interface::DISABLED {
            self.is_disabling = true;
            let fault = self.faults.strike_where(|point: &Point| *point == Point::Disable);
            if fault != Some(Fault::NeverDisables) {
                self.agenda.put(now.after(self.config.disable_time), Event::Disabled);
            }
            return;
        }
        self.reset_function();
        (self.queue_at, self.interface) = (at, interface);
        self.queue = (interface == nic_interface::FULL).then_some(at);
    }

    /// The function has stopped; the address stays.
    fn on_disabled(&mut self) {
        let at = self.queue_at;
        self.reset_function();
        (self.queue_at, self.interface) = (at, nic_interface::DISABLED);
    }

    /// No command is answered any more.
    fn forget_commands(&mut self) {
        self.agenda.retain(|event| !matches!(event, Event::Done { .. }));
    }

    /// As a function-level reset: nothing is left of what a driver did.
    pub(crate) fn reset_function(&mut self) {
        self.queue = None;
        (self.queue_at, self.interface) = (0, nic_interface::FULL);
        self.is_disabling = false;
        self.agenda.retain(|event| !matches!(event, Event::Disabled));
        self.forget_commands();
        self.slots.iter_mut().for_each(|slot| *slot = None);
        self.reset();
        self.function = Function::Off;
        self.pages.clear();
        self.interrupt_pending = false;
        self.hangs = false;
    }

    /// Halves of the command page's address, the low one with the interface, as a driver reads them
    /// back.
    pub(crate) fn queue_halves(&self) -> (u32, u32) {
        let (high, low) = (crate::num::high32(self.queue_at), crate::num::low32(self.queue_at));
        (high, nic_interface::to_register(low, self.interface))
    }

    /// The command doorbell: a bit for each entry.
    pub(crate) fn doorbell(&mut self, entries: u32, now: Instant) {
        if now < self.ready_at {
            self.unexpected += u64::from(entries.count_ones());
            return;
        }
        for slot in (0..COMMAND_ENTRIES_MAX).filter(|slot| entries >> slot & 1 == 1) {
            if self.nic.is_gone() || self.hangs {
                return;
            }
            if !self.pick_up(slot, now) {
                self.unexpected += 1;
            }
        }
    }

    /// Takes a command; false if there is none, or its entry is not free.
    fn pick_up(&mut self, slot: u32, now: Instant) -> bool {
        let index = crate::num::to_usize(slot);
        let Some(queue) = self.queue.filter(|_| matches!(self.slots.get(index), Some(None))) else {
            return false;
        };
        let at = queue.checked_add(u64::from(slot) << LOG_COMMAND_STRIDE);
        let Some(at) = at.map(BusAddress) else { return false };
        let checks = Checks {
            entry_signatures: self.config.check_signatures,
            mailbox_signatures: self.signs_mailboxes,
        };
        let taken = transport::take(self.nic.bus(), at, checks);
        let Some(Delivered { opcode, input, reply }) = taken else { return false };
        let class = self.class(opcode, input.as_ref().ok());
        let fault = self.faults.strike_where(|point: &Point| point.means(opcode, class));
        let latency = self.config.latencies.get(class);
        let pages = input.as_ref().map_or(0, |input| self.list_length(input));
        let flight = InFlight { opcode, reply, input, fault, wake: latency.wake };
        if let Some(done) = self.plan(&latency, pages, fault, now) {
            self.agenda.put(done, Event::Done { slot: crate::num::low8(slot) });
        }
        if let Some(place) = self.slots.get_mut(index) {
            *place = Some(flight);
        }
        true
    }

    /// Entries of the page list that a command is about.
    fn list_length(&self, input: &Input) -> u64 {
        match input.opcode {
            Opcode::CREATE_MKEY => input.list_entries(),
            Opcode::DESTROY_MKEY => self.key_pages(input.object()),
            _ => 0,
        }
    }

    fn class(&self, opcode: Opcode, input: Option<&Input>) -> Class {
        let object = input.map_or(0, dispatch::object_type_of);
        let class = Class::of(opcode, object);
        match (class, opcode, input) {
            (Class::QueueFields, Opcode::MODIFY_GENERAL_OBJECT, Some(input)) => {
                self.modify_class(input)
            }
            _ => class,
        }
    }

    /// When a command is done; `None` for never. Faults that are about the time, or about something
    /// else than the command, happen here.
    fn plan(
        &mut self,
        latency: &Latency,
        pages: u64,
        fault: Option<Fault>,
        now: Instant,
    ) -> Option<Instant> {
        let (mut busy, mut late) = (Duration::ZERO, Duration::ZERO);
        match fault {
            Some(Fault::Gone) => {
                self.nic.remove();
                return None;
            }
            Some(Fault::Hang) => {
                self.hangs = true;
                self.forget_commands();
                return None;
            }
            Some(Fault::Slow(time)) => busy = time,
            Some(Fault::Late(time)) => late = time,
            Some(Fault::LinkFlap(time)) => {
                self.set_link(false);
                self.agenda.put(now.after(time), Event::LinkUp);
            }
            Some(Fault::PageRequest(pages)) => self.request_pages(pages),
            _ => {}
        }
        let begin = now.after(latency.pickup).max(self.section_free);
        self.section_free = begin.after(latency.serial_for(pages) + busy);
        let done = self.section_free.after(latency.overlap_for(pages) + late);
        let never = matches!(fault, Some(Fault::Lost { executed: false }));
        (!never).then_some(done)
    }

    /// Does everything that is due, and says when something is due next. Whether the driver is to
    /// be interrupted is found in [`Firmware::take_interrupt`].
    pub(crate) fn turn(&mut self, now: Instant) -> Option<Instant> {
        if self.nic.is_gone() {
            return None;
        }
        loop {
            // Commands that are done at the same time, or since the last turn, share an event.
            let mut finished = Finished::default();
            let mut wake = Duration::ZERO;
            let other = loop {
                match self.agenda.take_due(now) {
                    Some((at, Event::Done { slot })) => {
                        self.complete(slot, at, &mut finished, &mut wake);
                    }
                    other => break other,
                }
            };
            self.announce(&finished, wake);
            match other {
                Some((_, Event::Interrupt)) => self.interrupt_pending = true,
                Some((_, Event::LinkUp)) => self.set_link(true),
                Some((_, Event::Disabled)) => self.on_disabled(),
                Some((_, Event::Done { .. })) | None if finished.slots == 0 => break,
                Some((_, Event::Done { .. })) | None => {}
            }
        }
        self.agenda.next_at()
    }

    /// Whether the driver has been interrupted since the last call.
    pub(crate) fn take_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.interrupt_pending)
    }

    fn complete(&mut self, slot: u8, at: Instant, finished: &mut Finished, wake: &mut Duration) {
        let place = self.slots.get_mut(usize::from(slot)).and_then(Option::take);
        let Some(flight) = place else { return };
        let length = flight.reply.length();
        let (delivery, answer) = self.execute(flight.opcode, flight.input, flight.fault, length);
        self.commands += 1;
        self.failed += u64::from(delivery != DeliveryStatus::OK || answer.is_err());
        if flight.fault == Some(Fault::Lost { executed: true }) {
            return;
        }
        let mut output = match answer {
            Ok(output) => output,
            Err(Refusal { status, syndrome }) => {
                zerocopy::IntoBytes::as_bytes(&answer::header(status, syndrome)).to_vec()
            }
        };
        output.resize(length, 0);
        if flight.fault == Some(Fault::Garbage) {
            output.iter_mut().skip(8).for_each(|byte| *byte = self.chance.byte());
        }
        let output = (delivery == DeliveryStatus::OK).then_some(output.as_slice());
        let wrong_token = flight.fault == Some(Fault::WrongToken);
        flight.reply.write(self.nic.bus(), delivery, output, wrong_token);
        match flight.fault {
            Some(Fault::LostEvent) => {}
            Some(Fault::LostInterrupt) => self.post_command_event(1 << slot, None),
            _ => {
                finished.slots |= 1 << slot;
                finished.first = finished.first.or(Some(at));
                *wake = flight.wake;
            }
        }
    }

    /// Tells the driver of commands that are done.
    fn announce(&mut self, finished: &Finished, wake: Duration) {
        if let Some(first) = finished.first {
            self.post_command_event(finished.slots, Some(first.after(wake)));
        }
    }

    fn post_command_event(&mut self, slots: u32, interrupt_at: Option<Instant>) {
        let armed = self.events.post(self.nic.bus(), EventType::COMMAND, |entry| {
            entry.data0 = U32::new(slots);
        });
        if let Some(at) = interrupt_at.filter(|_| armed) {
            self.agenda.put(at, Event::Interrupt);
        }
    }

    /// Does what a command asks for, unless a fault says otherwise.
    fn execute(
        &mut self,
        opcode: Opcode,
        input: Result<Input, DeliveryStatus>,
        fault: Option<Fault>,
        out_bytes: usize,
    ) -> (DeliveryStatus, Answer) {
        let nothing = || Ok(Vec::new());
        match (input, fault) {
            (_, Some(Fault::Delivery(status))) => (status, nothing()),
            (Err(status), _) => (status, nothing()),
            (Ok(_), Some(Fault::Status { status, syndrome })) => {
                (DeliveryStatus::OK, Err(refuse(status, syndrome)))
            }
            (Ok(input), _) => {
                let answer = self.dispatch(opcode, input, out_bytes);
                if let Err(refusal) = &answer {
                    tracing::debug!(%opcode, ?refusal, "a command was refused");
                }
                (DeliveryStatus::OK, answer)
            }
        }
    }

    /// A doorbell of event queues.
    pub(crate) fn event_doorbell(&mut self, uar: u32, value: u32, arm: bool) {
        if self.uars.contains(&uar) {
            self.interrupt_pending |= self.events.doorbell(uar, value, arm);
        }
    }

    /// Takes the link up or down, and tells so if that is a change.
    pub(crate) fn set_link(&mut self, up: bool) {
        if self.nic.is_up() == up {
            return;
        }
        self.nic.set_link(up);
        let sub_type = if up { port_change::ACTIVE } else { port_change::DOWN };
        self.interrupt_pending |=
            self.events.post(self.nic.bus(), EventType::PORT_CHANGE, |entry| {
                entry.sub_type = sub_type;
                entry.data2 = U32::new(PORT << 28);
            });
    }

    /// Pages of the host that it has.
    pub(crate) fn page_count(&self) -> u64 {
        crate::num::to_u64(self.pages.len())
    }

    /// Forgets all objects; as TEARDOWN_HCA does.
    fn reset(&mut self) {
        self.nic.reset();
        self.events.clear();
        self.domains.clear();
        self.uars.clear();
        self.umems.clear();
        self.virtqs.clear();
        self.counters.clear();
        self.tables.clear();
        self.table_sizes.clear();
        self.issi = 0;
        self.capabilities_set = false;
        self.signs_mailboxes = false;
    }

    /// A number for a new object: used again only when all others were, and never while it is in
    /// use. There are far more numbers than objects.
    fn next_object(&mut self) -> u32 {
        loop {
            self.last_object = self.last_object % U24::MAX + 1;
            let number = &self.last_object;
            let used = self.domains.contains_key(number)
                || self.umems.contains_key(number)
                || self.virtqs.contains_key(number)
                || self.counters.contains_key(number)
                || self.tables.contains_key(number);
            if !used {
                return *number;
            }
        }
    }
}

const _: () = assert!(CommandStatus::OK.0 == 0, "a zeroed header is a good one");
