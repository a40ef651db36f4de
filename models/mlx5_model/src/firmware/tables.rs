//! Receive queue tables and queue counters.

use super::answer::{Answer, Refusal, bytes, done, general, general_header, parse, refuse, short};
use super::input::Input;
use super::{Firmware, OBJECTS_MAX};
use crate::nic::queue::QueueCounts;
use martlet_mlx5_abi::message::GeneralObjectIn;
use martlet_mlx5_abi::rqt::{LIST_OF_VIRTQUEUES, MODIFY_LIST, RqtContext, RqtIn};
use martlet_mlx5_abi::virtq::{QueryCountersOut, VirtqCounters};
use martlet_mlx5_abi::{CommandStatus, U32, U64};
use zerocopy::FromZeros;

/// The longest receive queue table.
const TABLE_MAX: u16 = 1 << super::setup::LOG_RQT_MAX;

impl Firmware {
    pub(super) fn create_table(&mut self, input: &Input) -> Answer {
        let create: RqtIn = parse(&input.head)?;
        let max = create.context.max_size.get();
        if !max.is_power_of_two() || max > TABLE_MAX {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0916_0001));
        }
        let list = self.table_list(&create.context, max, input)?;
        if self.tables.len() >= OBJECTS_MAX {
            return Err(refuse(CommandStatus::NO_RESOURCES, 0x0916_0005));
        }
        let number = self.next_object();
        self.install_table(number, max, list);
        short(number)
    }

    pub(super) fn modify_table(&mut self, input: &Input) -> Answer {
        let modify: RqtIn = parse(&input.head)?;
        let number = modify.rqtn.get();
        let max = self.table_sizes.get(&number).copied();
        let max = max.ok_or(refuse(CommandStatus::BAD_RESOURCE, 0x0917_0001))?;
        if modify.modify_bitmask.get() != MODIFY_LIST {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0917_0002));
        }
        let list = self.table_list(&modify.context, max, input)?;
        self.install_table(number, max, list);
        done()
    }

    fn install_table(&mut self, number: u32, max: u16, list: Vec<u32>) {
        self.nic.set_table(number, list.clone());
        self.tables.insert(number, list);
        self.table_sizes.insert(number, max);
    }

    pub(super) fn destroy_table(&mut self, input: &Input) -> Answer {
        let number = input.object();
        if self.tables.remove(&number).is_none() {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0918_0001));
        }
        self.table_sizes.remove(&number);
        self.nic.remove_table(number);
        done()
    }

    /// The list of a table: receive queues that exist.
    fn table_list(
        &self,
        context: &RqtContext,
        max: u16,
        input: &Input,
    ) -> Result<Vec<u32>, Refusal> {
        let actual = context.actual_size.get();
        let kind = context.list_q_type & 7;
        if !actual.is_power_of_two() || actual > max || kind != LIST_OF_VIRTQUEUES {
            return Err(refuse(CommandStatus::BAD_PARAMETER, 0x0916_0002));
        }
        let list = input.words(size_of::<RqtIn>(), u32::from(actual));
        let list = list.ok_or(refuse(CommandStatus::BAD_INPUT_LENGTH, 0x0916_0003))?;
        let receives = |number: &u32| {
            self.virtqs.get(number).is_some_and(|virtq| virtq.queue.index.is_multiple_of(2))
        };
        if !list.iter().all(receives) {
            return Err(refuse(CommandStatus::BAD_RESOURCE, 0x0916_0004));
        }
        Ok(list)
    }

    pub(super) fn create_counters(&mut self) -> Answer {
        if self.counters.len() >= OBJECTS_MAX {
            return Err(refuse(CommandStatus::NO_RESOURCES, 0x0a00_0011));
        }
        let number = self.next_object();
        self.counters.insert(number, QueueCounts::default());
        general(number)
    }

    /// What a queue that is gone has counted stays with its counters.
    pub(super) fn keep_counts(&mut self, number: u32, counts: QueueCounts) {
        if let Some(kept) = self.counters.get_mut(&number) {
            *kept = kept.plus(counts);
        }
    }

    pub(super) fn query_counters(&self, input: &Input) -> Answer {
        let query: GeneralObjectIn = parse(&input.head)?;
        let number = query.obj_id.get();
        let kept = self.counters.get(&number);
        let kept = *kept.ok_or(refuse(CommandStatus::BAD_RESOURCE, 0x0a02_0011))?;
        let users = self.virtqs.values().filter(|virtq| virtq.counter_set() == number);
        let all = users.fold(kept, |all, virtq| all.plus(virtq.queue.lock().counts));
        let mut object = VirtqCounters::new_zeroed();
        object.received_desc = U64::new(all.received_descriptors);
        object.completed_desc = U64::new(all.completed_descriptors);
        object.error_cqes = U32::new(all.error_completions);
        object.bad_desc_errors = U32::new(all.bad_descriptors);
        object.exceed_max_chain = U32::new(all.chain_too_long);
        object.invalid_buffer = U32::new(all.invalid_buffers);
        bytes(&QueryCountersOut { header: general_header(number), object })
    }

    pub(super) fn destroy_counters(&mut self, input: &Input) -> Answer {
        let destroy: GeneralObjectIn = parse(&input.head)?;
        let number = destroy.obj_id.get();
        if self.virtqs.values().any(|virtq| virtq.counter_set() == number) {
            return Err(refuse(CommandStatus::RESOURCE_BUSY, 0x0a03_0011));
        }
        match self.counters.remove(&number) {
            Some(_) => done(),
            None => Err(refuse(CommandStatus::BAD_RESOURCE, 0x0a03_0012)),
        }
    }
}

impl QueueCounts {
    fn plus(self, other: QueueCounts) -> QueueCounts {
        QueueCounts {
            received_descriptors: self.received_descriptors + other.received_descriptors,
            completed_descriptors: self.completed_descriptors + other.completed_descriptors,
            error_completions: self.error_completions.wrapping_add(other.error_completions),
            bad_descriptors: self.bad_descriptors.wrapping_add(other.bad_descriptors),
            chain_too_long: self.chain_too_long.wrapping_add(other.chain_too_long),
            invalid_buffers: self.invalid_buffers.wrapping_add(other.invalid_buffers),
        }
    }
}
