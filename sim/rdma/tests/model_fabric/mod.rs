//! The modelled NIC behind the verbs interface. Waiting moves the virtual clock.
#![allow(unsafe_code)]
// UNSAFETY: the modelled NIC reads and writes registered memory of this process, as a NIC does.

use martlet_device_io::HostMemory;
use martlet_fault_plan::FaultPlan;
use martlet_units::Instant;
use martlet_verbs::{
    ACCEPT_DATA_BYTES_MAX, Access, CONNECT_DATA_BYTES_MAX, Completion, ConnectRequest, Endpoint,
    Fabric, Limits, Link, Listener, Lkey, Operation, PostError, PostFault, QueueNumber, QueuePair,
    REJECT_DATA_BYTES_MAX, Region, RemoteAddress, Rkey, Setup, Side as Queue, Signal, Status,
    VerbsError, WorkId, WorkRequest,
};
use martlet_verbs_model as model;
use model::{Key, Memory, Network, PairId, Params, Side};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The memory of this process.
struct Process;

impl Memory for Process {
    fn read(&mut self, _: Side, address: u64, into: &mut [u8]) {
        for (index, byte) in into.iter_mut().enumerate() {
            // SAFETY: the model has checked that a region covers it; a region keeps its memory.
            // Volatile, because the program may write it meanwhile.
            *byte = unsafe { at(address).wrapping_add(index).read_volatile() };
        }
    }

    fn write(&mut self, _: Side, address: u64, bytes: &[u8]) {
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: as for reading.
            unsafe { at(address).wrapping_add(index).write_volatile(*byte) };
        }
    }
}

fn at(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).expect("of this process"))
}

/// A connection request that waits for an answer.
struct Knock {
    data: Vec<u8>,
    setup: Setup,
    answer: Sender<Answer>,
}

enum Answer {
    Accepted(PairId, Vec<u8>),
    Rejected(Vec<u8>),
}

struct State {
    net: Network,
    now: Instant,
    knocks: VecDeque<Knock>,
}

struct World {
    state: Mutex<State>,
    knocked: Condvar,
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of the two NICs.
pub(crate) struct ModelFabric {
    side: Side,
    world: Arc<World>,
}

impl ModelFabric {
    /// Both: the one that connects first, the one that listens second.
    pub(crate) fn two() -> (ModelFabric, ModelFabric) {
        let params = Params {
            content: true,
            segment_bytes: 64 << 10,
            retry_timeout: Duration::from_millis(1),
            ..Params::ROCE_100G
        };
        let net = Network::new(params, 0, FaultPlan::default());
        let state = State { net, now: Instant(0), knocks: VecDeque::new() };
        let world = Arc::new(World { state: Mutex::new(state), knocked: Condvar::new() });
        let fabric = |side| ModelFabric { side, world: Arc::clone(&world) };
        (fabric(Side::A), fabric(Side::B))
    }
}

fn check(what: &'static str, length: usize, limit: usize) -> Result<(), VerbsError> {
    let (asked, limit) = (length as u64, limit as u64);
    if asked <= limit { Ok(()) } else { Err(VerbsError::Limit { what, asked, limit }) }
}

impl Fabric for ModelFabric {
    type Region = ModelRegion;
    type Pair = ModelPair;
    type Listener = ModelListener;

    fn name(&self) -> String {
        "model".to_owned()
    }

    fn limits(&self) -> Limits {
        Limits {
            queue_slots_max: 1 << 16,
            completion_slots_max: 1 << 16,
            regions_max: 1 << 20,
            region_bytes_max: 1 << 40,
            on_demand: false,
        }
    }

    fn register(&self, memory: &HostMemory, access: Access) -> Result<ModelRegion, VerbsError> {
        let access = model::Access {
            local_write: access.contains(Access::LOCAL_WRITE),
            remote_write: access.contains(Access::REMOTE_WRITE),
            remote_read: access.contains(Access::REMOTE_READ),
        };
        let (address, bytes) = (memory.address(), memory.bytes());
        let key = self.world.lock().net.register(self.side, address, bytes, access);
        let world = Arc::clone(&self.world);
        Ok(ModelRegion { side: self.side, world, key, memory: memory.clone() })
    }

    fn connect(
        &self,
        _: &Endpoint,
        setup: &Setup,
        data: &[u8],
        limit: Duration,
    ) -> Result<(ModelPair, Vec<u8>), VerbsError> {
        check("the private data's length", data.len(), CONNECT_DATA_BYTES_MAX)?;
        let (answer, answered): (_, Receiver<Answer>) = channel();
        let knock = Knock { data: data.to_vec(), setup: *setup, answer };
        self.world.lock().knocks.push_back(knock);
        self.world.knocked.notify_all();
        match answered.recv_timeout(limit) {
            Ok(Answer::Accepted(pair, data)) => {
                let world = Arc::clone(&self.world);
                Ok((ModelPair { side: self.side, world, pair, slots: setup.send_slots }, data))
            }
            Ok(Answer::Rejected(private_data)) => {
                Err(VerbsError::Rejected { reason: 28, private_data })
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(VerbsError::Rejected { reason: 28, private_data: Vec::new() })
            }
            Err(RecvTimeoutError::Timeout) => {
                let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
                Err(VerbsError::Timeout { action: "connecting", limit_ms })
            }
        }
    }

    fn listen(&self, at: &Endpoint) -> Result<ModelListener, VerbsError> {
        let (side, world) = (self.side, Arc::clone(&self.world));
        Ok(ModelListener { side, world, at: at.clone() })
    }
}

/// Registered memory.
pub(crate) struct ModelRegion {
    side: Side,
    world: Arc<World>,
    key: Key,
    memory: HostMemory,
}

impl Region for ModelRegion {
    fn local_key(&self) -> Lkey {
        Lkey(self.key.0)
    }

    fn remote_key(&self) -> Rkey {
        Rkey(self.key.0)
    }

    fn address(&self) -> RemoteAddress {
        RemoteAddress(self.memory.address())
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn deregister(self) -> Result<(), VerbsError> {
        Ok(())
    }
}

impl Drop for ModelRegion {
    fn drop(&mut self) {
        self.world.lock().net.deregister(self.side, self.key);
    }
}

/// One end of a connection.
pub(crate) struct ModelPair {
    side: Side,
    world: Arc<World>,
    pair: PairId,
    slots: u32,
}

impl ModelPair {
    fn link_of(&self, state: &State) -> Link {
        match state.net.link(self.side, self.pair) {
            model::Link::Up => Link::Up,
            model::Link::Disconnected => Link::Disconnected,
            model::Link::Failed => Link::Failed,
        }
    }
}

impl QueuePair for ModelPair {
    fn number(&self) -> QueueNumber {
        QueueNumber(u32::try_from(self.pair.0).unwrap_or(u32::MAX))
    }

    fn send_slots(&self) -> u32 {
        self.slots
    }

    fn post(&mut self, list: &[WorkRequest]) -> Result<(), PostError> {
        let list: Vec<model::Request> = list.iter().map(request).collect();
        let mut state = self.world.lock();
        let now = state.now;
        state.net.post(self.side, self.pair, now, &list).map_err(|error| match error {
            model::PostError::Full(posted) => PostError { posted, cause: PostFault::Full },
            model::PostError::Closed => {
                PostError { posted: 0, cause: PostFault::Invalid("the queue pair is closed") }
            }
        })
    }

    fn post_receives(&mut self, ids: &[WorkId]) -> Result<(), PostError> {
        let mut state = self.world.lock();
        ids.iter().for_each(|id| state.net.post_receive(self.side, self.pair, id.0));
        Ok(())
    }

    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut state = self.world.lock();
        let mut count = 0;
        while count < into.len()
            && let Some(completion) = state.net.poll(self.side, self.pair)
        {
            into[count] = Completion {
                id: WorkId(completion.id),
                side: if completion.is_receive { Queue::Receive } else { Queue::Send },
                status: Status(completion.status.0),
                immediate: completion.immediate,
            };
            count += 1;
        }
        Ok(count)
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        Ok(())
    }

    /// Lets virtual time pass until there is something to tell.
    fn wait(&mut self, limit: Duration) -> Result<bool, VerbsError> {
        let mut state = self.world.lock();
        let before = self.link_of(&state);
        let until = state.now.after(limit);
        loop {
            if state.net.has_completion(self.side, self.pair) || self.link_of(&state) != before {
                return Ok(true);
            }
            match state.net.next_event() {
                Some(next) if next <= until => {
                    state.now = state.now.max(next);
                    let now = state.now;
                    state.net.advance(now, &mut Process);
                }
                Some(_) | None => {
                    state.now = until;
                    return Ok(false);
                }
            }
        }
    }

    fn link(&mut self) -> Link {
        self.link_of(&self.world.lock())
    }

    fn disconnect(&mut self) {
        let mut state = self.world.lock();
        let now = state.now;
        state.net.disconnect(self.side, self.pair, now);
    }
}

impl Drop for ModelPair {
    fn drop(&mut self) {
        self.disconnect();
    }
}

fn request(request: &WorkRequest) -> model::Request {
    let operation = match request.operation {
        Operation::Write { to, key } => model::Operation::Write { to: to.0, key: Key(key.0) },
        Operation::WriteWithImmediate { to, key, immediate } => {
            model::Operation::WriteWithImmediate { to: to.0, key: Key(key.0), immediate }
        }
        Operation::Read { from, key } => model::Operation::Read { at: from.0, key: Key(key.0) },
    };
    model::Request {
        id: request.id.0,
        operation,
        local_at: request.local.address,
        bytes: u64::from(request.local.bytes),
        local: Key(request.local.key.0),
        signalled: request.signal == Signal::Completion,
    }
}

/// Waits for connections.
pub(crate) struct ModelListener {
    side: Side,
    world: Arc<World>,
    at: Endpoint,
}

impl Listener for ModelListener {
    type Pair = ModelPair;
    type Request = ModelRequest;

    fn local(&self) -> Endpoint {
        self.at.clone()
    }

    fn accept(&mut self, limit: Duration) -> Result<Option<ModelRequest>, VerbsError> {
        let state = self.world.lock();
        let waited = self.world.knocked.wait_timeout_while(state, limit, |s| s.knocks.is_empty());
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let knock = state.knocks.pop_front();
        let (side, world) = (self.side, &self.world);
        Ok(knock.map(|knock| ModelRequest { side, world: Arc::clone(world), knock }))
    }
}

/// A connection request. Dropped, its other end hears of nothing but the end.
pub(crate) struct ModelRequest {
    side: Side,
    world: Arc<World>,
    knock: Knock,
}

impl ConnectRequest for ModelRequest {
    type Pair = ModelPair;

    fn private_data(&self) -> &[u8] {
        &self.knock.data
    }

    fn accept(self, setup: &Setup, data: &[u8], _: Duration) -> Result<ModelPair, VerbsError> {
        check("the private data's length", data.len(), ACCEPT_DATA_BYTES_MAX)?;
        let slots = self.knock.setup.send_slots.max(setup.send_slots);
        let pair = {
            let mut state = self.world.lock();
            let pair = state.net.connect(usize::try_from(slots).expect("fits"));
            let retries = self.knock.setup.rnr_retries;
            state.net.set_rnr_retries(self.side.other(), pair, retries);
            state.net.set_rnr_retries(self.side, pair, setup.rnr_retries);
            pair
        };
        // Whoever has given up meanwhile is not there to be told.
        let _ = self.knock.answer.send(Answer::Accepted(pair, data.to_vec()));
        Ok(ModelPair { side: self.side, world: self.world, pair, slots })
    }

    fn reject(self, data: &[u8]) -> Result<(), VerbsError> {
        check("the private data's length", data.len(), REJECT_DATA_BYTES_MAX)?;
        let _ = self.knock.answer.send(Answer::Rejected(data.to_vec()));
        Ok(())
    }
}
