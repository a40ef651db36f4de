//! One attempt to move a guest here: does what the protocol's machine says. Its thread waits for
//! nothing but events, and takes a bounded number of them before it looks at the time.

mod building;
mod guest;

use super::events::Event;
use super::intake::{Intake, Look};
use super::{peer_of, shared::Shared};
use crate::mailbox::Mailbox;
use crate::{DestinationVmm, LoadFor, Peer, host};
use building::Builder;
use guest::HEARTBEAT_INTERVAL;
use martlet_protocol::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, DestinationOutcome, Ledger,
};
use martlet_ram::Placer;
use martlet_transport::{ControlLink, ReceiveError, Stream, monotonic_now, wait_any};
use martlet_units::Instant;
use martlet_wire::control::{Abandon, Control, DevicesAlive, Fate};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info};

/// The thread stays awake this long for a blackout that was announced.
const AWAKE_MAX: Duration = Duration::from_millis(200);

/// Last pages beyond this are received by the channels' threads, side by side.
const LAST_BYTES_AWAKE_MAX: u64 = 8 << 20;

/// With nothing to wait for, the thread still looks this often.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Messages that are taken before timers and the owner are looked at again. A source that keeps to
/// the protocol never has so many on the way.
const MESSAGES_AT_ONCE: usize = 64;

/// Answers that may wait for the source to take them. All that a destination ever says to one that
/// keeps to the protocol is shorter.
const UNSENT_BYTES_MAX: usize = 64 << 10;

/// How long an attempt that is over waits for the source to take its last words.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// Serves a source until its guest has arrived or the attempt has failed.
pub(super) fn run(
    control: ControlLink,
    ledger: Ledger,
    shared: &Arc<Shared>,
    events: &Arc<Mailbox<Event>>,
) {
    let token = match host::random_id() {
        Ok(token) => token,
        Err(error) => {
            let reason = format!("the host gives no random bytes: {error}");
            return shared.end_attempt(None, Err(reason));
        }
    };
    let config = DestinationConfig { token, clock_key: host::clock_key() };
    let now = monotonic_now();
    let mut attempt = Attempt {
        shared: Arc::clone(shared),
        machine: Destination::new(now, config, ledger),
        peer: peer_of(control.stream()),
        control,
        control_open: true,
        events: Arc::clone(events),
        pending: VecDeque::new(),
        looked_at: now,
        is_decided: false,
        builder: None,
        vmm: None,
        token,
        joined: Vec::new(),
        intake: None,
        awake_until: None,
        awake_bytes: 0,
        loading: None,
        heartbeat_until: None,
        devices_wait: false,
        devices: None,
        cpu_before: host::process_cpu(),
        outcome: None,
    };
    match host::guarded(|| attempt.serve()) {
        Ok(()) => attempt.end(),
        Err(panic) => attempt.end_by_panic(panic),
    }
}

struct Attempt {
    shared: Arc<Shared>,
    machine: Destination,
    peer: Peer,
    control: ControlLink,
    /// Cleared once the control connection broke: it stays readable for ever then.
    control_open: bool,
    events: Arc<Mailbox<Event>>,
    pending: VecDeque<DestinationEvent>,
    /// When the thread last looked whether something had come.
    looked_at: Instant,
    /// Who asks is told what became of it.
    is_decided: bool,
    /// The thread that builds the machine.
    builder: Option<Builder>,
    vmm: Option<Arc<dyn DestinationVmm>>,
    /// What the channels show.
    token: [u8; 16],
    /// Channels by number; `None` until they join.
    joined: Vec<Option<Stream>>,
    intake: Option<Intake>,
    /// Set while the thread waits without sleeping.
    awake_until: Option<Instant>,
    awake_bytes: u64,
    /// When the last loading of a state began and ended.
    loading: Option<(Instant, Instant)>,
    /// Set while the first heartbeat, and the first frame of each network card, are looked for.
    heartbeat_until: Option<Instant>,
    /// The guest was started and its devices were not.
    devices_wait: bool,
    devices: Option<DevicesAlive>,
    cpu_before: Duration,
    outcome: Option<DestinationOutcome>,
}

impl Attempt {
    fn serve(&mut self) {
        loop {
            self.settle();
            self.resume_devices();
            if self.outcome.is_some() {
                return;
            }
            // What had come by the last look has been acted on: it counts first, however late this
            // thread is. What comes without end does not hold the time up.
            let now = self.looked_at;
            if self.machine.poll_timeout().is_some_and(|at| at <= now) {
                self.machine.on_timeout(monotonic_now());
                continue;
            }
            if self.awake_until.is_some() {
                self.look_around()
            } else {
                self.sleep()
            }
            self.show_fate();
            self.look_for_heartbeat(monotonic_now());
        }
    }

    /// Performs everything that is due, and sends what came of it.
    fn settle(&mut self) {
        self.act();
        self.speak();
    }

    /// Sends what was queued, as far as there is room.
    fn speak(&mut self) {
        if let Err(error) = self.control.flush() {
            // What the source said before it went comes first: it may be the commit.
            self.read_control();
            self.lose_control(error.to_string());
        }
        if self.control.unsent() > UNSENT_BYTES_MAX {
            self.lose_control("the source takes no messages".to_owned());
        }
    }

    /// Tells those who ask, and the owner, what becomes of the guest once that is decided. Behind
    /// the next wait, which is short then: vCPUs that were just started may wait for this thread's
    /// processor, and whom this wakes would take it before them.
    pub(super) fn show_fate(&mut self) {
        if self.is_decided {
            return;
        }
        let Some(migration) = self.machine.migration() else { return };
        let fate = self.machine.fate(migration);
        if fate != Fate::Pending {
            self.is_decided = true;
            self.shared.decide(fate);
        }
    }

    fn act(&mut self) {
        loop {
            while let Some(action) = self.machine.poll_action() {
                self.perform(action);
            }
            match self.pending.pop_front() {
                Some(event) => self.machine.on_event(monotonic_now(), event),
                None => return,
            }
        }
    }

    /// The loss is told once, and before the thread waits again.
    fn lose_control(&mut self, reason: String) {
        if self.control_open {
            self.control_open = false;
            self.tell(DestinationEvent::ControlLost { reason });
        }
    }

    fn tell(&mut self, event: DestinationEvent) {
        self.pending.push_back(event);
    }

    fn perform(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::Send(message) => {
                if let (Control::RoundReceived(received), Some(intake)) = (&message, &self.intake) {
                    intake.tell_round(received.round);
                }
                self.control.queue(&message);
            }
            DestinationAction::Build(setup) => self.build(setup),
            DestinationAction::AcceptChannels { count, token } => {
                self.joined = (0..count).map(|_| None).collect();
                self.shared.await_channels(count, token);
            }
            DestinationAction::LoadState { bytes, rehearsal, clock } => {
                let start = LoadFor::Start { source_clock: clock };
                let what_for = if rehearsal { LoadFor::Rehearsal } else { start };
                self.load_state(&bytes, what_for);
            }
            DestinationAction::Arm => self.arm(),
            DestinationAction::ComputeDigest => self.digest(),
            DestinationAction::Start { permit, running } => self.start(permit, running),
            DestinationAction::Discard => {
                // The source hears of it first: its guest may stand, and to drop a large memory
                // takes the host seconds.
                self.speak();
                self.discard();
            }
            DestinationAction::Finish(outcome) => self.outcome = Some(outcome),
        }
    }

    fn on_joined(&mut self, channel: u16, stream: Stream) {
        if let Some(place) = self.joined.get_mut(usize::from(channel)) {
            *place = Some(stream);
        }
        if self.intake.is_some() || self.joined.iter().any(Option::is_none) {
            return;
        }
        let streams = self.joined.drain(..).flatten().collect();
        let Some(vmm) = &self.vmm else { return };
        let placer = Arc::new(Placer::new(vmm.ram()));
        let intake = Intake::start(streams, &placer, &self.events);
        self.begin_intake(intake.map_err(|error| error.to_string()));
    }

    fn on_rdma_joined(&mut self, stream: Stream) {
        let Some(vmm) = &self.vmm else { return };
        let accept = self.shared.options.rdma;
        self.joined.clear();
        let (ram, token) = (vmm.ram(), self.token);
        let intake = Intake::start_rdma(stream, &ram, &accept, token, &self.events);
        self.begin_intake(intake);
    }

    fn begin_intake(&mut self, intake: Result<Intake, String>) {
        match intake {
            Ok(intake) => {
                self.intake = Some(intake);
                self.tell(DestinationEvent::ChannelsConnected);
            }
            Err(error) => {
                let reason = format!("cannot serve the channels: {error}");
                self.tell(DestinationEvent::ChannelLost { last_barrier: None, reason });
            }
        }
    }

    fn discard(&mut self) {
        self.fall_asleep();
        self.intake = None;
        self.joined.clear();
        self.vmm = None;
        if let Some(builder) = &self.builder {
            builder.cancel();
        }
    }

    /// Waits without sleeping: looks at every channel, the control connection and the mailbox,
    /// and yields the core when nothing was there.
    fn look_around(&mut self) {
        self.looked_at = monotonic_now();
        let look = self.intake.as_ref().map_or(Look::Idle, Intake::look);
        let heard = self.read_control();
        let events = self.take_events();
        let now = monotonic_now();
        let received = self.intake.as_ref().map_or(0, Intake::bytes);
        let late = self.awake_until.is_none_or(|until| now >= until);
        if late || received.saturating_sub(self.awake_bytes) > LAST_BYTES_AWAKE_MAX {
            self.fall_asleep();
        } else if look == Look::Idle && !heard && !events {
            rustix::thread::sched_yield();
        }
    }

    fn sleep(&mut self) {
        let mut limit = IDLE_INTERVAL;
        if let Some(at) = self.machine.poll_timeout() {
            limit = limit.min(at.since(monotonic_now()));
        }
        if self.heartbeat_until.is_some() {
            limit = limit.min(HEARTBEAT_INTERVAL);
        }
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, self.control.unsent() > 0);
        let mut fds =
            [PollFd::new(self.events.wake(), PollFlags::IN), PollFd::new(&self.control, wanted)];
        let watched = if self.control_open { 2 } else { 1 };
        if let Err(error) = wait_any(&mut fds[..watched], limit) {
            let reason = format!("cannot wait for events: {error}");
            return self.tell(DestinationEvent::Cancel { reason });
        }
        self.looked_at = monotonic_now();
        self.take_events();
        self.read_control();
    }

    fn take_events(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.events.take() {
            any = true;
            match event {
                Event::Built(built) => self.on_built(built),
                Event::ChannelJoined { channel, stream } => self.on_joined(channel, stream),
                Event::RdmaJoined { stream } => self.on_rdma_joined(stream),
                Event::RoundReceived { round } => {
                    self.tell(DestinationEvent::RoundReceived { round });
                }
                Event::Digested(Ok(digest)) => self.tell(DestinationEvent::OwnDigest(digest)),
                Event::Digested(Err(error)) => self.digest_failed(&error),
                Event::ChannelLost { last_barrier, reason } => {
                    self.tell(DestinationEvent::ChannelLost { last_barrier, reason });
                }
                Event::Stop => {
                    let reason = "the destination was told to stop".to_owned();
                    self.tell(DestinationEvent::Cancel { reason });
                }
            }
        }
        any
    }

    /// Takes messages that are there, not without end, and acts on each before it looks at the
    /// next: what may come depends on where the attempt stands. Whether there were any.
    fn read_control(&mut self) -> bool {
        let mut any = false;
        for _ in 0..MESSAGES_AT_ONCE {
            if !self.control_open {
                break;
            }
            match self.control.try_receive_if(|kind| self.machine.admits(kind)) {
                Ok(Some(message)) => self.tell(DestinationEvent::Received(message)),
                Ok(None) => break,
                Err(error) => self.stop_reading(&error),
            }
            any = true;
            self.act();
        }
        any
    }

    fn stop_reading(&mut self, error: &ReceiveError) {
        self.control_open = false;
        let reason = crate::chain(error);
        match error {
            ReceiveError::Protocol(_) => self.tell(DestinationEvent::Malformed { reason }),
            ReceiveError::Refused(kind) => {
                self.tell(DestinationEvent::Refused(*kind));
                self.tell(DestinationEvent::ControlLost { reason });
            }
            _ => self.tell(DestinationEvent::ControlLost { reason }),
        }
    }

    fn end(mut self) {
        self.fall_asleep();
        let end = match self.outcome.take() {
            Some(DestinationOutcome::Arrived) => {
                info!("the guest has arrived");
                Ok(())
            }
            Some(DestinationOutcome::Abandoned { reason }) => {
                let reason = crate::chain(&reason);
                info!(%reason, "the migration was abandoned");
                self.leave();
                Err(reason)
            }
            None => unreachable!("an attempt is served until it has an outcome"),
        };
        self.say_farewell();
        self.shared.end_attempt(Some(self.machine.into_ledger()), end);
    }

    /// This thread panicked. A guest that was to run is started, whatever else went wrong; what was
    /// not yet to run never will, and the source is told so. The next source is served.
    fn end_by_panic(mut self, panic: String) {
        let reason = panic;
        error!(%reason, "an attempt to take a guest in ended");
        while let Some(action) = self.machine.poll_action() {
            if let DestinationAction::Start { permit, running } = action
                && let Err(again) = host::guarded(|| self.start(permit, running))
            {
                error!(reason = again, "the guest could not be started");
            }
        }
        let arrived = self.machine.has_made_permit();
        if !arrived {
            self.control.queue(&Control::Abandon(Abandon::because(&reason)));
            drop(self.control.flush());
            if let Err(again) = host::guarded(|| self.leave()) {
                error!(reason = again, "while the machine was dropped");
            }
        }
        self.say_farewell();
        let end = if arrived { Ok(()) } else { Err(reason) };
        self.shared.end_attempt(Some(self.machine.give_up()), end);
    }

    /// Drops everything that was built, and what is still being built: the next attempt may need
    /// its place.
    fn leave(&mut self) {
        self.discard();
        if let Some(builder) = self.builder.take() {
            builder.join();
        }
        while self.events.take().is_some() {}
    }

    /// The last words are worth a short wait: a refusal gives the guest back.
    fn say_farewell(&mut self) {
        let until = monotonic_now().after(FAREWELL_MAX);
        while self.control.flush().is_ok() && self.control.unsent() > 0 {
            let left = until.since(monotonic_now());
            let mut fds = [PollFd::new(&self.control, PollFlags::OUT)];
            if left.is_zero() || !wait_any(&mut fds, left).unwrap_or(false) {
                return;
            }
        }
    }
}
