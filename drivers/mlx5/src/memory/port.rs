//! Between the registry and a command queue.

use crate::command::{
    CommandError, CommandId, CommandQueue, Completion, InputWriter, LateCompletion, Message,
    Output, Request, SubmitError,
};
use crate::memory::build::ACTION;
use crate::memory::{KeyAnswer, KeyCommand, KeyContext, MemoryConfig, Refusal, Registry};
use martlet_device_io::Dma;
use martlet_mlx5_abi::CommandStatus;
use martlet_mlx5_abi::memory::CreateMkeyOut;
use martlet_units::Instant;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most commands without an answer, of those that were given up, whose late answers are waited
/// for. A device that has this many has no slot left.
const LOST_MAX: usize = 64;

/// How often the queue is asked again while it is busy with the commands of others, which may end
/// without an event for us.
const RETRY_EVERY: Duration = Duration::from_micros(50);

/// What came of [`KeyPort::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Issued {
    /// A command is in the queue: ring the doorbell and call again. While the device reads a long
    /// input, the next one is pinned and written.
    One,
    /// No command now: call again when something has ended or has been begun, and at
    /// [`KeyPort::poll_timeout`].
    Nothing,
}

/// A [`Registry`] at a [`CommandQueue`].
///
/// Who drives the queue calls [`poll`](KeyPort::poll) until it is not [`Issued::One`], whenever
/// something was begun, has ended or is due; and gives late answers to
/// [`on_late`](KeyPort::on_late).
///
/// ```text
/// set_map   begin_set_map -> [ poll, doorbell | wait ]* -> poll_set_map
///           -> queues get the key -> install -> while must_delete: [ ... ]*
/// service   poll, doorbell; release_one, outside of a lock that set_map needs -> poll_timeout
/// shutdown  install(None), drop all MapRefs -> begin_drain -> [ ... ]* -> poll_drained
///           -> TEARDOWN_HCA -> forget_all
/// ```
///
/// A port that is not polled issues nothing: so a suspend that must not share the queue with late
/// deletions leaves the port alone until the resume.
pub(crate) struct KeyPort {
    registry: Registry,
    deadline: Duration,
    /// A command that the queue has not taken yet.
    waiting: Option<(u64, Request)>,
    /// Since when it has not, with nothing of our own in the queue.
    refused_since: Option<Instant>,
    /// Tags of commands without an answer.
    flying: BTreeMap<CommandId, u64>,
    /// Tags of commands that were given up.
    lost: BTreeMap<CommandId, u64>,
}

impl KeyPort {
    /// A registry whose commands are given up after `deadline`.
    pub(crate) fn new(config: MemoryConfig, context: KeyContext, deadline: Duration) -> KeyPort {
        let registry = Registry::new(config, context);
        let (flying, lost) = (BTreeMap::new(), BTreeMap::new());
        KeyPort { registry, deadline, waiting: None, refused_since: None, flying, lost }
    }

    /// The keys.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The keys. Commands and answers go through the port only.
    pub(crate) fn registry_mut(&mut self) -> &mut Registry {
        &mut self.registry
    }

    /// Gets the next command ready, if one has its turn, without the queue: what takes long is
    /// pinning memory, and others may need the queue meanwhile. [`KeyPort::poll`] does it too if it
    /// has not been done.
    pub(crate) fn prepare(&mut self, now: Instant, dma: &dyn Dma) {
        if self.waiting.is_none() {
            self.waiting = self.registry.poll_command(dma, now).map(request);
        }
    }

    /// Takes what has ended, then puts the next command into the queue, if one has its turn and
    /// the queue takes it. Writes its input, and takes as long as that.
    pub(crate) fn poll(&mut self, now: Instant, queue: &mut CommandQueue, dma: &dyn Dma) -> Issued {
        self.collect(queue);
        loop {
            let next = self.waiting.take();
            let next = next.or_else(|| self.registry.poll_command(dma, now).map(request));
            let Some((tag, request)) = next else { return Issued::Nothing };
            match queue.submit(now, self.deadline, &request) {
                Ok(id) => {
                    self.refused_since = None;
                    self.flying.insert(id, tag);
                    return Issued::One;
                }
                Err(SubmitError::Busy | SubmitError::NoMailboxes { .. })
                    if self.may_wait(now, queue) =>
                {
                    self.waiting = Some((tag, request));
                    return Issued::Nothing;
                }
                Err(error) => {
                    self.refused_since = None;
                    let error = CommandError::NotIssued { opcode: request.opcode, because: error };
                    self.registry.on_answer(tag, answer(&Err(error)), now);
                }
            }
        }
    }

    /// Whether the queue may take a command yet: something in it will end, and has not been waited
    /// for too long. Slots in quarantine may never come back.
    fn may_wait(&mut self, now: Instant, queue: &CommandQueue) -> bool {
        if !self.flying.is_empty() {
            return true;
        }
        let since = *self.refused_since.get_or_insert(now);
        !queue.is_idle() && now.since(since) < self.deadline
    }

    /// When to call [`KeyPort::poll`], or [`Registry::release_one`], even if nothing has happened.
    pub(crate) fn poll_timeout(&mut self, now: Instant) -> Option<Instant> {
        if self.waiting.is_some() {
            return self.flying.is_empty().then(|| now.after(RETRY_EVERY));
        }
        self.registry.next_due(now)
    }

    fn collect(&mut self, queue: &mut CommandQueue) {
        let flying = std::mem::take(&mut self.flying);
        for (id, tag) in flying {
            match queue.take_done(id) {
                Some(completion) => self.ended(tag, &completion),
                None => {
                    self.flying.insert(id, tag);
                }
            }
        }
    }

    fn ended(&mut self, tag: u64, completion: &Completion) {
        let answer = answer(&completion.result);
        if matches!(answer, KeyAnswer::Lost { .. }) {
            self.lost.insert(completion.id, tag);
            if self.lost.len() > LOST_MAX {
                self.lost.pop_first();
            }
        }
        self.registry.on_answer(tag, answer, completion.at);
    }

    /// Takes a late completion, if it is one of the port's; whether it was.
    pub(crate) fn on_late(&mut self, late: &LateCompletion) -> bool {
        let Some(tag) = self.lost.remove(&late.id) else { return false };
        self.registry.on_late_answer(tag, &answer(&late.result));
        true
    }
}

fn request(command: KeyCommand) -> (u64, Request) {
    (command.tag(), command.into_request())
}

impl KeyCommand {
    /// What is asked of the firmware.
    pub(crate) fn into_request(self) -> Request {
        Request::lazy(self.opcode(), self, size_of::<CreateMkeyOut>())
    }
}

/// What the outcome of a command means for its key. The number in the output of DESTROY_MKEY means
/// nothing.
fn answer(result: &Result<Output, CommandError>) -> KeyAnswer {
    let index = match result {
        Ok(output) => output.read::<CreateMkeyOut>().map(|output| output.mkey_index.get()),
        Err(error) => Err(error.clone()),
    };
    let failed = &match index {
        Ok(index) => return KeyAnswer::Done { index },
        Err(error) => error,
    };
    let error = crate::queues::vdpa_error(ACTION, failed);
    if failed.may_be_done() {
        return KeyAnswer::Lost { error };
    }
    let why = match failed {
        CommandError::Status { status, .. } => match *status {
            CommandStatus::LIMIT | CommandStatus::NO_RESOURCES => Refusal::NoRoom,
            CommandStatus::RESOURCE_BUSY | CommandStatus::NOT_READY => Refusal::Busy,
            _ => Refusal::Final,
        },
        // Slots come back with late answers.
        CommandError::NotIssued {
            because: SubmitError::Busy | SubmitError::NoMailboxes { .. },
            ..
        } => Refusal::Busy,
        _ => Refusal::Final,
    };
    KeyAnswer::Refused { why, error }
}

impl Message for KeyCommand {
    fn bytes(&self) -> usize {
        self.input_bytes()
    }

    fn write(&self, to: &mut InputWriter<'_>) {
        let mut block = [0; 512];
        let bytes = self.input_bytes();
        for offset in (0..bytes).step_by(block.len()) {
            let part = &mut block[..(bytes - offset).min(512)];
            self.fill(offset, part);
            to.write(part);
        }
    }
}
