//! The destination's end.

use super::errands::Done;
use super::messages::{MESSAGES_AT_ONCE, MessageError, Messages};
use super::nic::{self, Nic};
use super::provider::RdmaAccept;
use super::sender::REASON_GRACE;
use martlet_ram::{GuestRam, LostPage, PlaceError, Placer};
use martlet_rdma::{Destination, DestinationAction, PageSpan, QueueIndex, Registered, RemoteKey};
use martlet_transport::{
    Arrival, PageReceiver, PagesReceiveError, Stream, Wake, monotonic_now, wait_any,
};
use martlet_units::{ByteCount, Instant};
use martlet_verbs::{Access, Completion, Side, Status};
use martlet_wire::rdma::{QueueAddress, RdmaMessage, Terms};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// While queue pairs are awaited, or the markers of a round that has ended, one look takes this
/// long at most.
const SHORT_WAIT: Duration = Duration::from_millis(1);

/// Pages that are made zero with one call: registered memory must not be given back to the host,
/// which [`Placer::zero`] does from 512 pages on.
const ZERO_PAGES_MAX: u64 = 256;

/// Pages that one step makes zero, about: whoever steps has to hear the clock, and a list may name
/// all of a guest's memory many times over.
const ZERO_PAGES_A_STEP: u64 = 4096;

/// Pages that hold zeros already cost this much less to look at.
const ZERO_PAGES_LOOKED_AT: u64 = 64;

/// Why nothing more can be received.
#[derive(Debug)]
pub(crate) enum Unreceived {
    /// This host can't write a page.
    Lost(LostPage),
    /// The connection, or the peer, in one line.
    Ended(String),
}

impl From<PagesReceiveError> for Unreceived {
    fn from(error: PagesReceiveError) -> Unreceived {
        match error {
            PagesReceiveError::Lost(page) => Unreceived::Lost(page),
            error => Unreceived::Ended(error.to_string()),
        }
    }
}

/// Has guest memory written by RDMA, and, should that fail, over the stream. See
/// [`martlet_rdma::Destination`] for what it promises.
pub(crate) struct RdmaReceiver {
    mode: Mode,
    placer: Arc<Placer>,
    /// Rounds that are in memory and that nobody was told of.
    arrived: VecDeque<u32>,
}

enum Mode {
    Rdma(Box<RdmaEnd>),
    Pages(PageReceiver),
    /// The last round is here, or the connection is lost.
    Over,
}

struct RdmaEnd {
    destination: Destination,
    messages: Messages,
    nic: Option<Box<dyn Nic>>,
    token: [u8; 16],
    /// Queue pairs that are still to be let in.
    accepting: Option<u16>,
    completions: Vec<(QueueIndex, Completion)>,
    down: Option<(QueueIndex, Instant)>,
    /// The source said that its round is over; markers come.
    round_ended: bool,
    /// The source sends no more messages.
    source_closed: bool,
    /// All is closed here: page frames may come.
    closed: bool,
    finished: bool,
    lost: Option<Unreceived>,
    /// Lists of zero ranges that are to be executed, in their order.
    zeroing: VecDeque<Zeroing>,
}

/// A list of zero ranges, and how far it is.
struct Zeroing {
    sequence: u64,
    ranges: VecDeque<PageSpan>,
    /// Pages of the first range that are done.
    done: u64,
}

impl RdmaReceiver {
    /// Takes a connection whose hello is done, and tells the source where to connect its queue
    /// pairs. `token` is the attempt's.
    ///
    /// # Errors
    /// If the connection has no IP address. Without a device the source is told so, and sends its
    /// pages over the stream.
    pub(crate) fn new(
        stream: Stream,
        ram: &Arc<GuestRam>,
        placer: Arc<Placer>,
        accept: &RdmaAccept,
        token: [u8; 16],
    ) -> Result<RdmaReceiver, String> {
        let regions: Vec<u64> = ram.regions().iter().map(|region| region.pages()).collect();
        let at = stream.local().ok_or("RDMA needs a connection between IP addresses")?;
        let mut rdma = RdmaEnd {
            destination: Destination::new(&regions, accept.config(), monotonic_now()),
            messages: Messages::new(stream),
            nic: None,
            token,
            accepting: None,
            completions: Vec::new(),
            down: None,
            round_ended: false,
            source_closed: false,
            closed: false,
            finished: false,
            lost: None,
            zeroing: VecDeque::new(),
        };
        let opened = nic::open_at(accept.provider, at, ram).and_then(|(mut nic, provider)| {
            let port = nic.listen(at)?;
            Ok((nic, QueueAddress { provider, port }))
        });
        match opened {
            Ok((nic, address)) => {
                rdma.nic = Some(nic);
                rdma.messages.queue(&RdmaMessage::QueueAddress(address));
            }
            Err(reason) => rdma.destination.give_up(reason),
        }
        let mode = Mode::Rdma(Box::new(rdma));
        Ok(RdmaReceiver { mode, placer, arrived: VecDeque::new() })
    }

    /// Whether nothing more will come.
    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.mode, Mode::Over) && self.arrived.is_empty()
    }

    /// Takes nothing more: when this returns, no request of the peer can write guest memory.
    pub(crate) fn finish(&mut self) {
        self.mode = Mode::Over;
        self.arrived.clear();
    }

    /// Does what can be done now. A barrier says that all of its round is in memory; behind the
    /// last one nothing can be written any more. Bytes are those of page frames: what queue pairs
    /// write is not seen.
    ///
    /// # Errors
    /// The connection or a page is lost, or the peer broke the protocol.
    pub(crate) fn advance(&mut self) -> Result<Arrival, Unreceived> {
        let arrival = if self.arrived.is_empty() { self.step()? } else { Arrival::Nothing };
        Ok(self.arrived.pop_front().map_or(arrival, |round| Arrival::Barrier { round }))
    }

    fn step(&mut self) -> Result<Arrival, Unreceived> {
        match &mut self.mode {
            Mode::Over => Ok(Arrival::Nothing),
            Mode::Rdma(rdma) => {
                let busy = rdma.step(&self.placer, &mut self.arrived)?;
                if rdma.finished {
                    self.mode = Mode::Over;
                } else if rdma.closed && rdma.source_closed && !rdma.messages.is_unsent() {
                    self.fall_back()?;
                }
                Ok(if busy { Arrival::Bytes(ByteCount(0)) } else { Arrival::Nothing })
            }
            Mode::Pages(receiver) => Ok(receiver.advance()?),
        }
    }

    fn fall_back(&mut self) -> Result<(), Unreceived> {
        let Mode::Rdma(mut rdma) = std::mem::replace(&mut self.mode, Mode::Over) else {
            return Ok(());
        };
        let reason = rdma.destination.cause().map_or_else(String::new, |cause| crate::chain(cause));
        warn!(%reason, "RDMA ended; the rest comes over the connection");
        let stream = rdma.messages.finish();
        let receiver =
            stream.and_then(|stream| PageReceiver::new(stream, Arc::clone(&self.placer)));
        self.mode = Mode::Pages(receiver.map_err(PagesReceiveError::Io)?);
        Ok(())
    }

    /// Waits until `wake` is raised, something is to be done, or `limit` passes; may return early.
    pub(crate) fn wait(&mut self, wake: &Wake, limit: Duration) -> io::Result<()> {
        match &mut self.mode {
            Mode::Over => Ok(()),
            Mode::Rdma(rdma) => rdma.wait(wake, limit),
            Mode::Pages(receiver) => {
                let mut fds =
                    [PollFd::new(receiver, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
                wait_any(&mut fds, limit).map(drop)
            }
        }
    }
}

impl RdmaEnd {
    fn step(&mut self, placer: &Placer, arrived: &mut VecDeque<u32>) -> Result<bool, Unreceived> {
        let mut busy = self.read_messages();
        busy |= self.take_done();
        busy |= self.take_completions();
        busy |= self.execute_zero_lists(placer);
        self.let_in();
        let now = monotonic_now();
        if self.destination.poll_timeout().is_some_and(|at| at <= now) {
            self.destination.on_timeout(now);
        }
        while let Some(action) = self.destination.poll_action() {
            busy = true;
            self.perform(action, placer, arrived);
        }
        if let Err(error) = self.messages.flush()
            && !self.finished
        {
            self.lose_stream(&MessageError::Io(error));
        }
        match self.lost.take() {
            Some(reason) if !self.finished => Err(reason),
            _ => Ok(busy),
        }
    }

    fn wait(&mut self, wake: &Wake, limit: Duration) -> io::Result<()> {
        let now = monotonic_now();
        let due = self.destination.poll_timeout().map_or(limit, |at| limit.min(at.since(now)));
        let due = if self.down.is_some() { due.min(REASON_GRACE) } else { due };
        if let Some(nic) = &mut self.nic
            && self.round_ended
        {
            // An error shows again at the next poll.
            let _ = nic.wait(QueueIndex(0), due.min(SHORT_WAIT), &mut self.completions);
            return Ok(());
        }
        let due = if self.accepting.is_some() { Duration::ZERO } else { due };
        let mut fds = vec![
            PollFd::new(self.messages.stream(), self.messages.wanted()),
            PollFd::new(wake, PollFlags::IN),
        ];
        if let Some(nic) = &self.nic {
            fds.push(PollFd::new(nic.wake(), PollFlags::IN));
        }
        wait_any(&mut fds, due).map(drop)
    }

    /// The source's last message is its close: what comes behind it is not read here.
    fn read_messages(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..MESSAGES_AT_ONCE {
            if self.source_closed || self.lost.is_some() {
                break;
            }
            match self.messages.try_receive() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    busy = true;
                    match &message {
                        RdmaMessage::Close { .. } => self.source_closed = true,
                        RdmaMessage::RoundEnd(_) => self.round_ended = true,
                        _ => {}
                    }
                    self.destination.on_message(monotonic_now(), &message);
                }
                Err(error) => self.lose_stream(&error),
            }
        }
        busy
    }

    fn lose_stream(&mut self, error: &MessageError) {
        let reason = format!("the RDMA connection: {error}");
        self.destination.on_control_lost(reason.as_str());
        self.lost = Some(Unreceived::Ended(reason));
    }

    fn take_done(&mut self) -> bool {
        let Some(nic) = self.nic.as_mut().filter(|nic| nic.is_any_done()) else { return false };
        while let Some(done) = nic.take_done() {
            match done {
                Done::Registered(unit, result) => {
                    let registered = result.map(|keys| Registered {
                        address: keys.address.0,
                        key: RemoteKey(keys.remote.0),
                    });
                    self.destination.on_registered(unit, registered);
                }
                Done::Deregistered(unit) => self.destination.on_deregistered(unit),
            }
        }
        true
    }

    fn take_completions(&mut self) -> bool {
        let down = match &mut self.nic {
            Some(nic) => nic.poll(&mut self.completions),
            None => return false,
        };
        let busy = !self.completions.is_empty();
        for (queue, completion) in self.completions.drain(..) {
            if completion.side == Side::Receive
                && completion.status == Status::SUCCESS
                && let Some(round) = completion.immediate
            {
                self.destination.on_marker(queue, round);
            }
        }
        match down {
            Ok(None) => {}
            Ok(Some(queue)) => self.on_down(queue),
            Err(reason) => self.destination.give_up(reason),
        }
        busy
    }

    fn on_down(&mut self, queue: QueueIndex) {
        let now = monotonic_now();
        let (queue, since) = *self.down.get_or_insert((queue, now));
        if now.since(since) >= REASON_GRACE {
            // Not `on_queue_lost`: the source would get no reason before the revocation.
            self.destination.give_up(format!("queue pair {} was disconnected", queue.0));
        }
    }

    /// Makes zero what was listed, but not too much of it at once.
    fn execute_zero_lists(&mut self, placer: &Placer) -> bool {
        let busy = !self.zeroing.is_empty();
        let mut left = ZERO_PAGES_A_STEP;
        while left > 0
            && let Some(list) = self.zeroing.front_mut()
        {
            match list.make_zero(placer) {
                Ok(Some(cost)) => left = left.saturating_sub(cost),
                Ok(None) => {
                    self.destination.on_zeroed(list.sequence);
                    self.zeroing.pop_front();
                }
                Err(error) => {
                    self.lost = Some(PagesReceiveError::from(error).into());
                    return true;
                }
            }
        }
        busy
    }

    fn let_in(&mut self) {
        let (Some(queues), Some(nic)) = (self.accepting, &mut self.nic) else { return };
        match nic.accept(queues, self.token, SHORT_WAIT) {
            Ok(false) => {}
            Ok(true) => self.accepting = None,
            Err(reason) => {
                self.accepting = None;
                self.destination.give_up(reason);
            }
        }
    }

    fn perform(&mut self, action: DestinationAction, placer: &Placer, arrived: &mut VecDeque<u32>) {
        match action {
            DestinationAction::Send(message) => self.messages.queue(&message),
            DestinationAction::Accepted(Terms { queues, .. }) => self.accepting = Some(queues),
            DestinationAction::Register { unit, pages } => {
                mark_filled(placer, pages);
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                match &mut self.nic {
                    Some(nic) => nic.register(unit, pages, access),
                    None => self.destination.on_registered(unit, Err("no device".to_owned())),
                }
            }
            DestinationAction::Deregister { unit } => match &mut self.nic {
                Some(nic) => nic.deregister(unit),
                None => self.destination.on_deregistered(unit),
            },
            DestinationAction::Zero { sequence, ranges } => {
                self.zeroing.push_back(Zeroing { sequence, ranges: ranges.into(), done: 0 });
            }
            DestinationAction::PostReceive(queue) => {
                if let Some(nic) = &mut self.nic
                    && let Err(reason) = nic.post_receive(queue)
                {
                    self.destination.give_up(reason);
                }
            }
            DestinationAction::RoundArrived { round, last } => {
                self.round_ended = false;
                self.finished |= last;
                arrived.push_back(round);
            }
            DestinationAction::CloseQueues => {
                self.accepting = None;
                self.round_ended = false;
                if let Some(nic) = &mut self.nic {
                    nic.close(&mut self.completions);
                }
                self.completions.clear();
                self.down = None;
                self.destination.on_queues_closed();
            }
            DestinationAction::Closed => self.closed = true,
        }
    }
}

impl Zeroing {
    /// Makes the next pages zero without giving any of them back to the host; what that cost, or
    /// `None` once all are done. Where a unit was never registered they are zero already, and stay
    /// holes. Registered pages may be written again at any time, unseen.
    fn make_zero(&mut self, placer: &Placer) -> Result<Option<u64>, PlaceError> {
        let Some(range) = self.ranges.front() else { return Ok(None) };
        let (region, first) = (range.region(), range.first_page() + self.done);
        let pages = ZERO_PAGES_MAX.min(range.end() - first);
        let count = pages_u32(pages);
        let cleared = placer.zero(region, first, count)?.0;
        if cleared > 0 {
            placer.data_target(region, first, count)?;
        }
        self.done += pages;
        if self.done == range.pages() {
            self.ranges.pop_front();
            self.done = 0;
        }
        Ok(Some(cleared + pages / ZERO_PAGES_LOOKED_AT + 1))
    }
}

/// From its registration on a unit may hold anything.
fn mark_filled(placer: &Placer, pages: PageSpan) {
    let mut next = pages.first_page();
    while next < pages.end() {
        let count = pages_u32((pages.end() - next).min(u64::from(u32::MAX)));
        placer.data_target(pages.region(), next, count).expect("checked against the layout");
        next += u64::from(count);
    }
}

fn pages_u32(pages: u64) -> u32 {
    u32::try_from(pages).expect("a part that is small")
}

#[cfg(test)]
mod tests {
    use super::super::provider::Provider;
    use super::*;
    use martlet_ram::RegionIndex;
    use martlet_units::{Gfn, PageCount, PageRange};
    use martlet_wire::rdma::{Pinning, RDMA_VERSION, ZERO_RANGES_MAX, ZeroList, ZeroRange};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    const TERMS: Terms = Terms {
        version: RDMA_VERSION,
        queues: 1,
        pinning: Pinning::Dynamic,
        unit_chunks: 1,
        chunk_bytes: 1 << 20,
        pinned_bytes_max: 2 << 20,
    };

    /// A receiver for memory of so many pages, and the source's end of its connection.
    fn connected(pages: u64) -> (RdmaReceiver, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Stream::from_tcp(listener.accept().unwrap().0).unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&peer, 64 << 10).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, 64 << 10).unwrap();
        let range = PageRange::try_new(Gfn(0), PageCount(pages)).unwrap();
        let ram = Arc::new(GuestRam::create(&[range]).unwrap());
        let placer = Arc::new(Placer::new(Arc::clone(&ram)));
        let accept = RdmaAccept { provider: Provider::Soft, ..RdmaAccept::default() };
        (RdmaReceiver::new(stream, &ram, placer, &accept, [0; 16]).unwrap(), peer)
    }

    /// The thread that steps may be the attempt's, which has to hear the clock and its owner.
    #[test]
    fn a_source_that_reads_nothing_holds_up_no_step() {
        let (mut receiver, peer) = connected(1024);
        let Mode::Rdma(rdma) = &mut receiver.mode else { panic!("it begins so") };
        let mut rests = 0;
        while rests < 3 {
            for sent_ns in 0..1000 {
                rdma.messages.queue(&RdmaMessage::Heartbeat { sent_ns });
            }
            rdma.messages.flush().unwrap();
            // What is in the kernel moves on to the peer's for a while.
            while rests < 3 && rdma.messages.is_unsent() {
                rests += 1;
                std::thread::sleep(Duration::from_millis(50));
                rdma.messages.flush().unwrap();
            }
            rests = if rdma.messages.is_unsent() { rests } else { 0 };
        }
        (rdma.closed, rdma.source_closed) = (true, true);
        receiver.advance().unwrap();
        assert!(matches!(receiver.mode, Mode::Rdma(_)), "what was said is sent first");
        drop(peer);
    }

    /// As above; and a list costs its peer a few bytes, whatever it names.
    #[test]
    fn a_list_that_names_all_memory_many_times_holds_up_no_step() {
        const PAGES: u32 = 16 << 10;
        let (mut receiver, mut peer) = connected(PAGES.into());
        receiver.placer.data_target(RegionIndex(0), 0, PAGES).unwrap();
        let range = ZeroRange { region: 0, first_page: 0, count: PAGES };
        let list = ZeroList { sequence: 1, ranges: vec![range; ZERO_RANGES_MAX] };
        let mut bytes = Vec::new();
        RdmaMessage::Offer(TERMS).encode(&mut bytes);
        RdmaMessage::ZeroList(list).encode(&mut bytes);
        peer.write_all(&bytes).unwrap();
        let until = monotonic_now().after(Duration::from_secs(20));
        let mut done = 0;
        while done == 0 {
            assert!(monotonic_now() < until, "the list comes");
            receiver.advance().unwrap();
            let Mode::Rdma(rdma) = &receiver.mode else { panic!("nothing is wrong with it") };
            done = rdma.zeroing.front().map_or(0, |list| list.done);
        }
        assert!(done <= ZERO_PAGES_A_STEP + ZERO_PAGES_MAX, "{done} pages in one step");
    }
    /// The thread that steps waits for each of them, and only for so long in all.
    #[test]
    fn queue_pairs_that_never_come_are_not_awaited_without_end() {
        let (mut receiver, mut peer) = connected(1024);
        let mut bytes = Vec::new();
        RdmaMessage::Offer(TERMS).encode(&mut bytes);
        peer.write_all(&bytes).unwrap();
        let until = monotonic_now().after(Duration::from_secs(20));
        loop {
            assert!(monotonic_now() < until, "they are awaited still");
            receiver.advance().unwrap();
            let Mode::Rdma(rdma) = &receiver.mode else { panic!("its source did not close it") };
            if rdma.closed {
                let cause = rdma.destination.cause().map(ToString::to_string).unwrap();
                assert!(cause.contains("queue pairs did not come"), "{cause}");
                return;
            }
        }
    }
}
