//! Things go wrong.

use crate::net::{Harm, Side, WireId};
use crate::scenario::{Cut, Fault, LinkId, Unknown, When};
use crate::source::Run;
use crate::violation::Violation;
use crate::world::{Event, World};
use martlet_transport::Connection;
use martlet_wire::control::{Control, Ping, Pong};
use martlet_wire::frame;
use martlet_wire::hello::Hello;

impl World {
    /// Lets the faults that are due happen.
    pub(crate) fn strike(&mut self) -> Result<(), Violation> {
        let (began, first_step) = self.began;
        let (now, step) = (self.now(), self.steps - first_step);
        let is_due = |when: &When| match *when {
            When::Time(after) => now.since(began) >= after,
            When::Step(number) => step >= number,
        };
        let (due, later) =
            std::mem::take(&mut self.faults).into_iter().partition(|(when, _)| is_due(when));
        self.faults = later;
        let due: Vec<(When, Fault)> = due;
        for (_, fault) in due {
            self.trace.line(now, format_args!("{fault:?}"));
            self.hurt(fault);
        }
        Ok(())
    }

    fn wire(&self, id: LinkId) -> Option<WireId> {
        let run = self.run.as_ref()?;
        match id {
            LinkId::Control => Some(run.control_wire),
            LinkId::Data(channel) => run.outside.as_ref()?.wires.get(usize::from(channel)).copied(),
        }
    }

    /// All connections of the attempt.
    fn wires(&self) -> Vec<WireId> {
        let data = (0..self.scenario.channels).map(LinkId::Data);
        core::iter::once(LinkId::Control).chain(data).filter_map(|id| self.wire(id)).collect()
    }

    fn hurt(&mut self, fault: Fault) {
        let now = self.now();
        match fault {
            Fault::Cut(link, cut) => {
                let Some(wire) = self.wire(link) else { return };
                let harms: &[Harm] = match cut {
                    Cut::Close => &[Harm::Close],
                    Cut::Reset => &[Harm::Reset],
                    Cut::Silence(side) => &[Harm::Silence(side)],
                    Cut::SilenceBoth => {
                        &[Harm::Silence(Side::Source), Harm::Silence(Side::Destination)]
                    }
                };
                harms.iter().for_each(|harm| self.net.harm(wire, *harm));
            }
            Fault::Stall(link, side, time) => {
                if let Some(wire) = self.wire(link) {
                    self.net.harm(wire, Harm::Hold(side, now.after(time)));
                }
            }
            Fault::Trickle(link, side) => {
                if let Some(wire) = self.wire(link) {
                    self.net.harm(wire, Harm::Trickle(side));
                }
            }
            Fault::Flood(side) => self.flood(side),
            Fault::Freeze(side, time) => {
                let turn = self.turn(side);
                turn.frozen_until = turn.frozen_until.max(now.after(time));
                turn.at = None;
                let until = turn.frozen_until;
                self.wake_at(side, until);
            }
            Fault::Crash { side, delivered } => self.crash(side, delivered),
            Fault::Cancel | Fault::Quit(Side::Source) => {
                if let Some(run) = &mut self.run {
                    run.cancel(now);
                }
                self.wake(Side::Source);
            }
            Fault::Quit(Side::Destination) => {
                self.destination.stop();
                self.wake(Side::Destination);
            }
            Fault::Host(Side::Source) => self.machine.fail_next(),
            Fault::Host(Side::Destination) => {
                if let Some(machine) = &self.destination.machine {
                    machine.fail_next();
                }
            }
            Fault::SilentDevice => self.machine.silence_device(),
            Fault::HypervisorWrites => {
                self.net.chance(|chance| self.machine.hypervisor_writes(chance));
            }
            Fault::Unknown(who) => self.connect_another(who),
        }
    }

    /// The peer of a side turns hostile, between two of its messages.
    fn flood(&mut self, side: Side) {
        let Some(wire) = self.wire(LinkId::Control) else { return };
        let (unsent, message) = match side {
            Side::Source => {
                let pong = Pong { sent_ns: 1, answered_ns: 1 };
                (self.destination.unsent(), Control::Pong(pong))
            }
            Side::Destination => {
                let unsent = self.run.as_ref().map_or(0, Run::unsent);
                (unsent, Control::Ping(Ping { sent_ns: 1 }))
            }
        };
        let is_greeting = self.run.as_ref().is_none_or(|run| run.attempt.is_none());
        if unsent > 0 || is_greeting {
            return;
        }
        let mut bytes = Vec::new();
        frame::encode(&message, &mut bytes).expect("a small message");
        self.net.flood(wire, side, bytes);
    }

    fn connect_another(&mut self, who: Unknown) {
        let (_, near, far) = self.net.connect();
        let hello = match who {
            Unknown::Silent => None,
            Unknown::Garbage => Some(b"GET / HTTP/1.1".to_vec()),
            Unknown::IdleSource => Some(Hello::control().to_bytes().to_vec()),
            Unknown::Channel => Some(Hello::data(0, [7; 16]).to_bytes().to_vec()),
        };
        if let Some(bytes) = hello {
            near.write_now(&bytes).expect("a new connection has room");
        }
        self.others.push(near);
        self.net.put_at(self.now(), Event::Connected { end: far });
    }

    fn crash(&mut self, side: Side, delivered: bool) {
        for wire in self.wires() {
            self.net.harm(wire, if delivered { Harm::Close } else { Harm::Reset });
        }
        match side {
            Side::Source if self.source_lives => {
                self.source_lives = false;
                self.run = None;
                // Unless it had given the right away, the guest dies with it.
                self.machine.die();
            }
            Side::Destination if self.destination_lives => {
                self.died |= self.destination.has_permit();
                self.destination_lives = false;
            }
            Side::Source | Side::Destination => {}
        }
    }
}
