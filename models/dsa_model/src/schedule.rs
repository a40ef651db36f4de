//! Which engine works on what, and how fast.

use crate::check::{Place, Rules, check};
use crate::faults::{Fault, FaultPoint, at_operation};
use crate::memory::Memory;
use crate::operations::fabric_bytes;
use crate::state::{Batch, Drain, Ending, Land, Life, Operation, Owner, State, Todo, Waiting};
use crate::timing::ps;
use martlet_device_io::BusMemory;
use martlet_dsa_abi::{CompletionRecord, DESCRIPTOR_BYTES, Descriptor, Opcode, Status};
use martlet_units::Instant;
use std::collections::VecDeque;
use std::time::Duration;

impl State {
    /// Does everything that is due until `now`; when something is due next.
    pub(crate) fn turn(&mut self, now: Instant, bus: &dyn BusMemory) -> Option<Instant> {
        while self.life == Life::Running {
            self.dispatch_all(bus);
            let next = [self.next_finish(), self.landings.next_at()].into_iter().flatten().min();
            let Some(due) = next.filter(|next| *next <= now) else {
                self.pass_to(now);
                return next;
            };
            self.pass_to(due);
            self.finish_done();
            self.land_due(due, bus);
        }
        self.now = self.now.max(now);
        None
    }

    /// Lets time go by. No operation ends in between.
    fn pass_to(&mut self, to: Instant) {
        let passed = ps(to.since(self.now));
        self.now = self.now.max(to);
        let sharers = self.sharers();
        let operations = self.engines.iter_mut().filter_map(|engine| engine.operation.as_mut());
        for operation in operations.filter(|operation| !operation.ending.hangs) {
            if operation.work_ps > 0 {
                operation.work_ps = operation.work_ps.saturating_sub(passed / sharers);
            } else {
                operation.hold_ps = operation.hold_ps.saturating_sub(passed);
            }
        }
    }

    /// How many operations share the fabric; at least one, to divide by.
    fn sharers(&self) -> u64 {
        let working = self.engines.iter().filter_map(|engine| engine.operation.as_ref());
        let sharers = working.filter(|operation| !operation.ending.hangs && operation.work_ps > 0);
        u64::try_from(sharers.count()).unwrap_or(u64::MAX).max(1)
    }

    /// When an engine is done with something next.
    fn next_finish(&self) -> Option<Instant> {
        let sharers = self.sharers();
        let working = self.engines.iter().filter_map(|engine| engine.operation.as_ref());
        let left = working.filter(|operation| !operation.ending.hangs).map(|operation| {
            match operation.work_ps {
                0 => operation.hold_ps,
                work => work.saturating_mul(sharers),
            }
        });
        left.min().map(|left| self.now.after(Duration::from_nanos(left.div_ceil(1000))))
    }

    fn finish_done(&mut self) {
        let latency = self.config.timing.latency;
        for index in 0..self.engines.len() {
            let Some(engine) = self.engines.get_mut(index) else { continue };
            let is_done = |operation: &Operation| {
                operation.work_ps == 0 && operation.hold_ps == 0 && !operation.ending.hangs
            };
            if engine.operation.as_ref().is_some_and(is_done)
                && let Some(operation) = engine.operation.take()
            {
                let at = self.now.after(latency).after(operation.ending.late);
                self.land_at(at, Land::Operation(operation));
            }
        }
    }

    /// Gives every idle engine something to do.
    pub(crate) fn dispatch_all(&mut self, bus: &dyn BusMemory) {
        for index in 0..self.engines.len() {
            let idle = self.engines.get(index).is_some_and(|engine| engine.operation.is_none());
            if !idle {
                continue;
            }
            let operation = self.next_operation(index, bus);
            if let Some(engine) = self.engines.get_mut(index) {
                engine.queue_first = operation.as_ref().is_some_and(|op| op.owner.in_batch);
                engine.operation = operation;
            }
        }
    }

    /// An engine takes turns between the queues and its batch, so that a descriptor is not held up
    /// by a batch that was submitted before it (seen on hardware by DSAssassin's authors).
    fn next_operation(&mut self, engine: usize, bus: &dyn BusMemory) -> Option<Operation> {
        let queue_first = self.engines.get(engine).is_some_and(|engine| engine.queue_first);
        if queue_first {
            self.next_of_queues(engine, bus).or_else(|| self.next_of_batch(engine))
        } else {
            let member = self.next_of_batch(engine);
            member.or_else(|| self.next_of_queues(engine, bus))
        }
    }

    fn next_of_queues(&mut self, engine: usize, bus: &dyn BusMemory) -> Option<Operation> {
        loop {
            let queue = self.choose_queue(engine)?;
            let Waiting { number, descriptor } = self.queues.get_mut(queue)?.waiting.pop_front()?;
            let owner = Owner { queue, number, in_batch: false };
            match descriptor.opcode() {
                Opcode::BATCH => {
                    if let Some(refused) = self.start_batch(engine, owner, descriptor, bus) {
                        return Some(refused);
                    }
                    if let Some(member) = self.next_of_batch(engine) {
                        return Some(member);
                    }
                }
                Opcode::DRAIN if self.refusal(&descriptor, owner).is_none() => {
                    self.drains.push(Drain { owner, descriptor });
                    self.end_drains();
                }
                _ => return Some(self.prepare(owner, descriptor)),
            }
        }
    }

    /// The queue of the engine's group that is served next: smooth weighted round robin by
    /// priority. A queue whose head is a batch has to wait while the engine has one.
    fn choose_queue(&mut self, engine: usize) -> Option<usize> {
        let engine = self.engines.get(engine)?;
        let (group, has_batch) = (engine.group, engine.batch.is_some());
        let mut total = 0;
        let mut best: Option<(i64, usize)> = None;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let head = queue.waiting.front().map(|waiting| waiting.descriptor.opcode());
            let suits = head.is_some_and(|opcode| !(has_batch && opcode == Opcode::BATCH));
            if queue.config.group != group || !suits {
                continue;
            }
            let weight = i64::from(queue.config.priority);
            queue.credit += weight;
            total += weight;
            if best.is_none_or(|(credit, _)| queue.credit > credit) {
                best = Some((queue.credit, index));
            }
        }
        let (_, chosen) = best?;
        self.queues.get_mut(chosen)?.credit -= total;
        Some(chosen)
    }

    fn next_of_batch(&mut self, engine: usize) -> Option<Operation> {
        let number = self.engines.get(engine)?.batch?;
        let batch = self.batches.get_mut(&number)?;
        let member = batch.members.pop_front()?;
        batch.dispatched += 1;
        let owner = Owner { in_batch: true, ..batch.owner };
        if batch.members.is_empty() {
            self.leave_batch(engine, number);
        }
        Some(self.prepare(owner, member))
    }

    /// The engine has handed out all descriptors of its batch.
    fn leave_batch(&mut self, engine: usize, number: u64) {
        if let Some(engine) = self.engines.get_mut(engine) {
            engine.batch = None;
        }
        self.end_batch_if_done(number);
    }

    fn refusal(&self, descriptor: &Descriptor, owner: Owner) -> Option<CompletionRecord> {
        let queue = &self.queues.get(owner.queue)?.config;
        let (operations, version) = (self.config.operations, self.config.version);
        let place = if owner.in_batch { Place::Batch } else { Place::Queue };
        check(descriptor, place, Rules { queue, operations, version }).err()
    }

    /// Reads a batch's list. Gives an operation instead if the batch was refused.
    fn start_batch(
        &mut self,
        engine: usize,
        owner: Owner,
        descriptor: Descriptor,
        bus: &dyn BusMemory,
    ) -> Option<Operation> {
        let fault = self.faults.strike(&FaultPoint::Batch);
        let refusal = self.refusal(&descriptor, owner).or(match fault {
            Some(Fault::Status(status)) => Some(CompletionRecord::new(status)),
            _ => None,
        });
        if let Some(record) = refusal {
            return Some(self.answer(owner, descriptor, record));
        }
        let ending = ending_of(fault);
        if ending.hangs {
            return Some(Operation {
                ending,
                ..self.answer(owner, descriptor, CompletionRecord::default())
            });
        }
        let list_limit = match fault {
            Some(Fault::ListFault { after }) => Some(after),
            _ => None,
        };
        let (mut members, list_fault) = self.read_list(&descriptor, list_limit, bus);
        if fault == Some(Fault::Reverse) {
            members.make_contiguous().reverse();
        }
        let is_empty = members.is_empty();
        let number = owner.number;
        let batch = Batch {
            owner,
            descriptor,
            members,
            dispatched: 0,
            landed: 0,
            failed: false,
            list_fault,
            ending,
        };
        self.batches.insert(number, batch);
        if is_empty {
            self.end_batch_if_done(number);
        } else if let Some(engine) = self.engines.get_mut(engine) {
            engine.batch = Some(number);
        }
        None
    }

    fn read_list(
        &self,
        descriptor: &Descriptor,
        limit: Option<u32>,
        bus: &dyn BusMemory,
    ) -> (VecDeque<Descriptor>, Option<CompletionRecord>) {
        let memory = Memory { bus, absent: &self.absent };
        let mut members = VecDeque::new();
        // The check has bounded the size by the queue's limit.
        for index in 0..descriptor.size() {
            let at = descriptor.source().wrapping_add(u64::from(index) * 64);
            let mut bytes = [0; DESCRIPTOR_BYTES];
            let read = memory.read(at, &mut bytes);
            if read.is_err() || limit.is_some_and(|limit| index >= limit) {
                let record = CompletionRecord::new(Status::BATCH_LIST_FAULT);
                let at = read.err().map_or(at, |fault| fault.at);
                return (members, Some(record.with_completed(index).with_fault_address(at)));
            }
            members.push_back(Descriptor::from_bytes(&bytes));
        }
        (members, None)
    }

    fn answer(&self, owner: Owner, descriptor: Descriptor, record: CompletionRecord) -> Operation {
        let work_ps = ps(self.config.timing.descriptor);
        let todo = Todo::Answer(record);
        Operation { owner, descriptor, todo, work_ps, hold_ps: 0, ending: Ending::default() }
    }

    /// What an engine has to do for a descriptor.
    fn prepare(&mut self, owner: Owner, descriptor: Descriptor) -> Operation {
        if let Some(record) = self.refusal(&descriptor, owner) {
            return self.answer(owner, descriptor, record);
        }
        let fault = at_operation(&mut self.faults, descriptor.opcode());
        let mut operation = self.answer(owner, descriptor, CompletionRecord::new(Status::SUCCESS));
        operation.ending = ending_of(fault);
        operation.todo = match fault {
            Some(Fault::Status(status)) => Todo::Answer(CompletionRecord::new(status)),
            Some(Fault::PageFault { after }) => Todo::Run { fault_after: Some(after) },
            _ => Todo::Run { fault_after: None },
        };
        let timing = &self.config.timing;
        let transfer = timing.transfer_ps(fabric_bytes(&descriptor));
        operation.work_ps = operation.work_ps.max(transfer);
        operation.hold_ps = self.fault_time(&descriptor);
        operation
    }

    /// How long missing pages hold an engine up.
    fn fault_time(&self, descriptor: &Descriptor) -> u64 {
        let (at, bytes) = (descriptor.source(), fabric_bytes(descriptor));
        if self.absent.has_any(at, bytes) { ps(self.config.timing.fault) } else { 0 }
    }

    /// Lets drains end behind which nothing is left.
    pub(crate) fn end_drains(&mut self) {
        let queues = &self.queues;
        let is_first = |drain: &mut Drain| {
            let queue = queues.get(drain.owner.queue);
            queue.and_then(|queue| queue.open.first()) == Some(&drain.owner.number)
        };
        let done: Vec<Drain> = self.drains.extract_if(.., is_first).collect();
        let at = self.now.after(self.config.timing.latency);
        for Drain { owner, descriptor } in done {
            let record = CompletionRecord::new(Status::SUCCESS);
            let operation = self.answer(owner, descriptor, record);
            self.land_at(at, Land::Operation(operation));
        }
    }
}

fn ending_of(fault: Option<Fault>) -> Ending {
    let none = Ending::default();
    match fault {
        Some(Fault::Hang) => Ending { hangs: true, ..none },
        Some(Fault::NoRecord) => Ending { silent: true, ..none },
        Some(Fault::Late(late)) => Ending { late, ..none },
        Some(Fault::Twice(again)) => Ending { again: Some(again), ..none },
        _ => none,
    }
}
