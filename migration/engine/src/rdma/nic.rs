//! The queue pairs of one migration over some provider, in the numbers of [`martlet_rdma`].

use super::errands::{Done, Errands, Populate};
use super::provider::Provider;
use martlet_device_io::HostMemory;
use martlet_ram::{GuestRam, RegionIndex};
use martlet_rdma::{MARKER_RECEIVES, PageSpan, Post, QueueIndex, UnitIndex, Work};
use martlet_transport::Wake;
use martlet_units::PAGE_SIZE;
use martlet_verbs::ibv::{Ibv, Select};
use martlet_verbs::{
    Access, Completion, ConnectRequest, Endpoint, Fabric, Link, Listener, Lkey, Operation,
    QueuePair, RemoteAddress, Rkey, Setup, Sge, Signal, WorkId, WorkRequest,
};
use martlet_verbs_soft::Soft;
use martlet_wire::rdma::{QueueHello, WireProvider};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that may be in flight on a queue pair.
const SEND_SLOTS: u32 = 256;

/// How long all queue pairs together may take to be connected. Less than what the peer may be
/// silent, because the thread that says something is the one that connects.
const CONNECT_MAX: Duration = Duration::from_secs(4);

/// How long they may take to come, and to be let in. The source begins once the terms are agreed.
const ACCEPT_MAX: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 8000 });

/// Completions taken at a time.
const POLL_BATCH: usize = 32;

/// What the links need of a provider; hides its types.
pub(super) trait Nic: Send {
    /// What to call it.
    fn name(&self) -> String;
    /// Connects all queue pairs; how many requests each takes.
    fn connect(&mut self, to: SocketAddr, queues: u16, token: [u8; 16]) -> Result<u32, String>;
    /// Starts to let queue pairs in, at this address and the port that is returned.
    fn listen(&mut self, at: SocketAddr) -> Result<u16, String>;
    /// Lets in what comes within `limit`; whether all queue pairs are there.
    fn accept(&mut self, queues: u16, token: [u8; 16], limit: Duration) -> Result<bool, String>;
    /// Posts a list on one queue pair.
    fn post(&mut self, queue: QueueIndex, list: &[Post]) -> Result<(), String>;
    /// Posts a receive for a marker.
    fn post_receive(&mut self, queue: QueueIndex) -> Result<(), String>;
    /// Takes what completions there are, and then says which queue pair is down.
    fn poll(
        &mut self,
        into: &mut Vec<(QueueIndex, Completion)>,
    ) -> Result<Option<QueueIndex>, String>;
    /// Waits for completions of this queue pair; may return early.
    fn wait(
        &mut self,
        queue: QueueIndex,
        limit: Duration,
        into: &mut Vec<(QueueIndex, Completion)>,
    ) -> Result<(), String>;
    /// Lets nobody in any more, closes all queue pairs and takes what completions are left.
    fn close(&mut self, into: &mut Vec<(QueueIndex, Completion)>);
    /// Registers pages in the background.
    fn register(&mut self, unit: UnitIndex, pages: PageSpan, access: Access);
    /// Deregisters a unit in the background.
    fn deregister(&mut self, unit: UnitIndex);
    /// A registration that is done.
    fn take_done(&mut self) -> Option<Done>;
    /// Whether there is one.
    fn is_any_done(&self) -> bool;
    /// Raised when there is one.
    fn wake(&self) -> &Wake;
}

/// Opens the device that a source reaches `to` by.
pub(super) fn open_towards(
    provider: WireProvider,
    to: SocketAddr,
    ram: &Arc<GuestRam>,
) -> Result<Box<dyn Nic>, String> {
    match provider {
        WireProvider::IBV => {
            let fabric = Ibv::open(&Select::Route(to)).map_err(|error| crate::chain(&error))?;
            Over::open(fabric, true, ram)
        }
        WireProvider::SOFT => Over::open(Soft::new(), false, ram),
        WireProvider(other) => Err(format!("the destination has an unknown provider, {other}")),
    }
}

/// Opens the device that a destination is reached by at `at`.
pub(super) fn open_at(
    provider: Provider,
    at: SocketAddr,
    ram: &Arc<GuestRam>,
) -> Result<(Box<dyn Nic>, WireProvider), String> {
    let ibv = || Ibv::open(&Select::Local(at.ip())).map_err(|error| crate::chain(&error));
    let soft = || Over::open(Soft::new(), false, ram).map(|nic| (nic, WireProvider::SOFT));
    match provider {
        Provider::Ibv => Ok((Over::open(ibv()?, true, ram)?, WireProvider::IBV)),
        Provider::Soft => soft(),
        Provider::Auto => match ibv() {
            Ok(fabric) => Ok((Over::open(fabric, true, ram)?, WireProvider::IBV)),
            Err(_) => soft(),
        },
    }
}

/// A [`Nic`] over a fabric.
struct Over<F: Fabric> {
    fabric: Arc<F>,
    /// The device pins pages, so it is better if they are there before.
    pins: bool,
    ram: Arc<GuestRam>,
    memory: Vec<HostMemory>,
    errands: Errands,
    listener: Option<F::Listener>,
    /// Until when queue pairs are let in, once they are awaited.
    accept_until: Option<Instant>,
    pairs: Vec<Option<F::Pair>>,
    list: Vec<WorkRequest>,
    next_receive: u64,
}

impl<F: Fabric> Over<F> {
    fn open(fabric: F, pins: bool, ram: &Arc<GuestRam>) -> Result<Box<dyn Nic>, String> {
        let fabric = Arc::new(fabric);
        let threads = |error: io::Error| format!("cannot start threads: {error}");
        let errands = Errands::start(&fabric).map_err(threads)?;
        let regions = (0..).map(RegionIndex).zip(ram.regions());
        Ok(Box::new(Over {
            fabric,
            pins,
            memory: regions.map(|(index, _)| ram.host_memory(index)).collect(),
            ram: Arc::clone(ram),
            errands,
            listener: None,
            accept_until: None,
            pairs: Vec::new(),
            list: Vec::new(),
            next_receive: 0,
        }))
    }

    fn setup(&self) -> Setup {
        let limits = self.fabric.limits();
        let send_slots = SEND_SLOTS.min(limits.queue_slots_max);
        let receive_slots = (4 * MARKER_RECEIVES).min(limits.queue_slots_max);
        Setup { send_slots, receive_slots, completion_slots: send_slots, ..Setup::default() }
    }

    fn pair(&mut self, queue: QueueIndex) -> Result<&mut F::Pair, String> {
        let pair = self.pairs.get_mut(usize::from(queue.0)).and_then(Option::as_mut);
        pair.ok_or_else(|| format!("queue pair {} is closed", queue.0))
    }

    fn local(&self, pages: PageSpan) -> u64 {
        self.memory[usize::from(pages.region().0)].address() + pages.first_page() * PAGE_SIZE
    }

    fn request(&self, post: &Post) -> WorkRequest {
        let (operation, local) = match post.work {
            Work::Write { pages, local, to, remote } => {
                let bytes = u32::try_from(pages.bytes()).expect("a message is at most 2 MiB");
                let local = Sge { address: self.local(pages), bytes, key: Lkey(local.0) };
                (Operation::Write { to: RemoteAddress(to), key: Rkey(remote.0) }, local)
            }
            Work::Marker { round } => {
                let (to, key) = (RemoteAddress(0), Rkey(0));
                let operation = Operation::WriteWithImmediate { to, key, immediate: round };
                (operation, Sge::default())
            }
        };
        let signal = if post.signalled { Signal::Completion } else { Signal::None };
        WorkRequest { id: WorkId(post.sequence.0), operation, local, signal }
    }

    /// Lets one queue pair in, if it belongs to this migration.
    fn admit(
        &mut self,
        request: <F::Listener as Listener>::Request,
        token: [u8; 16],
        limit: Duration,
    ) -> Result<(), String> {
        let hello = QueueHello::parse(request.private_data());
        let free = hello.ok().filter(|hello| hello.token == token).and_then(|hello| {
            let place = usize::from(hello.queue);
            self.pairs.get(place).is_some_and(Option::is_none).then_some(place)
        });
        let Some(place) = free else {
            // Not of this migration: turned away, and nobody is disturbed.
            let _ = request.reject(&[]);
            return Ok(());
        };
        let error = |error| crate::chain(&error);
        let setup = self.setup();
        let mut pair = request.accept(&setup, &[], limit).map_err(error)?;
        let ids: Vec<WorkId> = (0..u64::from(MARKER_RECEIVES)).map(WorkId).collect();
        pair.post_receives(&ids).map_err(|error| crate::chain(&error))?;
        self.pairs[place] = Some(pair);
        Ok(())
    }
}

/// Takes all completions of a queue pair.
fn drain<P: QueuePair>(
    queue: QueueIndex,
    pair: &mut P,
    into: &mut Vec<(QueueIndex, Completion)>,
) -> Result<(), String> {
    let mut batch = [Completion::default(); POLL_BATCH];
    loop {
        let got = pair.poll(&mut batch).map_err(|error| crate::chain(&error))?;
        into.extend(batch[..got].iter().map(|completion| (queue, *completion)));
        if got < batch.len() {
            return Ok(());
        }
    }
}

fn numbered<P>(pairs: &mut [Option<P>]) -> impl Iterator<Item = (QueueIndex, &mut P)> {
    let pairs = (0..).map(QueueIndex).zip(pairs);
    pairs.filter_map(|(queue, pair)| Some((queue, pair.as_mut()?)))
}

impl<F: Fabric> Nic for Over<F> {
    fn name(&self) -> String {
        self.fabric.name()
    }

    fn connect(&mut self, to: SocketAddr, queues: u16, token: [u8; 16]) -> Result<u32, String> {
        let (setup, deadline) = (self.setup(), Instant::now() + CONNECT_MAX);
        let mut slots = u32::MAX;
        for queue in 0..queues {
            let limit = deadline.saturating_duration_since(Instant::now());
            let hello = QueueHello { queue, token }.to_bytes();
            let connected = self.fabric.connect(&Endpoint::Ip(to), &setup, &hello, limit);
            let (pair, _) = connected.map_err(|error| crate::chain(&error))?;
            slots = slots.min(pair.send_slots());
            self.pairs.push(Some(pair));
        }
        Ok(slots)
    }

    fn listen(&mut self, at: SocketAddr) -> Result<u16, String> {
        let at = Endpoint::Ip(SocketAddr::new(at.ip(), 0));
        let listener = self.fabric.listen(&at).map_err(|error| crate::chain(&error))?;
        let Endpoint::Ip(local) = listener.local() else {
            return Err("a listener without a port".to_owned());
        };
        self.listener = Some(listener);
        Ok(local.port())
    }

    fn accept(&mut self, queues: u16, token: [u8; 16], limit: Duration) -> Result<bool, String> {
        self.pairs.resize_with(usize::from(queues), || None);
        let until = *self.accept_until.get_or_insert_with(|| Instant::now() + ACCEPT_MAX);
        let Some(listener) = &mut self.listener else { return Ok(true) };
        let request = listener.accept(limit).map_err(|error| crate::chain(&error))?;
        if let Some(request) = request {
            let left = until.saturating_duration_since(Instant::now());
            self.admit(request, token, left)?;
        }
        if self.pairs.iter().all(Option::is_some) {
            self.listener = None;
            return Ok(true);
        }
        if until <= Instant::now() {
            return Err(format!("{queues} queue pairs did not come within {ACCEPT_MAX:?}"));
        }
        Ok(false)
    }

    fn post(&mut self, queue: QueueIndex, list: &[Post]) -> Result<(), String> {
        let mut requests = std::mem::take(&mut self.list);
        requests.clear();
        requests.extend(list.iter().map(|post| self.request(post)));
        let posted = self.pair(queue)?.post(&requests).map_err(|error| crate::chain(&error));
        self.list = requests;
        posted
    }

    fn post_receive(&mut self, queue: QueueIndex) -> Result<(), String> {
        self.next_receive += 1;
        let id = WorkId(self.next_receive);
        self.pair(queue)?.post_receives(&[id]).map_err(|error| crate::chain(&error))
    }

    fn poll(
        &mut self,
        into: &mut Vec<(QueueIndex, Completion)>,
    ) -> Result<Option<QueueIndex>, String> {
        let mut down = None;
        for (queue, pair) in numbered(&mut self.pairs) {
            // The link first: what completed before it went down is polled then.
            if pair.link() != Link::Up {
                down = down.or(Some(queue));
            }
            drain(queue, pair, into)?;
        }
        Ok(down)
    }

    fn wait(
        &mut self,
        queue: QueueIndex,
        limit: Duration,
        into: &mut Vec<(QueueIndex, Completion)>,
    ) -> Result<(), String> {
        let pair = self.pair(queue)?;
        pair.arm().map_err(|error| crate::chain(&error))?;
        // What came before the arming is not told of.
        drain(queue, pair, into)?;
        if into.is_empty() && pair.wait(limit).map_err(|error| crate::chain(&error))? {
            drain(queue, pair, into)?;
        }
        Ok(())
    }

    fn close(&mut self, into: &mut Vec<(QueueIndex, Completion)>) {
        self.listener = None;
        for (_, pair) in numbered(&mut self.pairs) {
            pair.disconnect();
        }
        for (queue, pair) in numbered(&mut self.pairs) {
            let _ = drain(queue, pair, into);
        }
        self.pairs.clear();
    }

    fn register(&mut self, unit: UnitIndex, pages: PageSpan, access: Access) {
        let memory = &self.memory[usize::from(pages.region().0)];
        let part = memory.slice(pages.first_page() * PAGE_SIZE, pages.bytes());
        let part = part.expect("pages of the guest are within its memory");
        let populate = (self.pins && access.contains(Access::REMOTE_WRITE)).then(|| Populate {
            ram: Arc::clone(&self.ram),
            region: pages.region(),
            pages: pages.first_page()..pages.end(),
        });
        self.errands.register(unit, part, access, populate);
    }

    fn deregister(&mut self, unit: UnitIndex) {
        self.errands.deregister(unit);
    }

    fn take_done(&mut self) -> Option<Done> {
        self.errands.take()
    }

    fn is_any_done(&self) -> bool {
        self.errands.is_any_done()
    }

    fn wake(&self) -> &Wake {
        self.errands.wake()
    }
}
