//! One attempt to move a guest here: does what the protocol's machine says.

use super::events::Event;
use super::intake::{Intake, Look};
use super::shared::Shared;
use crate::mailbox::Mailbox;
use crate::{DestinationVmm, LoadFor, RunState, host};
use martlet_protocol::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, DestinationOutcome,
    RunPermit,
};
use martlet_ram::Placer;
use martlet_transport::{ControlLink, ReceiveError, Stream, monotonic_now, wait_any};
use martlet_units::{Gfn, Instant, PageCount, PageRange};
use martlet_wire::control::{Alive, DEVICES_MAX, DevicesAlive, Setup};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// The thread stays awake this long for a blackout that was announced.
const AWAKE_MAX: Duration = Duration::from_millis(200);

/// Last pages beyond this are received by the channels' threads, side by side.
const LAST_BYTES_AWAKE_MAX: u64 = 8 << 20;

/// With nothing to wait for, the thread still looks this often.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Messages that are taken before timers and the owner are looked at again. A source that keeps to
/// the protocol never has so many on the way.
const MESSAGES_AT_ONCE: usize = 64;

/// How long a guest may take to its first heartbeat before the source is told that it has none.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);

/// How long cards may take to their first frames behind that. A card with nothing to do has none.
const FRAMES_MAX: Duration = Duration::from_millis(100);

/// How often the first heartbeat is looked for: it is only reported, nobody waits for it.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(1);

/// Serves a source until its guest has arrived or the attempt has failed.
pub(super) fn run(control: ControlLink, shared: &Arc<Shared>, events: &Arc<Mailbox<Event>>) {
    let token = match host::random_id() {
        Ok(token) => token,
        Err(error) => {
            return shared.end_attempt(Err(format!("the host gives no random bytes: {error}")));
        }
    };
    let config = DestinationConfig { token, clock_key: host::clock_key() };
    let mut attempt = Attempt {
        shared: Arc::clone(shared),
        machine: Destination::new(monotonic_now(), config, shared.take_ledger()),
        control,
        control_open: true,
        events: Arc::clone(events),
        pending: VecDeque::new(),
        vmm: None,
        token,
        joined: Vec::new(),
        intake: None,
        barriers: Vec::new(),
        awake_until: None,
        awake_bytes: 0,
        loading: None,
        heartbeat_until: None,
        devices_wait: false,
        devices: None,
        cpu_before: host::process_cpu(),
        outcome: None,
    };
    attempt.serve();
    attempt.end();
}

struct Attempt {
    shared: Arc<Shared>,
    machine: Destination,
    control: ControlLink,
    /// Cleared once the control connection broke: it stays readable for ever then.
    control_open: bool,
    events: Arc<Mailbox<Event>>,
    pending: VecDeque<DestinationEvent>,
    vmm: Option<Arc<dyn DestinationVmm>>,
    /// What the channels show.
    token: [u8; 16],
    /// Channels by number; `None` until they join.
    joined: Vec<Option<Stream>>,
    intake: Option<Intake>,
    /// The last round that each channel finished.
    barriers: Vec<Option<u32>>,
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
            if !self.pending.is_empty() {
                continue;
            }
            if self.awake_until.is_some() {
                self.look_around()
            } else {
                self.sleep()
            }
            let now = monotonic_now();
            // What came in counts first, however late this thread is.
            if self.pending.is_empty() && self.machine.poll_timeout().is_some_and(|at| at <= now) {
                self.machine.on_timeout(now);
            }
            self.look_for_heartbeat(now);
        }
    }

    /// Performs everything that is due, and sends what came of it.
    fn settle(&mut self) {
        self.act();
        if let Err(error) = self.control.flush() {
            // What the source said before it went comes first: it may be the commit.
            self.read_control();
            self.lose_control(error.to_string());
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
            DestinationAction::Send(message) => self.control.queue(&message),
            DestinationAction::Build(setup) => self.build(&setup),
            DestinationAction::AcceptChannels { count, token } => {
                self.joined = (0..count).map(|_| None).collect();
                self.barriers = vec![None; usize::from(count)];
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
            DestinationAction::Discard => self.discard(),
            DestinationAction::Finish(outcome) => self.outcome = Some(outcome),
        }
    }

    fn build(&mut self, setup: &Setup) {
        let event = match self.try_build(setup) {
            Ok(vmm) => {
                self.vmm = Some(vmm);
                DestinationEvent::Built
            }
            Err(reason) => DestinationEvent::BuildFailed { reason },
        };
        self.tell(event);
    }

    fn try_build(&self, setup: &Setup) -> Result<Arc<dyn DestinationVmm>, String> {
        let layout: Option<Vec<PageRange>> = setup
            .regions
            .iter()
            .map(|range| PageRange::try_new(Gfn(range.start_gfn), PageCount(range.pages)))
            .collect();
        let layout = layout.ok_or("the source describes memory outside the address space")?;
        let vmm = self
            .shared
            .factory
            .build(&setup.machine, &layout)
            .map_err(|error| error.to_string())?;
        assert!(vmm.ram().layout() == layout, "the factory builds what it is told to");
        Ok(vmm)
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
        let (Some(vmm), Some(accept)) = (&self.vmm, self.shared.rdma) else { return };
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

    fn on_barrier(&mut self, channel: u16, round: u32) {
        if let Some(passed) = self.barriers.get_mut(usize::from(channel)) {
            *passed = Some(round);
        }
        if self.barriers.iter().all(|passed| *passed == Some(round)) {
            self.tell(DestinationEvent::RoundReceived { round });
        }
    }

    fn load_state(&mut self, bytes: &[u8], what_for: LoadFor) {
        let Some(vmm) = &self.vmm else { return };
        let begin = monotonic_now();
        let loaded = vmm.load_state(bytes, what_for);
        let end = monotonic_now();
        self.loading = Some((begin, end));
        let event = match loaded {
            Ok(start) => DestinationEvent::StateLoaded {
                load_ns: nanos(end.since(begin)),
                start_ns: nanos(start),
            },
            Err(error) => DestinationEvent::LoadFailed { reason: error.to_string() },
        };
        self.tell(event);
    }

    /// The blackout is near: this thread and the vCPUs' stay awake.
    fn arm(&mut self) {
        if let Some(vmm) = &self.vmm {
            vmm.arm(AWAKE_MAX);
        }
        if let Some(intake) = &self.intake {
            intake.take_over();
            self.awake_bytes = intake.bytes();
            self.awake_until = Some(monotonic_now().after(AWAKE_MAX));
        }
    }

    fn fall_asleep(&mut self) {
        if self.awake_until.take().is_some()
            && let Some(intake) = &self.intake
        {
            intake.give_back();
        }
    }

    /// On a thread of its own: this one has to answer meanwhile.
    fn digest(&mut self) {
        let Some(vmm) = &self.vmm else { return };
        let (ram, events) = (vmm.ram(), Arc::clone(&self.events));
        let computing = host::spawn("martlet-digest", move || {
            events.post(Event::Digested(ram.digest()));
        });
        if let Err(error) = computing {
            self.digest_failed(&error);
        }
    }

    fn digest_failed(&mut self, error: &std::io::Error) {
        let reason = format!("cannot digest guest memory: {error}");
        self.tell(DestinationEvent::LoadFailed { reason });
    }

    fn start(&mut self, permit: RunPermit, running: bool) {
        let vmm = self.vmm.as_ref().expect("a start follows a successful build");
        let state = if running { RunState::Running } else { RunState::Paused };
        // Whatever a peer still sends, it must not land in the memory of a guest that runs.
        if let Some(intake) = &self.intake {
            intake.close();
        }
        // Before the call: once the vCPUs run, this thread may have to wait for a core.
        let now = monotonic_now();
        vmm.start(permit, state);
        self.tell(DestinationEvent::Started { at: now });
        self.fall_asleep();
        self.devices_wait = true;
        self.heartbeat_until = Some(if running { now.after(HEARTBEAT_MAX) } else { now });
    }

    /// Once the source knows that the guest runs. Blocks for some milliseconds: the cards of a
    /// running guest wait for nothing else.
    fn resume_devices(&mut self) {
        if !std::mem::take(&mut self.devices_wait) {
            return;
        }
        let Some(vmm) = &self.vmm else { return };
        let begin = monotonic_now();
        let trouble = vmm.resume_devices().err().map(|error| crate::chain(&error));
        if let Some(trouble) = &trouble {
            warn!(%trouble, "a device does not work here");
        }
        let cards = vmm.first_frames().len().min(DEVICES_MAX);
        if cards > 0 || trouble.is_some() {
            self.devices = Some(DevicesAlive {
                resume_begin_ns: begin.0,
                resume_end_ns: monotonic_now().0,
                first_frames_ns: vec![None; cards],
                trouble,
            });
        }
    }

    fn look_for_heartbeat(&mut self, now: Instant) {
        let Some(until) = self.heartbeat_until else { return };
        let Some(vmm) = &self.vmm else { return };
        let first = vmm.first_heartbeat();
        let mut heard_all = first.is_some();
        // The heartbeat is worth a long wait, frames are not.
        let frames_until = self.devices.as_ref().map(|devices| devices.resume_end_ns);
        let late = frames_until.is_some_and(|end| now >= Instant(end).after(FRAMES_MAX));
        if let Some(devices) = &mut self.devices {
            for (known, frame) in devices.first_frames_ns.iter_mut().zip(vmm.first_frames()) {
                *known = frame.map(|moment| moment.0);
                heard_all &= frame.is_some();
            }
        }
        if heard_all || (first.is_some() && late) || now >= until {
            self.report_alive(first);
        }
    }

    fn report_alive(&mut self, first: Option<Instant>) {
        self.heartbeat_until = None;
        let cpu = host::process_cpu().saturating_sub(self.cpu_before);
        let devices = self.devices.take();
        self.tell(DestinationEvent::Alive(Alive {
            first_heartbeat_ns: first.map(|moment| moment.0),
            cpu_ns: nanos(cpu),
            load_begin_ns: self.loading.map(|(begin, _)| begin.0),
            load_end_ns: self.loading.map(|(_, end)| end.0),
            devices,
            wall_clock_ns: Some(host::wall_clock_ns()),
        }));
    }

    fn discard(&mut self) {
        self.fall_asleep();
        self.intake = None;
        self.joined.clear();
        self.vmm = None;
    }

    /// Waits without sleeping: looks at every channel, the control connection and the mailbox,
    /// and yields the core when nothing was there.
    fn look_around(&mut self) {
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
        self.take_events();
        self.read_control();
    }

    fn take_events(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.events.take() {
            any = true;
            match event {
                Event::ChannelJoined { channel, stream } => self.on_joined(channel, stream),
                Event::RdmaJoined { stream } => self.on_rdma_joined(stream),
                Event::BarrierPassed { channel, round } => self.on_barrier(channel, round),
                Event::Digested(Ok(digest)) => self.tell(DestinationEvent::OwnDigest(digest)),
                Event::Digested(Err(error)) => self.digest_failed(&error),
                Event::ChannelLost { channel, reason } => {
                    let last_barrier = self.barriers.get(usize::from(channel)).copied().flatten();
                    self.tell(DestinationEvent::ChannelLost { last_barrier, reason });
                }
                Event::Query { migration, answer } => {
                    let _ = answer.send(self.machine.answer(migration));
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
                Err(error) => self.stop_reading(error),
            }
            any = true;
            self.act();
        }
        any
    }

    fn stop_reading(&mut self, error: ReceiveError) {
        self.control_open = false;
        let reason = crate::chain(&error);
        match error {
            ReceiveError::Protocol(_) => self.tell(DestinationEvent::Malformed { reason }),
            ReceiveError::Refused(kind) => {
                self.tell(DestinationEvent::Refused(kind));
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
                self.discard();
                Err(reason)
            }
            None => unreachable!("an attempt is served until it has an outcome"),
        };
        self.shared.put_ledger(self.machine.into_ledger());
        self.shared.end_attempt(end);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
