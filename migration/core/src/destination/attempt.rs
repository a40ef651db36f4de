//! One attempt to take a guest in.

use super::io::{DestinationIo, Event, Unheard};
use super::life::Life;
use super::receiving::Receiving;
use crate::{DestinationVmm, Fault, LoadFor, RunState};
use core::mem;
use core::time::Duration;
use martlet_protocol::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, DestinationOutcome,
    DestinationPhase, Ledger, RunPermit,
};
use martlet_units::{ByteCount, Instant, PAGE_SIZE};
use martlet_wire::control::{Abandon, Control, Fate, Setup};
use std::collections::VecDeque;
use std::sync::Arc;
use tracing::info;

/// Messages that are taken before timers and the owner are looked at again. A source that keeps to
/// the protocol never has so many on the way.
const MESSAGES_AT_ONCE: usize = 64;

/// Answers that may wait for the source to take them. All that a destination ever says to one that
/// keeps to the protocol is shorter.
const UNSENT_BYTES_MAX: usize = 64 << 10;

/// How long an attempt that is over waits for the source to take its last words: a refusal gives
/// the guest back.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// What an attempt begins with.
#[derive(Debug)]
pub struct AttemptConfig {
    /// What this side tells its source of itself.
    pub protocol: DestinationConfig,
    /// What this process remembers of earlier attempts.
    pub ledger: Ledger,
    /// Most memory that a guest may have.
    pub memory_max: ByteCount,
}

/// What to do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again at once: a blackout is near. With nothing to do at the moment, yield the core.
    Again {
        /// Nothing was there.
        idle: bool,
    },
    /// Wait until something comes or there is room to send what is left, or until then.
    Wait {
        /// `None` if no time is waited for.
        until: Option<Instant>,
        /// Whether a message of the source would be taken: do not wait for one otherwise.
        listens: bool,
    },
    /// The attempt is over: [`Attempt::end`] it.
    Over,
}

/// One attempt to take a guest in: does what the protocol's machine says. It takes a bounded number
/// of events before it looks at the time.
pub struct Attempt {
    protocol: Destination,
    /// What has happened and the protocol's machine was not told yet.
    pending: VecDeque<DestinationEvent>,
    /// Cleared once the control connection broke or said what is no message.
    control_open: bool,
    /// Messages may be there that were not taken.
    unread: bool,
    /// Whoever asks was told what became of it.
    is_decided: bool,
    has_panicked: bool,
    memory_max: ByteCount,
    vmm: Option<Arc<dyn DestinationVmm>>,
    receiving: Receiving,
    /// The right to run the guest, from its making until the machine has it.
    start: Option<(RunPermit, RunState)>,
    life: Life,
    outcome: Option<DestinationOutcome>,
    /// Until when the last words may wait.
    farewell_until: Option<Instant>,
}

impl Attempt {
    /// Begins with the setup that was the first message of its source.
    pub fn new(io: &mut impl DestinationIo, config: AttemptConfig, setup: Setup) -> Attempt {
        let AttemptConfig { protocol, ledger, memory_max } = config;
        let mut attempt = Attempt {
            protocol: Destination::new(io.now(), protocol, ledger),
            pending: VecDeque::new(),
            control_open: true,
            unread: false,
            is_decided: false,
            has_panicked: false,
            memory_max,
            vmm: None,
            receiving: Receiving::default(),
            start: None,
            life: Life::new(io.host()),
            outcome: None,
            farewell_until: None,
        };
        attempt.tell(DestinationEvent::Received(Control::Setup(setup)));
        attempt
    }

    /// Takes in what has come, does what follows from it, and looks at the time.
    pub fn step(&mut self, io: &mut impl DestinationIo) -> Next {
        if let Some(until) = self.farewell_until {
            return self.say_farewell(io, until);
        }
        self.show_fate(io);
        let looked_at = io.now();
        let heard = self.take_in(io);
        self.settle(io);
        if let Some(vmm) = &self.vmm {
            self.life.resume_devices(io, vmm.as_ref());
        }
        // What had come by the last look has been acted on: it counts first, however late this look
        // is. What comes without end does not hold the time up.
        while self.protocol.poll_timeout().is_some_and(|at| at <= looked_at) {
            self.protocol.on_timeout(io.now());
            self.settle(io);
        }
        if self.outcome.is_some() {
            self.show_fate(io);
            let until = io.now().after(FAREWELL_MAX);
            self.farewell_until = Some(until);
            return self.say_farewell(io, until);
        }
        if self.receiving.is_awake() || mem::take(&mut self.unread) {
            return Next::Again { idle: !heard };
        }
        let timeout = self.protocol.poll_timeout();
        let until = timeout.into_iter().chain(self.life.look_at(io.now())).min();
        Next::Wait { until, listens: self.control_open }
    }

    /// Whether there was anything.
    fn take_in(&mut self, io: &mut impl DestinationIo) -> bool {
        let mut heard = self.receiving.look();
        heard |= self.take_events(io);
        heard |= self.read_control(io);
        self.receiving.stay_awake(io.now());
        if let Some(vmm) = &self.vmm
            && let Some(alive) = self.life.look(io, vmm.as_ref())
        {
            self.tell(DestinationEvent::Alive(alive));
        }
        heard
    }

    fn take_events(&mut self, io: &mut impl DestinationIo) -> bool {
        let mut any = false;
        while let Some(event) = io.take_event() {
            any = true;
            match event {
                Event::Built(Ok(vmm)) => {
                    self.vmm = Some(vmm);
                    self.tell(DestinationEvent::Built);
                }
                Event::ChannelsJoined => self.open_intake(io),
                Event::RoundReceived { round } => {
                    self.tell(DestinationEvent::RoundReceived { round });
                }
                Event::Digested(Ok(digest)) => self.tell(DestinationEvent::OwnDigest(digest)),
                Event::ChannelLost { error, .. } if error.fault() == Fault::Host => {
                    self.fail(error.to_line());
                }
                Event::ChannelLost { last_barrier, error } => {
                    let reason = error.to_line();
                    self.tell(DestinationEvent::ChannelLost { last_barrier, reason });
                }
                Event::Built(Err(error)) | Event::Digested(Err(error)) => {
                    self.fail(error.to_line());
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
    fn read_control(&mut self, io: &mut impl DestinationIo) -> bool {
        for taken in 0..MESSAGES_AT_ONCE {
            self.act(io);
            if !self.control_open {
                return taken > 0;
            }
            match io.receive(&|kind| self.protocol.admits(kind)) {
                Ok(Some(message)) => self.tell(DestinationEvent::Received(message)),
                Ok(None) => return taken > 0,
                Err(unheard) => self.stop_reading(unheard),
            }
        }
        // What is left may be in memory already, where nothing that waits sees it.
        self.unread = true;
        true
    }

    fn stop_reading(&mut self, unheard: Unheard) {
        self.control_open = false;
        match unheard {
            Unheard::Malformed(error) => {
                self.tell(DestinationEvent::Malformed { reason: error.to_line() });
            }
            Unheard::Refused(kind, error) => {
                self.tell(DestinationEvent::Refused(kind));
                self.tell(DestinationEvent::ControlLost { reason: error.to_line() });
            }
            Unheard::Lost(error) => {
                self.tell(DestinationEvent::ControlLost { reason: error.to_line() });
            }
        }
    }

    /// Performs everything that is due, and sends what came of it.
    fn settle(&mut self, io: &mut impl DestinationIo) {
        self.act(io);
        self.speak(io);
        // What was lost with that.
        self.act(io);
    }

    fn act(&mut self, io: &mut impl DestinationIo) {
        loop {
            while let Some(action) = self.protocol.poll_action() {
                self.perform(io, action);
            }
            match self.pending.pop_front() {
                Some(event) => self.protocol.on_event(io.now(), event),
                None => return,
            }
        }
    }

    /// Sends what was queued, as far as there is room.
    fn speak(&mut self, io: &mut impl DestinationIo) {
        match io.flush() {
            Ok(unsent) if unsent > UNSENT_BYTES_MAX => self.lose_control("it takes no messages"),
            Ok(_) => {}
            Err(error) => {
                // What the source said before it went comes first: it may be the commit.
                self.read_control(io);
                self.lose_control(&error.to_line());
            }
        }
    }

    /// Tells those who ask, and the owner, what becomes of the guest once that is decided. Behind
    /// the next wait, which is short then: the source comes first, and vCPUs that were just started
    /// may wait for this thread's processor, which whom this wakes would take before them.
    fn show_fate(&mut self, io: &mut impl DestinationIo) {
        if self.is_decided {
            return;
        }
        let Some(migration) = self.protocol.migration() else { return };
        let fate = self.protocol.fate(migration);
        if fate != Fate::Pending {
            self.is_decided = true;
            io.decide(fate, self.vmm.as_ref().filter(|_| fate == Fate::Committed));
        }
    }

    /// The loss is told once.
    fn lose_control(&mut self, reason: &str) {
        if mem::replace(&mut self.control_open, false) {
            self.tell(DestinationEvent::ControlLost { reason: reason.to_owned() });
        }
    }

    fn tell(&mut self, event: DestinationEvent) {
        self.pending.push_back(event);
    }

    /// This host can't do its part.
    fn fail(&mut self, reason: String) {
        self.tell(DestinationEvent::HostFailed { reason });
    }

    fn perform(&mut self, io: &mut impl DestinationIo, action: DestinationAction) {
        match action {
            DestinationAction::Send(message) => {
                if let Control::RoundReceived(received) = &message {
                    self.receiving.tell_round(received.round);
                }
                io.queue(&message);
            }
            DestinationAction::Build(setup) => self.build(io, setup),
            DestinationAction::AcceptChannels { count, token } => io.await_channels(count, token),
            DestinationAction::LoadState { bytes, rehearsal, clock } => {
                let start = LoadFor::Start { source_clock: clock };
                self.load_state(io, &bytes, if rehearsal { LoadFor::Rehearsal } else { start });
            }
            DestinationAction::Arm => {
                if let Some(vmm) = &self.vmm {
                    self.receiving.arm(io.now(), vmm.as_ref());
                }
            }
            DestinationAction::ComputeDigest => {
                if let Some(vmm) = &self.vmm {
                    io.digest(&vmm.ram());
                }
            }
            DestinationAction::Start { permit, running } => {
                self.start = Some((permit, RunState::of(running)));
                self.start_guest(io);
            }
            DestinationAction::Discard => {
                // The source hears of it first: its guest may stand, and to drop a large memory
                // takes the host seconds.
                self.speak(io);
                self.discard(io);
            }
            DestinationAction::Finish(outcome) => {
                match &outcome {
                    DestinationOutcome::Arrived => info!("the guest has arrived"),
                    DestinationOutcome::Abandoned { reason } => {
                        info!(%reason, "the migration was abandoned");
                    }
                }
                self.outcome = Some(outcome);
            }
        }
    }

    /// Before anything is made for a peer of whom nothing is known: what a guest's memory costs the
    /// host begins with tables for it.
    fn build(&mut self, io: &mut impl DestinationIo, setup: Setup) {
        let pages = setup.regions.iter().map(|region| region.pages);
        let bytes = ByteCount(pages.fold(0, u64::saturating_add).saturating_mul(PAGE_SIZE));
        let most = self.memory_max;
        if bytes > most {
            // The difference counts, if it is only what the guest boots from.
            let exact = |count: ByteCount| format!("{} bytes", count.0);
            let (bytes, most) = match (bytes.to_string(), most.to_string()) {
                (told, same) if told == same => (exact(bytes), exact(most)),
                told => told,
            };
            return self.fail(format!(
                "the guest, with what it boots from, has {bytes} of memory, at most {most} are \
                 taken here: what the host has, or the limit set with --memory-max"
            ));
        }
        match setup.layout() {
            Ok(layout) => io.build(setup, layout),
            Err(error) => self.fail(error.to_string()),
        }
    }

    fn open_intake(&mut self, io: &mut impl DestinationIo) {
        let Some(vmm) = &self.vmm else { return };
        match io.open_intake(&vmm.ram()) {
            Ok(intake) => {
                self.receiving.open(intake);
                self.tell(DestinationEvent::ChannelsConnected);
            }
            Err(error) => self.fail(error.to_line()),
        }
    }

    fn load_state(&mut self, io: &impl DestinationIo, bytes: &[u8], what_for: LoadFor) {
        let Some(vmm) = &self.vmm else { return };
        let begin = io.now();
        let loaded = vmm.load_state(bytes, what_for);
        let end = io.now();
        self.life.note_load(begin, end);
        match loaded {
            Ok(()) => {
                let load_ns = super::life::nanos(end.since(begin));
                self.tell(DestinationEvent::StateLoaded { load_ns });
            }
            Err(error) => self.fail(error.to_line()),
        }
    }

    /// Gives the machine the right to run its guest.
    fn start_guest(&mut self, io: &impl DestinationIo) {
        // Whatever a peer still sends, it must not land in the memory of a guest that runs. Until
        // the machine has the right it is kept: should this panic, it is not lost.
        self.receiving.close();
        let vmm = self.vmm.as_ref().expect("a start follows a successful build");
        // Before the call: once the vCPUs run, this thread may have to wait for a core.
        let now = io.now();
        let Some((permit, state)) = self.start.take() else { return };
        vmm.start(permit, state);
        self.tell(DestinationEvent::Started { at: now });
        self.receiving.leave_taken_over();
        self.life.begin(now, state);
    }

    fn discard(&mut self, io: &mut impl DestinationIo) {
        self.receiving.drop_intake();
        io.drop_channels();
        self.vmm = None;
        io.cancel_build();
    }

    fn say_farewell(&mut self, io: &mut impl DestinationIo, until: Instant) -> Next {
        self.receiving.fall_asleep();
        let is_left = io.flush().is_ok_and(|unsent| unsent > 0);
        if is_left && io.now() < until {
            Next::Wait { until: Some(until), listens: false }
        } else {
            Next::Over
        }
    }

    /// Where it stands.
    pub fn phase(&self) -> DestinationPhase {
        self.protocol.phase()
    }

    /// How the attempt ended, and what is to be remembered of it.
    ///
    /// # Panics
    /// If it is not over.
    pub fn end(self) -> (DestinationOutcome, Ledger) {
        let outcome = self.outcome.expect("an attempt is served until it has an outcome");
        (outcome, self.protocol.into_ledger())
    }

    /// A step panicked. A guest that was to run is started, whatever else went wrong, its owner gets
    /// the machine, and its devices go on; what was not yet to run never will, and the source is
    /// told so: whether the guest is here. If this panics in turn, call it again: it goes on behind
    /// what panicked.
    pub fn end_by_panic(&mut self, io: &mut impl DestinationIo, reason: &str) -> bool {
        let is_here = self.protocol.has_made_permit();
        while let Some(action) = self.protocol.poll_action() {
            if let DestinationAction::Start { permit, running } = action {
                self.start = Some((permit, RunState::of(running)));
            }
        }
        if is_here {
            self.receiving.drop_intake();
            self.start_guest(io);
            // Its owner first: until he has the machine, nobody else holds it.
            if !mem::replace(&mut self.is_decided, true) {
                io.decide(Fate::Committed, self.vmm.as_ref());
            }
            if let Some(vmm) = &self.vmm {
                self.life.resume_started(io, vmm.as_ref());
            }
        } else {
            if !mem::replace(&mut self.has_panicked, true) {
                io.queue(&Control::Abandon(Abandon::because(reason)));
                let _ = io.flush();
            }
            self.discard(io);
        }
        self.farewell_until = Some(io.now().after(FAREWELL_MAX));
        is_here
    }

    /// What is to be remembered of an attempt that panicked: unless the right to run the guest was
    /// made, it is abandoned for ever.
    pub fn give_up(self) -> Ledger {
        self.protocol.give_up()
    }
}

impl core::fmt::Debug for Attempt {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Attempt").field("phase", &self.protocol.phase()).finish_non_exhaustive()
    }
}
