//! The end of operations and batches: their effect on memory, and their records.

use crate::memory::Memory;
use crate::operations;
use crate::state::{Land, Operation, Owner, State, Todo};
use martlet_device_io::BusMemory;
use martlet_dsa_abi::{CompletionRecord, Descriptor, Flags, Status};
use martlet_units::Instant;

impl State {
    /// Ends what is due until `now`.
    pub(crate) fn land_due(&mut self, now: Instant, bus: &dyn BusMemory) {
        while let Some((_, land)) = self.landings.take_due(now) {
            match land {
                Land::Operation(operation) => self.land_operation(&operation, bus),
                Land::Batch(number) => self.land_batch(number, bus),
                Land::Again { completion, record } => self.write_record(completion, record, bus),
            }
        }
    }

    fn land_operation(&mut self, operation: &Operation, bus: &dyn BusMemory) {
        let &Operation { owner, descriptor, todo, ending, .. } = operation;
        let record = match todo {
            Todo::Answer(record) => record,
            Todo::Run { fault_after } => {
                let memory = Memory { bus, absent: &self.absent };
                operations::run(&memory, &descriptor, fault_after)
            }
        };
        self.counters.operations += 1;
        let faulted = record.status() == Status::PAGE_FAULT;
        self.counters.page_faults += u64::from(faulted);
        if !ending.silent {
            self.complete(&descriptor, record, bus);
        }
        if let Some(after) = ending.again {
            let again = Land::Again { completion: descriptor.completion(), record };
            self.land_at(self.now.after(after), again);
        }
        if owner.in_batch {
            self.member_landed(owner.number, record.status());
        } else {
            self.close(owner);
        }
    }

    fn member_landed(&mut self, number: u64, status: Status) {
        if let Some(batch) = self.batches.get_mut(&number) {
            batch.landed += 1;
            batch.failed |= status != Status::SUCCESS;
        }
        self.end_batch_if_done(number);
    }

    /// Puts the end of a batch whose descriptors have all ended.
    pub(crate) fn end_batch_if_done(&mut self, number: u64) {
        let Some(batch) = self.batches.get(&number) else { return };
        if batch.members.is_empty() && batch.landed == batch.dispatched {
            self.land_at(self.now.after(batch.ending.late), Land::Batch(number));
        }
    }

    fn land_batch(&mut self, number: u64, bus: &dyn BusMemory) {
        let Some(batch) = self.batches.remove(&number) else { return };
        let status = if batch.failed { Status::BATCH_FAILED } else { Status::SUCCESS };
        let told = CompletionRecord::new(status).with_completed(batch.landed);
        let record = batch.list_fault.unwrap_or(told);
        self.counters.batches += 1;
        if !batch.ending.silent {
            self.complete(&batch.descriptor, record, bus);
        }
        if let Some(after) = batch.ending.again {
            let again = Land::Again { completion: batch.descriptor.completion(), record };
            self.land_at(self.now.after(after), again);
        }
        self.close(batch.owner);
    }

    /// A submission is done.
    fn close(&mut self, owner: Owner) {
        if let Some(queue) = self.queues.get_mut(owner.queue) {
            queue.open.remove(&owner.number);
        }
        self.end_drains();
    }

    /// Tells whoever submitted the descriptor, as far as it wants to know.
    fn complete(&mut self, descriptor: &Descriptor, record: CompletionRecord, bus: &dyn BusMemory) {
        let flags = descriptor.flags();
        let wanted = flags.contains(Flags::REQUEST_COMPLETION);
        self.woken |= flags.contains(Flags::INTERRUPT);
        if !wanted && record.status() == Status::SUCCESS {
            return;
        }
        if crate::check::has_record(descriptor) {
            self.write_record(descriptor.completion(), record, bus);
        } else {
            self.counters.records_lost += 1;
        }
    }

    /// Writes everything but the status, and then the status.
    fn write_record(&mut self, completion: u64, record: CompletionRecord, bus: &dyn BusMemory) {
        let memory = Memory { bus, absent: &self.absent };
        let [status, rest @ ..] = record.to_bytes();
        let written = memory
            .write(completion.wrapping_add(1), &rest)
            .and_then(|()| memory.publish(completion, status));
        match written {
            Ok(()) => self.woken = true,
            Err(_) => self.counters.records_lost += 1,
        }
    }
}
