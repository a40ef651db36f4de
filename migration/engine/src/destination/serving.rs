//! The thread of an attempt: the sockets, threads and clock that its core asks for.

use super::events::Event;
use super::intake::Intake as Channels;
use super::peer_of;
use super::shared::Shared;
use crate::mailbox::Mailbox;
use crate::{BuildRequest, DestinationVmm, Error, Fault, Peer, host};
use martlet_core::destination::{
    Attempt, AttemptConfig, DestinationIo, Event as CoreEvent, HostNow, Intake, Next, Unheard,
};
use martlet_protocol::{DestinationConfig, DestinationOutcome, Ledger};
use martlet_ram::{GuestRam, Placer};
use martlet_transport::{ControlLink, ReceiveError, Stream, chain, monotonic_now, wait_any};
use martlet_units::{Instant, PageRange};
use martlet_wire::control::{Control, Fate, Setup};
use martlet_wire::frame::Kind;
use rustix::event::{PollFd, PollFlags};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::error;

/// With nothing to wait for, the thread still looks this often.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Panics of one attempt after which nothing more is tried.
const PANICS_MAX: u32 = 4;

/// Serves a source until its guest has arrived or the attempt has failed.
pub(super) fn run(
    control: ControlLink,
    setup: Setup,
    ledger: Ledger,
    shared: &Arc<Shared>,
    events: Arc<Mailbox<Event>>,
) {
    let token = match host::random_id() {
        Ok(token) => token,
        Err(error) => {
            let reason = format!("the host gives no random bytes: {error}");
            return shared.end_attempt(ledger, Some(reason));
        }
    };
    let protocol = DestinationConfig { token, clock_key: host::clock_key() };
    let config = AttemptConfig { protocol, ledger, memory_max: shared.options.memory_max };
    let mut io = Threads {
        peer: peer_of(control.stream()),
        shared: Arc::clone(shared),
        control,
        events,
        token,
        joined: Vec::new(),
        rdma: None,
        builder: None,
        machine: Arc::default(),
    };
    let mut attempt = Attempt::new(&mut io, config, setup);
    let served = host::guarded(|| serve(&mut attempt, &mut io));
    let (ledger, error) = match served {
        Ok(()) => {
            let (outcome, ledger) = attempt.end();
            match outcome {
                DestinationOutcome::Arrived => (ledger, None),
                DestinationOutcome::Abandoned { reason } => (ledger, Some(chain(&reason))),
            }
        }
        Err(panic) => {
            let is_here = end_by_panic(&mut attempt, &mut io, &panic);
            (attempt.give_up(), (!is_here).then_some(panic))
        }
    };
    io.leave();
    shared.end_attempt(ledger, error);
}

fn serve(attempt: &mut Attempt, io: &mut Threads) {
    loop {
        match attempt.step(io) {
            Next::Again { idle: true } => rustix::thread::sched_yield(),
            Next::Again { idle: false } => {}
            Next::Wait { until, listens } => io.wait(until, listens),
            Next::Over => return,
        }
    }
}

/// Whether the guest is here.
fn end_by_panic(attempt: &mut Attempt, io: &mut Threads, reason: &str) -> bool {
    error!(%reason, "an attempt to take a guest in ended");
    let mut is_here = false;
    for _ in 0..PANICS_MAX {
        match host::guarded(|| attempt.end_by_panic(io, reason)) {
            Ok(here) => {
                is_here = here;
                break;
            }
            Err(again) => error!(reason = again, "while it ended"),
        }
    }
    let _ = host::guarded(|| serve(attempt, io));
    is_here
}

/// Ends a wait of the attempt.
struct Nudge(Arc<Mailbox<Event>>);

impl std::task::Wake for Nudge {
    fn wake(self: Arc<Nudge>) {
        self.0.post(Event::Nudged);
    }
}

/// The thread that builds. It posts one [`Event::Built`].
struct Builder {
    thread: JoinHandle<()>,
    cancelled: Arc<AtomicBool>,
}

/// What an attempt's core asks for, done by threads and sockets.
struct Threads {
    shared: Arc<Shared>,
    peer: Peer,
    control: ControlLink,
    events: Arc<Mailbox<Event>>,
    /// What the channels show.
    token: [u8; 16],
    /// Channels by number; `None` until they join.
    joined: Vec<Option<Stream>>,
    /// The connection beside the queue pairs, if guest memory comes by RDMA.
    rdma: Option<Stream>,
    builder: Option<Builder>,
    /// Goes with the machine: whoever digests its memory sees by that that nobody wants it any more.
    machine: Arc<()>,
}

impl Threads {
    /// Waits until something comes, there is room for what is unsent, or until then.
    fn wait(&mut self, until: Option<Instant>, listens: bool) {
        let limit = until.map_or(IDLE_INTERVAL, |at| at.since(monotonic_now()).min(IDLE_INTERVAL));
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, listens);
        wanted.set(PollFlags::OUT, self.control.unsent() > 0);
        let mut fds =
            [PollFd::new(self.events.wake(), PollFlags::IN), PollFd::new(&self.control, wanted)];
        let watched = if wanted.is_empty() { 1 } else { 2 };
        if let Err(error) = wait_any(&mut fds[..watched], limit) {
            let error = Error::caused(Fault::Host, "wait for events", error);
            self.events.post(Event::ChannelLost { last_barrier: None, error });
        }
    }

    /// A channel joined; whether all of them have.
    fn join(&mut self, channel: u16, stream: Stream) -> bool {
        if let Some(place) = self.joined.get_mut(usize::from(channel)) {
            *place = Some(stream);
        }
        !self.joined.is_empty() && self.joined.iter().all(Option::is_some)
    }

    fn try_build(&mut self, setup: Setup, layout: Vec<PageRange>) -> std::io::Result<()> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let (factory, events) = (Arc::clone(&self.shared.factory), Arc::clone(&self.events));
        let (peer, is_cancelled) = (self.peer, Arc::clone(&cancelled));
        let thread = host::spawn("martlet-build", move || {
            let built = host::guarded(|| -> Result<Arc<dyn DestinationVmm>, Error> {
                let description = &setup.machine;
                let is_cancelled = &is_cancelled;
                let request = BuildRequest { description, layout: &layout, peer, is_cancelled };
                let vmm = factory.build(&request)?;
                assert!(vmm.ram().layout() == layout, "the factory builds what it is told to");
                Ok(vmm)
            });
            events.post(Event::Built(built.unwrap_or_else(|panic| Err(Error::vmm("", panic)))));
        })?;
        self.builder = Some(Builder { thread, cancelled });
        Ok(())
    }

    /// Waits for whoever still builds: the next attempt may need its place.
    fn leave(&mut self) {
        self.cancel_build();
        if let Some(builder) = self.builder.take() {
            let _ = builder.thread.join();
        }
        while self.events.take().is_some() {}
    }
}

impl DestinationIo for Threads {
    fn now(&self) -> Instant {
        monotonic_now()
    }

    fn host(&self) -> HostNow {
        HostNow { cpu: host::process_cpu(), wall_clock_ns: host::wall_clock_ns() }
    }

    fn waker(&self) -> Waker {
        Waker::from(Arc::new(Nudge(Arc::clone(&self.events))))
    }

    fn take_event(&mut self) -> Option<CoreEvent> {
        loop {
            return Some(match self.events.take()? {
                Event::Built(built) => CoreEvent::Built(built),
                Event::ChannelJoined { channel, stream } => {
                    if !self.join(channel, stream) {
                        continue;
                    }
                    CoreEvent::ChannelsJoined
                }
                Event::RdmaJoined { stream } => {
                    self.rdma = Some(stream);
                    CoreEvent::ChannelsJoined
                }
                Event::RoundReceived { round } => CoreEvent::RoundReceived { round },
                Event::Digested(digest) => CoreEvent::Digested(digest),
                Event::ChannelLost { last_barrier, error } => {
                    CoreEvent::ChannelLost { last_barrier, error }
                }
                Event::Stop => CoreEvent::Stop,
                Event::Nudged => continue,
            });
        }
    }

    fn receive(&mut self, admits: &dyn Fn(Kind) -> bool) -> Result<Option<Control>, Unheard> {
        self.control.try_receive_if(admits).map_err(|error| {
            let said = Error::new(Fault::Peer, "", chain(&error));
            match error {
                ReceiveError::Protocol(_) => Unheard::Malformed(said),
                ReceiveError::Refused(kind) => Unheard::Refused(kind, said),
                _ => Unheard::Lost(said),
            }
        })
    }

    fn queue(&mut self, message: &Control) {
        self.control.queue(message);
    }

    fn flush(&mut self) -> Result<usize, Error> {
        match self.control.flush() {
            Ok(()) => Ok(self.control.unsent()),
            Err(error) => Err(Error::new(Fault::Peer, "", error.to_string())),
        }
    }

    fn build(&mut self, setup: Setup, layout: Vec<PageRange>) {
        if let Err(error) = self.try_build(setup, layout) {
            let error = Error::caused(Fault::Host, "build the machine", error);
            self.events.post(Event::Built(Err(error)));
        }
    }

    fn cancel_build(&mut self) {
        if let Some(builder) = &self.builder {
            // Relaxed: it orders nothing.
            builder.cancelled.store(true, Ordering::Relaxed);
        }
    }

    fn await_channels(&mut self, count: u16, token: [u8; 16]) {
        self.joined = (0..count).map(|_| None).collect();
        self.shared.await_channels(count, token);
    }

    fn open_intake(&mut self, ram: &Arc<GuestRam>) -> Result<Box<dyn Intake>, Error> {
        let opened = match self.rdma.take() {
            Some(stream) => {
                let accept = &self.shared.options.rdma;
                Channels::start_rdma(stream, ram, accept, self.token, &self.events)
            }
            None => {
                let streams = self.joined.drain(..).flatten().collect();
                let placer = Arc::new(Placer::new(Arc::clone(ram)));
                let started = Channels::start(streams, &placer, &self.events);
                started.map_err(|error| error.to_string())
            }
        };
        match opened {
            Ok(channels) => Ok(Box::new(channels)),
            Err(reason) => Err(Error::new(Fault::Host, "serve the channels", reason)),
        }
    }

    fn drop_channels(&mut self) {
        self.shared.drop_channels();
        self.joined.clear();
        self.rdma = None;
        self.machine = Arc::new(());
    }

    fn digest(&mut self, ram: &Arc<GuestRam>) {
        let (ram, events) = (Arc::clone(ram), Arc::clone(&self.events));
        let machine = Arc::downgrade(&self.machine);
        let doing = "digest guest memory";
        let computing = host::spawn("martlet-digest", move || {
            let digest = host::guarded(|| ram.digest_while(|| machine.strong_count() > 0));
            events.post(Event::Digested(match digest {
                Ok(digest) => digest.map_err(|error| Error::caused(Fault::Host, doing, error)),
                Err(panic) => Err(Error::new(Fault::Host, doing, panic)),
            }));
        });
        if let Err(error) = computing {
            self.events.post(Event::Digested(Err(Error::caused(Fault::Host, doing, error))));
        }
    }

    fn decide(&mut self, fate: Fate, vmm: Option<&Arc<dyn DestinationVmm>>) {
        self.shared.decide(fate, vmm.cloned());
    }
}
