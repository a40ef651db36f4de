//! The destination's host: carries out what the destination's machine wants, as the engine does.

use crate::checker::{Violation, ensure};
use crate::guest::Machine;
use crate::link::{LinkId, Side};
use crate::scenario::Sabotage;
use crate::world::{Event, Payload, World};
use core::time::Duration;
use martlet_protocol::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, DestinationOutcome,
    DestinationPhase, Ledger,
};
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{Alive, Answer, InstanceId, MigrationId};

/// A process that takes a guest in.
#[derive(Debug)]
pub(crate) struct DestinationHost {
    pub(crate) alive: bool,
    pub(crate) machine: Option<Machine>,
    pub(crate) protocol: Option<Destination>,
    /// Between attempts.
    ledger: Option<Ledger>,
    token: [u8; 16],
    accepting: bool,
    /// For each channel that was let in, the last round whose barrier came on it.
    channels: Vec<Option<Option<u32>>>,
    rounds_told: u32,
    /// The next thing asked for fails.
    pub(crate) fails: bool,
    pub(crate) outcome: Option<DestinationOutcome>,
}

/// A step of the destination host's own work, done some time after it was asked for.
#[derive(Debug)]
pub(crate) enum DestinationWork {
    /// The machine is built.
    Build,
    /// A state is loaded.
    Load { bytes: Vec<u8>, rehearsal: bool },
    /// Memory is digested.
    Digest,
    /// The vCPUs run.
    Start,
    /// The guest gave a sign of life.
    Alive,
}

impl DestinationHost {
    /// A process that just started.
    pub(crate) fn new(chance: &mut martlet_simulation::Chance) -> DestinationHost {
        DestinationHost {
            alive: true,
            machine: None,
            protocol: None,
            ledger: Some(Ledger::new(InstanceId(chance.name()))),
            token: [0; 16],
            accepting: false,
            channels: Vec::new(),
            rounds_told: 0,
            fails: false,
            outcome: None,
        }
    }

    /// A control connection came. `false` if another attempt is under way, or a guest is here.
    pub(crate) fn try_begin(
        &mut self,
        now: Instant,
        chance: &mut martlet_simulation::Chance,
    ) -> bool {
        if let Some(protocol) = self.protocol.take_if(|protocol| protocol.phase().is_over()) {
            self.ledger = Some(protocol.into_ledger());
        }
        let occupied = self.outcome == Some(DestinationOutcome::Arrived);
        if !self.alive || occupied {
            return false;
        }
        let Some(ledger) = self.ledger.take() else { return false };
        self.token = chance.name();
        let config = DestinationConfig { token: self.token, clock_key: None };
        self.protocol = Some(Destination::new(now, config, ledger));
        self.accepting = false;
        self.channels.clear();
        self.rounds_told = 0;
        self.fails = false;
        self.outcome = None;
        true
    }

    pub(crate) fn phase(&self) -> Option<DestinationPhase> {
        self.protocol.as_ref().map(Destination::phase)
    }

    /// What it answers to a query, if its process lives.
    pub(crate) fn answer(&self, migration: MigrationId) -> Option<Answer> {
        if !self.alive {
            return None;
        }
        match (&self.protocol, &self.ledger) {
            (Some(protocol), _) => Some(protocol.answer(migration)),
            (None, Some(ledger)) => Some(ledger.answer(migration)),
            (None, None) => None,
        }
    }

    pub(crate) fn permit_holders(&self) -> usize {
        let holds = |machine: &Machine| machine.permit.is_some();
        usize::from(self.alive && self.machine.as_ref().is_some_and(holds))
    }

    pub(crate) fn run_guest(&mut self, chance: &mut martlet_simulation::Chance) {
        if let Some(machine) = &mut self.machine
            && self.alive
            && machine.runs()
        {
            machine.run(chance, None);
        }
    }

    /// The newest round whose barrier came on every channel.
    fn complete_round(&self, first_counts: bool) -> Option<u32> {
        let barriers = self.channels.iter().map(|channel| channel.flatten());
        if first_counts { barriers.max().flatten() } else { barriers.min().flatten() }
    }
}

impl World {
    /// Tells the destination's machine, and does what it then wants.
    pub(crate) fn tell_destination(&mut self, event: DestinationEvent) -> Result<(), Violation> {
        let now = self.queue.now();
        let Some(protocol) = &mut self.destination.protocol else { return Ok(()) };
        if !self.destination.alive {
            return Ok(());
        }
        let before = protocol.phase();
        protocol.on_event(self.clock.at(now), event);
        let after = protocol.phase();
        if before != after {
            self.trace.line(now, format_args!("destination {before:?} -> {after:?}"));
        }
        self.drain_destination()
    }

    pub(crate) fn destination_timer(&mut self) -> Result<(), Violation> {
        let now = self.queue.now();
        let Some(protocol) = &mut self.destination.protocol else { return Ok(()) };
        if !self.destination.alive
            || protocol.poll_timeout().is_none_or(|at| at > self.clock.at(now))
        {
            return Ok(());
        }
        let before = protocol.phase();
        protocol.on_timeout(self.clock.at(now));
        let after = protocol.phase();
        if before != after {
            self.trace.line(now, format_args!("destination's time is up: {before:?} -> {after:?}"));
        }
        self.drain_destination()
    }

    pub(crate) fn drain_destination(&mut self) -> Result<(), Violation> {
        while let Some(action) =
            self.destination.protocol.as_mut().and_then(Destination::poll_action)
        {
            self.on_destination_action(action)?;
        }
        let timeout = self.destination.protocol.as_ref().and_then(Destination::poll_timeout);
        if let Some(at) = timeout {
            let at = self.clock.when(at).max(self.queue.now());
            self.queue.put_at(at, Event::DestinationTimer);
        }
        Ok(())
    }

    fn on_destination_action(&mut self, action: DestinationAction) -> Result<(), Violation> {
        let now = self.queue.now();
        match action {
            DestinationAction::Send(message) => self.send_control(Side::Source, &message),
            DestinationAction::Build(_) => self.destination_works(200, DestinationWork::Build),
            DestinationAction::AcceptChannels { count, token } => {
                ensure(token == self.destination.token, || "another token".to_owned())?;
                self.destination.accepting = true;
                self.destination.channels = vec![None; usize::from(count)];
            }
            DestinationAction::LoadState { bytes, rehearsal, clock } => {
                if !rehearsal {
                    self.check_clock(clock)?;
                }
                self.destination_works(100, DestinationWork::Load { bytes, rehearsal });
            }
            DestinationAction::Arm => self.trace.line(now, format_args!("destination armed")),
            DestinationAction::ComputeDigest => {
                self.destination_works(300, DestinationWork::Digest);
            }
            DestinationAction::Start { permit, running } => {
                self.trace.line(now, format_args!("destination starts, running {running}"));
                let Some(machine) = &mut self.destination.machine else {
                    return ensure(false, || "started what was not built".to_owned());
                };
                self.checker.at_start(&self.source.machine, machine, running)?;
                machine.permit = Some(permit);
                machine.wanted = running;
                self.destination_works(20, DestinationWork::Start);
            }
            DestinationAction::Discard => {
                let runs = self.destination.permit_holders() > 0;
                ensure(!runs, || "a started guest was discarded".to_owned())?;
                self.destination.machine = None;
            }
            DestinationAction::Finish(outcome) => {
                self.trace.line(now, format_args!("destination finished {outcome:?}"));
                self.destination.outcome = Some(outcome);
                self.destination.accepting = false;
                self.close_all(Side::Source);
            }
        }
        Ok(())
    }

    fn destination_works(&mut self, micros: u64, work: DestinationWork) {
        let time = Duration::from_nanos(self.chance.between(micros * 200, micros * 2_000));
        self.queue.put_after(time, Event::Destination { attempt: self.attempt, work });
    }

    pub(crate) fn on_destination_work(&mut self, work: DestinationWork) -> Result<(), Violation> {
        if !self.destination.alive {
            return Ok(());
        }
        let failed = match work {
            DestinationWork::Build | DestinationWork::Load { .. } => {
                core::mem::take(&mut self.destination.fails)
            }
            DestinationWork::Digest | DestinationWork::Start | DestinationWork::Alive => false,
        };
        match work {
            DestinationWork::Build if failed => {
                let reason = "not enough memory".to_owned();
                self.tell_destination(DestinationEvent::HostFailed { reason })
            }
            DestinationWork::Build => {
                self.destination.machine = Some(Machine::waiting(self.scenario.pages));
                self.tell_destination(DestinationEvent::Built)
            }
            DestinationWork::Load { .. } if failed => {
                let reason = "this CPU lacks a feature".to_owned();
                self.tell_destination(DestinationEvent::HostFailed { reason })
            }
            DestinationWork::Load { bytes, rehearsal } => self.load(&bytes, rehearsal),
            DestinationWork::Digest => {
                let Some(machine) = &self.destination.machine else { return Ok(()) };
                let digest = machine.digest();
                self.tell_destination(DestinationEvent::OwnDigest(digest))
            }
            DestinationWork::Start => {
                let at = self.clock.at(self.queue.now());
                self.tell_destination(DestinationEvent::Started { at })?;
                self.destination_works(200, DestinationWork::Alive);
                Ok(())
            }
            DestinationWork::Alive => {
                let first_heartbeat_ns = Some(self.clock.at(self.queue.now()).0);
                let alive = Alive {
                    first_heartbeat_ns,
                    cpu_ns: 0,
                    load_begin_ns: None,
                    load_end_ns: None,
                    devices: None,
                    wall_clock_ns: None,
                };
                self.tell_destination(DestinationEvent::Alive(alive))
            }
        }
    }

    /// The destination knows when the state was saved, as exactly as it is told.
    fn check_clock(&self, clock: Option<ClockOffset>) -> Result<(), Violation> {
        let Some((clock, saved)) = clock.zip(self.source.saved_at) else {
            return ensure(false, || "a final state without a clock".to_owned());
        };
        let off = clock.from_peer(saved).0.abs_diff(self.clock.at(saved).0);
        // Two readings are rounded.
        let error = clock.error + Duration::from_nanos(2);
        ensure(Duration::from_nanos(off) <= error, || {
            format!("the clocks are off by {off} ns, said was at most {error:?}")
        })
    }

    fn load(&mut self, bytes: &[u8], rehearsal: bool) -> Result<(), Violation> {
        // Dropped meanwhile.
        let Some(machine) = &mut self.destination.machine else { return Ok(()) };
        let keep = self.scenario.sabotage == Some(Sabotage::KeepRehearsedState);
        if rehearsal || !keep {
            let state = bytes.try_into().map(u64::from_le_bytes);
            machine.state = state.map_err(|_| Violation { what: "state damaged".to_owned() })?;
        }
        let loaded = DestinationEvent::StateLoaded { load_ns: 100_000, start_ns: 5_000 };
        self.tell_destination(loaded)
    }

    /// Something arrived at the destination.
    pub(crate) fn destination_receives(
        &mut self,
        link: LinkId,
        payload: Payload,
    ) -> Result<(), Violation> {
        match (link, payload) {
            (LinkId::Control, Payload::Control(bytes)) => {
                let message = crate::world::decode(&bytes)?;
                self.trace_arrival(Side::Destination, &message);
                self.tell_destination(DestinationEvent::Received(message))
            }
            (LinkId::Control, Payload::Lost) => {
                let reason = "the control connection was closed".to_owned();
                self.tell_destination(DestinationEvent::ControlLost { reason })
            }
            (LinkId::Data(channel), Payload::Hello { channel: named, token }) => {
                let mine = token == self.destination.token && named == channel;
                if !(mine && self.destination.accepting) {
                    self.close(link, Side::Source);
                    return Ok(());
                }
                self.let_in(channel)
            }
            (LinkId::Data(channel), Payload::Lost) => self.lose_channel(channel),
            (LinkId::Data(_), Payload::Pages(pages)) => {
                // A started guest's memory is its own.
                let runs = self.destination.permit_holders() > 0;
                if let Some(machine) = &mut self.destination.machine {
                    ensure(!runs, || "pages came after the start".to_owned())?;
                    for (page, content) in pages {
                        machine.memory[page] = content;
                    }
                }
                Ok(())
            }
            (LinkId::Data(channel), Payload::Barrier { round }) => {
                self.destination.channels[usize::from(channel)] = Some(Some(round));
                self.tell_rounds()
            }
            (link, payload) => ensure(false, || format!("{payload:?} arrived on {link:?}")),
        }
    }

    fn let_in(&mut self, channel: u16) -> Result<(), Violation> {
        self.destination.channels[usize::from(channel)] = Some(None);
        self.send(LinkId::Data(channel), Side::Source, Payload::HelloAccepted);
        if self.destination.channels.iter().all(Option::is_some) {
            return self.tell_destination(DestinationEvent::ChannelsConnected);
        }
        Ok(())
    }

    fn tell_rounds(&mut self) -> Result<(), Violation> {
        let first_counts = self.scenario.sabotage == Some(Sabotage::FirstBarrierCounts);
        let complete = self.destination.complete_round(first_counts);
        if complete == Some(self.destination.rounds_told) {
            let round = self.destination.rounds_told;
            self.destination.rounds_told += 1;
            return self.tell_destination(DestinationEvent::RoundReceived { round });
        }
        Ok(())
    }

    fn lose_channel(&mut self, channel: u16) -> Result<(), Violation> {
        let let_in = self.destination.channels.get(usize::from(channel)).copied().flatten();
        let Some(last_barrier) = let_in else { return Ok(()) };
        let reason = format!("channel {channel} was closed");
        self.tell_destination(DestinationEvent::ChannelLost { last_barrier, reason })
    }
}
