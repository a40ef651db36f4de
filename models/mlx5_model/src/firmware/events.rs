//! Event queues (PRM, "Event queues"; Linux `eq.c`).

use super::answer::{self, Answer, parse, refuse};
use super::input::Input;
use martlet_device_io::{BusAddress, BusMemory};
use martlet_mlx5_abi::event::{
    self, CreateEqIn, CreateEqOut, EVENT_BYTES, EventEntry, EventType, OWNER_OFFSET,
};
use martlet_mlx5_abi::{CommandStatus, U32};
use std::collections::BTreeMap;
use zerocopy::{FromZeros, IntoBytes};

/// Event queues that a function can have.
pub(super) const QUEUES_MAX: u8 = 16;

/// log2 of the largest event queue.
const LOG_SIZE_MAX: u8 = 16;

/// log2 of the smallest page.
const LOG_PAGE_MIN: u32 = 12;

/// In bits 11:8 of a context's status: the queue is armed (`MLX5_EQ_STATE_ARMED`).
const ARMED: u32 = 9;

/// All event queues of a function.
#[derive(Debug, Default)]
pub(crate) struct EventQueues {
    queues: BTreeMap<u8, EventQueue>,
    /// Events that found their queue full.
    pub(crate) lost: u64,
}

#[derive(Debug)]
struct EventQueue {
    log_size: u8,
    log_page: u32,
    pages: Vec<u64>,
    uar: u32,
    mask: u64,
    produced: u32,
    /// How far the driver has read, as it told last: 24 bits.
    consumed: u32,
    armed: bool,
}

const INDEX_MASK: u32 = 0x00ff_ffff;

impl EventQueues {
    /// CREATE_EQ.
    pub(super) fn create(&mut self, input: &Input, uar_exists: impl Fn(u32) -> bool) -> Answer {
        let create: CreateEqIn = parse(&input.head)?;
        let context = &create.context;
        let log_size = context.log_size & 0x1f;
        let log_page = LOG_PAGE_MIN + u32::from(context.log_page_size & 0x1f);
        if log_size > LOG_SIZE_MAX || log_page >= u64::BITS {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0301_0001));
        }
        if !uar_exists(context.uar_page.get()) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0301_0002));
        }
        // This function manages no vports (`vport_group_manager`).
        let allowed = [EventType::COMMAND, EventType::PAGE_REQUEST, EventType::PORT_CHANGE];
        let allowed = allowed.iter().fold(0, |mask, kind| mask | kind.mask());
        if create.event_bitmask[0].get() & !allowed != 0 {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0301_0006));
        }
        let bytes = crate::num::to_u64(EVENT_BYTES) << log_size;
        let pages = input.long_words(size_of::<CreateEqIn>(), bytes.div_ceil(1 << log_page));
        let pages = pages.ok_or(refuse(CommandStatus::BAD_INPUT_LENGTH, 0x0301_0003))?;
        if pages.iter().any(|at| !at.is_multiple_of(1 << LOG_PAGE_MIN)) {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0301_0004));
        }
        let free = (0..QUEUES_MAX).find(|number| !self.queues.contains_key(number));
        let number = free.ok_or(refuse(CommandStatus::LIMIT, 0x0301_0005))?;
        let queue = EventQueue {
            log_size,
            log_page,
            pages,
            uar: context.uar_page.get(),
            mask: create.event_bitmask[0].get(),
            produced: 0,
            consumed: 0,
            armed: context.status.get() >> 8 & 0xf == ARMED,
        };
        self.queues.insert(number, queue);
        answer::bytes(&CreateEqOut {
            header: answer::header(CommandStatus::OK, 0),
            reserved0: [0; 3],
            eqn: number,
            reserved1: U32::new(0),
        })
    }

    /// DESTROY_EQ.
    pub(super) fn destroy(&mut self, input: &Input) -> Answer {
        let number = crate::num::low8(input.object());
        match self.queues.remove(&number) {
            Some(_) => answer::done(),
            None => Err(refuse(CommandStatus::BAD_RESOURCE, 0x0302_0001)),
        }
    }

    /// Whether a queue uses this page of doorbells.
    pub(super) fn use_uar(&self, uar: u32) -> bool {
        self.queues.values().any(|queue| queue.uar == uar)
    }

    /// Forgets all queues.
    pub(super) fn clear(&mut self) {
        self.queues.clear();
    }

    /// The doorbell of a queue rang in a page of doorbells; whether the driver is to be
    /// interrupted: it arms a queue that has events already.
    pub(super) fn doorbell(&mut self, uar: u32, value: u32, arm: bool) -> bool {
        let [number, ..] = value.to_be_bytes();
        let Some(queue) = self.queues.get_mut(&number).filter(|queue| queue.uar == uar) else {
            return false;
        };
        queue.consumed = value & INDEX_MASK;
        if !arm {
            return false;
        }
        queue.armed = queue.consumed == queue.produced & INDEX_MASK;
        !queue.armed
    }

    /// Writes an event to every queue that wants its type; whether the driver is to be interrupted.
    pub(super) fn post(
        &mut self,
        bus: &dyn BusMemory,
        kind: EventType,
        fill: impl Fn(&mut EventEntry),
    ) -> bool {
        let mut entry = EventEntry::new_zeroed();
        entry.kind = kind.0;
        fill(&mut entry);
        let mut interrupt = false;
        for queue in self.queues.values_mut().filter(|queue| queue.mask & kind.mask() != 0) {
            if queue.write(bus, entry) {
                interrupt |= std::mem::take(&mut queue.armed);
            } else {
                self.lost += 1;
            }
        }
        interrupt
    }
}

impl EventQueue {
    /// Writes the next entry, its owner last; false if there is no room, or no memory.
    fn write(&mut self, bus: &dyn BusMemory, mut entry: EventEntry) -> bool {
        let used = self.produced.wrapping_sub(self.consumed) & INDEX_MASK;
        if used >= 1 << self.log_size {
            return false;
        }
        let slot = self.produced & ((1 << self.log_size) - 1);
        let offset = u64::from(slot) * crate::num::to_u64(EVENT_BYTES);
        let page = usize::try_from(offset >> self.log_page).unwrap_or(usize::MAX);
        let inside = offset & ((1 << self.log_page) - 1);
        let at = self.pages.get(page).and_then(|page| page.checked_add(inside));
        let Some(at) = at.map(BusAddress) else { return false };
        let owner = event::owner_at(self.produced, self.log_size);
        entry.signature = 0;
        entry.owner = owner;
        entry.signature = martlet_mlx5_abi::command::signature_for(entry.as_bytes());
        let (body, _) = entry.as_bytes().split_at(OWNER_OFFSET);
        let owner_at = at.checked_add(crate::num::to_u64(OWNER_OFFSET));
        let written = bus.write(at, body).is_ok()
            && owner_at.is_some_and(|owner_at| bus.store8(owner_at, owner).is_ok());
        if written {
            self.produced = self.produced.wrapping_add(1);
        }
        written
    }
}
