//! The source's end.

use super::errands::Done;
use super::messages::{MESSAGES_AT_ONCE, MessageError, Messages};
use super::nic::{self, Nic};
use super::provider::{Provider, RdmaOptions};
use martlet_ram::{GuestRam, Run};
use martlet_rdma::{
    Drain, LocalKey, Offered, PageSpan, Post, QueueIndex, Source, SourceAction, WorkCompletion,
    WorkSequence, WorkStatus,
};
use martlet_transport::{Stream, Wake, monotonic_now, wait_any};
use martlet_units::Instant;
use martlet_verbs::{Access, Completion, Side};
use martlet_wire::rdma::{QueueAddress, RdmaMessage, Terms, WireProvider};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// A wait for completions looks at everything else this often.
const COMPLETION_WAIT_MAX: Duration = Duration::from_micros(500);

/// A queue pair that went down without a request that failed: whoever took it down may be about to
/// say why, on the stream.
pub(super) const REASON_GRACE: Duration = Duration::from_millis(200);

/// What became of what was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// All of a round is in the destination's memory.
    Round {
        /// Which.
        round: u32,
    },
    /// RDMA is over early. Nothing more can land, and pages may go over the stream now.
    FellBack {
        /// Why, in one line.
        reason: String,
        /// How many rounds arrived in full.
        rounds: u32,
    },
}

/// How far requests of a queue pair have come.
#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    /// Requests that were posted.
    posted: u64,
    /// Requests that are known to be done.
    done: u64,
}

/// Writes guest memory by RDMA. See [`martlet_rdma::Source`] for what it promises.
pub(crate) struct RdmaSender {
    source: Source,
    messages: Messages,
    ram: Arc<GuestRam>,
    provider: Provider,
    token: [u8; 16],
    peer: SocketAddr,
    nic: Option<Box<dyn Nic>>,
    /// Where the queue pairs connect to, once the destination has told.
    address: Option<QueueAddress>,
    /// Agreed terms whose queue pairs are still to be connected.
    connect: Option<Terms>,
    flights: Vec<Flight>,
    next_wait: usize,
    posts: Vec<Post>,
    completions: Vec<(QueueIndex, Completion)>,
    /// A queue pair was found down.
    down: Option<(QueueIndex, Instant)>,
    rounds_ended: u32,
    rounds_revoked: u32,
    said: VecDeque<Sent>,
    /// The stream is lost and RDMA with it.
    lost: Option<String>,
    stream_lost: bool,
}

impl std::fmt::Debug for RdmaSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RdmaSender").field("source", &self.source).finish_non_exhaustive()
    }
}

impl RdmaSender {
    /// Takes a connection whose hello is done. `token` is the attempt's.
    ///
    /// # Errors
    /// If the options can't work for this memory, or the connection has no IP address.
    pub(crate) fn new(
        stream: Stream,
        ram: &Arc<GuestRam>,
        options: &RdmaOptions,
        token: [u8; 16],
    ) -> Result<RdmaSender, String> {
        let regions: Vec<u64> = ram.regions().iter().map(|region| region.pages()).collect();
        let source = Source::new(&regions, options.config(), monotonic_now())
            .map_err(|error| error.to_string())?;
        let peer = stream.peer().ok_or("RDMA needs a connection between IP addresses")?;
        Ok(RdmaSender {
            source,
            messages: Messages::new(stream),
            ram: Arc::clone(ram),
            provider: options.provider,
            token,
            peer,
            nic: None,
            address: None,
            connect: None,
            flights: vec![Flight::default(); usize::from(options.queues)],
            next_wait: 0,
            posts: Vec::new(),
            completions: Vec::new(),
            down: None,
            rounds_ended: 0,
            rounds_revoked: 0,
            said: VecDeque::new(),
            lost: None,
            stream_lost: false,
        })
    }

    /// Whether pages can be offered now.
    pub(crate) fn is_open(&self) -> bool {
        self.source.is_open()
    }

    /// The provider and device in use, once they are known.
    pub(crate) fn device(&self) -> Option<String> {
        self.nic.as_ref().map(|nic| nic.name())
    }

    /// Takes as much of a run as there is room for; see [`Source::offer`], which panics on pages
    /// out of order.
    pub(crate) fn offer(&mut self, run: &mut Run) -> Offered {
        self.source.offer(run)
    }

    /// Asks for keys ahead; see [`Source::prefetch`].
    pub(crate) fn prefetch(&mut self, is_wanted: impl FnMut(PageSpan) -> bool) {
        self.source.prefetch(is_wanted);
    }

    /// Ends a round; [`Sent::Round`] says when all of it is in place. Only while it is open.
    pub(crate) fn end_round(&mut self, last: bool) {
        self.source.end_round(last);
        self.rounds_ended += 1;
    }

    /// Pages that were taken and are not known to have arrived; see [`Source::unretired`].
    pub(crate) fn unretired(&self) -> impl Iterator<Item = PageSpan> {
        self.source.unretired()
    }

    /// What became of what was sent.
    pub(crate) fn take(&mut self) -> Option<Sent> {
        self.said.pop_front()
    }

    /// The stream, for page frames. Only after [`Sent::FellBack`].
    pub(crate) fn finish(&mut self) -> io::Result<Stream> {
        self.messages.finish()
    }

    /// Does what can be done now; whether there was anything.
    ///
    /// # Errors
    /// The connection is lost, and nobody can say whether something is still under way: this
    /// attempt is over. One line for people.
    pub(crate) fn step(&mut self) -> Result<bool, String> {
        let mut busy = self.read_messages();
        busy |= self.take_done();
        busy |= self.take_completions();
        busy |= self.connect_queues();
        let now = monotonic_now();
        if self.source.poll_timeout().is_some_and(|at| at <= now) {
            self.source.on_timeout(now);
        }
        busy |= self.perform_and_post();
        match self.lost.take() {
            Some(reason) => Err(reason),
            None => Ok(busy),
        }
    }

    /// Waits until `wake` is raised, something is to be done, or `limit` passes; may return early.
    pub(crate) fn wait(&mut self, wake: &Wake, limit: Duration) -> io::Result<()> {
        let now = monotonic_now();
        let due = self.source.poll_timeout().map_or(limit, |at| limit.min(at.since(now)));
        if let Some(queue) = self.queue_in_flight()
            && let Some(nic) = &mut self.nic
        {
            // An error shows again at the next poll.
            let _ = nic.wait(queue, due.min(COMPLETION_WAIT_MAX), &mut self.completions);
            return Ok(());
        }
        let stream = PollFd::new(self.messages.stream(), self.messages.wanted());
        let mut fds = vec![stream, PollFd::new(wake, PollFlags::IN)];
        if let Some(nic) = &self.nic {
            fds.push(PollFd::new(nic.wake(), PollFlags::IN));
        }
        // A stream that broke stays readable for ever.
        let from = usize::from(self.stream_lost);
        wait_any(&mut fds[from..], due).map(drop)
    }

    /// A queue pair with something in flight, each in its turn.
    fn queue_in_flight(&mut self) -> Option<QueueIndex> {
        let count = self.flights.len();
        let turn = (0..count).map(|step| (self.next_wait + step) % count);
        let is_busy = |place: &usize| self.flights[*place].posted > self.flights[*place].done;
        let place = turn.into_iter().find(is_busy)?;
        self.next_wait = place + 1;
        u16::try_from(place).ok().map(QueueIndex)
    }

    fn read_messages(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..MESSAGES_AT_ONCE {
            if self.stream_lost {
                break;
            }
            match self.messages.try_receive() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    busy = true;
                    self.on_message(&message);
                }
                Err(error) => self.lose_stream(&error),
            }
        }
        busy
    }

    fn lose_stream(&mut self, error: &MessageError) {
        self.stream_lost = true;
        let now = monotonic_now();
        self.source.on_control_lost(now, format!("its connection: {error}"));
        self.source.on_timeout(now);
    }

    fn on_message(&mut self, message: &RdmaMessage) {
        if let RdmaMessage::Revoked { rounds } = message {
            self.rounds_revoked = *rounds;
        }
        match message {
            RdmaMessage::QueueAddress(at) if self.address.is_none() => self.address = Some(*at),
            message => self.source.on_message(monotonic_now(), message),
        }
    }

    fn take_done(&mut self) -> bool {
        let Some(nic) = self.nic.as_mut().filter(|nic| nic.is_any_done()) else { return false };
        let now = monotonic_now();
        while let Some(done) = nic.take_done() {
            match done {
                Done::Registered(unit, result) => {
                    let key = result.map(|keys| LocalKey(keys.local.0));
                    self.source.on_registered(now, unit, key);
                }
                Done::Deregistered(unit) => self.source.on_deregistered(unit),
            }
        }
        true
    }

    fn take_completions(&mut self) -> bool {
        let down = match &mut self.nic {
            Some(nic) => nic.poll(&mut self.completions),
            None => return false,
        };
        let busy = self.pass_completions();
        match down {
            Ok(None) => {}
            Ok(Some(queue)) => self.on_down(queue),
            Err(reason) => self.source.give_up(monotonic_now(), reason),
        }
        busy
    }

    fn on_down(&mut self, queue: QueueIndex) {
        let now = monotonic_now();
        let (queue, since) = *self.down.get_or_insert((queue, now));
        if now.since(since) >= REASON_GRACE {
            let reason = format!("queue pair {} was disconnected", queue.0);
            self.source.give_up(now, reason);
        }
    }

    fn pass_completions(&mut self) -> bool {
        let busy = !self.completions.is_empty();
        let now = monotonic_now();
        for (queue, completion) in self.completions.drain(..) {
            if completion.side != Side::Send {
                continue;
            }
            if let Some(flight) = self.flights.get_mut(usize::from(queue.0)) {
                flight.done = flight.done.max(completion.id.0 + 1);
            }
            let sequence = WorkSequence(completion.id.0);
            let status = WorkStatus(completion.status.0);
            self.source.on_completion(now, queue, WorkCompletion { sequence, status });
        }
        busy
    }

    /// Opens the device and connects, once the destination has said where and agreed to how.
    /// Blocks while it connects; nothing else is under way then.
    fn connect_queues(&mut self) -> bool {
        let (Some(address), Some(terms)) = (self.address, self.connect) else { return false };
        self.connect = None;
        match self.try_connect(address, &terms) {
            Ok(slots) => self.source.on_connected(monotonic_now(), slots),
            Err(reason) => self.source.give_up(monotonic_now(), reason),
        }
        true
    }

    fn try_connect(&mut self, at: QueueAddress, terms: &Terms) -> Result<u32, String> {
        let wrong = match self.provider {
            Provider::Ibv => at.provider != WireProvider::IBV,
            Provider::Soft => at.provider != WireProvider::SOFT,
            Provider::Auto => false,
        };
        if wrong {
            return Err(format!("the destination does not have the provider {}", self.provider));
        }
        let to = SocketAddr::new(self.peer.ip(), at.port);
        let mut nic = nic::open_towards(at.provider, to, &self.ram)?;
        let slots = nic.connect(to, terms.queues, self.token)?;
        self.nic = Some(nic);
        Ok(slots)
    }

    fn perform_and_post(&mut self) -> bool {
        let mut busy = false;
        loop {
            let acted = self.perform();
            let posted = self.post();
            if !acted && !posted {
                break;
            }
            busy = true;
        }
        if let Err(error) = self.messages.flush()
            && !self.stream_lost
        {
            self.lose_stream(&MessageError::Io(error));
            self.perform();
        }
        busy
    }

    fn perform(&mut self) -> bool {
        let mut busy = false;
        while let Some(action) = self.source.poll_action() {
            busy = true;
            match action {
                SourceAction::Send(message) => self.messages.queue(&message),
                SourceAction::Connect(terms) => self.connect = Some(terms),
                SourceAction::Register { unit, pages } => {
                    self.with_nic(|nic| nic.register(unit, pages, Access::empty()));
                }
                SourceAction::Deregister { unit } => self.with_nic(|nic| nic.deregister(unit)),
                SourceAction::Drained(Drain::Round { round, .. }) => {
                    self.said.push_back(Sent::Round { round });
                }
                SourceAction::Drained(Drain::Jump) => {}
                SourceAction::Finished => self.on_finished(),
                SourceAction::CloseQueues => self.close_queues(),
                SourceAction::Closed { revoked } => self.on_closed(revoked),
            }
        }
        busy
    }

    fn with_nic(&mut self, errand: impl FnOnce(&mut Box<dyn Nic>)) {
        if let Some(nic) = &mut self.nic {
            errand(nic);
        }
    }

    /// The queue pairs stay as they are: the destination has closed its own.
    fn on_finished(&mut self) {
        let round = self.rounds_ended.saturating_sub(1);
        self.said.push_back(Sent::Round { round });
    }

    fn close_queues(&mut self) {
        self.connect = None;
        if let Some(nic) = &mut self.nic {
            nic.close(&mut self.completions);
        }
        self.pass_completions();
        self.flights.iter_mut().for_each(|flight| flight.done = flight.posted);
        self.source.on_queues_closed();
    }

    fn on_closed(&mut self, revoked: bool) {
        let reason = self.source.cause().map_or_else(String::new, |cause| crate::chain(cause));
        if revoked && !self.stream_lost {
            let rounds = self.rounds_revoked;
            self.said.push_back(Sent::FellBack { reason, rounds });
        } else {
            self.lost = Some(format!("RDMA failed and the destination is gone: {reason}"));
        }
    }

    fn post(&mut self) -> bool {
        let mut busy = false;
        let mut posts = std::mem::take(&mut self.posts);
        while let Some(queue) = self.source.poll_posts(&mut posts) {
            busy = true;
            if let Some(flight) = self.flights.get_mut(usize::from(queue.0)) {
                flight.posted += posts.len() as u64;
            }
            let Some(nic) = &mut self.nic else { break };
            if let Err(reason) = nic.post(queue, &posts) {
                self.source.give_up(monotonic_now(), reason);
                break;
            }
        }
        self.posts = posts;
        busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use martlet_units::{Gfn, PageCount, PageRange};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// The thread that steps has to hear the clock and its owner, in the blackout too.
    #[test]
    fn a_peer_that_never_stops_talking_is_not_heard_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let range = PageRange::try_new(Gfn(0), PageCount(1024)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range]).unwrap());
        let stream = Stream::from_tcp(near).unwrap();
        let options = RdmaOptions::default();
        let mut sender = RdmaSender::new(stream, &ram, &options, [0; 16]).unwrap();
        let mut flood = Vec::new();
        for sent_ns in 0..(3 * MESSAGES_AT_ONCE as u64) {
            RdmaMessage::Heartbeat { sent_ns }.encode(&mut flood);
        }
        far.write_all(&flood).unwrap();
        let until = monotonic_now().after(Duration::from_secs(20));
        let mut talks = 0;
        while talks < 3 {
            assert!(monotonic_now() < until, "it is taken in {talks} steps");
            talks += u32::from(sender.read_messages());
        }
        assert!(!sender.stream_lost);
    }
}
