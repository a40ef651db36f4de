//! What is done to a migration, and when.

use crate::spread::Spread;
use martlet_simulation::Chance;
use std::time::Duration;

/// One end of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// A connection of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    Control,
    Data(u16),
    /// What `resolve` opens.
    Query,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToDestination,
    ToSource,
    Both,
}

impl Way {
    pub(crate) fn has(self, one: Way) -> bool {
        self == Way::Both || self == one
    }
}

/// Kinds of control messages, as docs/protocol.md numbers them.
pub(crate) mod kind {
    pub(crate) const SETUP: u16 = 1;
    pub(crate) const SETUP_DONE: u16 = 2;
    pub(crate) const CHANNELS_READY: u16 = 3;
    pub(crate) const ROUND_RECEIVED: u16 = 4;
    pub(crate) const REHEARSE: u16 = 5;
    pub(crate) const REHEARSED: u16 = 6;
    pub(crate) const SWITCHOVER_SOON: u16 = 7;
    pub(crate) const FINAL_STATE: u16 = 8;
    pub(crate) const COMMIT: u16 = 11;
    pub(crate) const COMMITTED: u16 = 12;
    pub(crate) const COMMIT_REFUSED: u16 = 13;
    pub(crate) const ALIVE: u16 = 14;
    pub(crate) const PING: u16 = 15;
    pub(crate) const ABANDON: u16 = 17;
}

/// Which way each kind goes. Those that go both ways are not named here.
fn way_of(kind: u16) -> Way {
    match kind {
        kind::SETUP
        | kind::REHEARSE
        | kind::SWITCHOVER_SOON
        | kind::FINAL_STATE
        | kind::COMMIT
        | kind::PING => Way::ToDestination,
        _ => Way::ToSource,
    }
}

/// When it happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Trigger {
    /// So long after `migrate` was called.
    Time(Duration),
    /// When the first message of this kind is about to be passed on, or has just been. Then so
    /// much later, while everything else goes on.
    Message { kind: u16, passed: bool, linger: Duration },
    /// When exactly so many bytes have been passed on.
    Bytes { channel: Channel, way: Way, count: u64 },
}

/// What happens to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a reset, as from a firewall.
    Reset,
    /// Both ends see the end of the stream.
    Close,
    /// What goes this way ends, properly; the other way goes on.
    HalfClose(Way),
    /// Whatever goes this way from now on is taken and lost. Nobody is told.
    Silence(Way),
    /// Nothing that goes this way is taken any more.
    Stall(Way),
    /// So many of the next bytes that go this way are others.
    Garble(Way, u8),
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill(Side),
    Cut(Channel, Cut),
    /// The owner cancels.
    Cancel,
}

/// All that chance decides about one attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) fault: Fault,
    pub(crate) trigger: Trigger,
    /// The source speaks to the destination itself, without the proxy and its delay.
    pub(crate) direct: bool,
    pub(crate) channels: u16,
    /// Both sides compare memory before the commit.
    pub(crate) verify: bool,
    /// Bytes a second; 0 for no limit.
    pub(crate) bandwidth: u64,
    /// The guest's owner has paused it.
    pub(crate) paused: bool,
    /// Of a guest that has to be made for this.
    pub(crate) vcpus: u16,
    /// The next migration goes to a process that has seen this one fail, if there is one.
    pub(crate) same_destination: bool,
    /// For the garbage.
    pub(crate) noise: u64,
}

/// The messages around the switchover, each as often as it is worth.
const SWITCHOVER: [u16; 12] = [
    kind::REHEARSED,
    kind::SWITCHOVER_SOON,
    kind::SWITCHOVER_SOON,
    kind::FINAL_STATE,
    kind::FINAL_STATE,
    kind::COMMIT,
    kind::COMMIT,
    kind::COMMIT,
    kind::COMMITTED,
    kind::COMMITTED,
    kind::COMMITTED,
    kind::ALIVE,
];

/// The messages before it.
const PRECOPY: [u16; 7] = [
    kind::SETUP,
    kind::SETUP_DONE,
    kind::CHANNELS_READY,
    kind::ROUND_RECEIVED,
    kind::REHEARSE,
    kind::REHEARSED,
    kind::PING,
];

/// What follows on a message comes within this time.
const LINGER_MAX: Duration = Duration::from_micros(700);

/// Bytes that a control connection carries in one attempt, about.
const CONTROL_BYTES: u64 = 24 << 10;
/// Bytes that all data channels carry in one attempt, about.
const DATA_BYTES: u64 = 18 << 20;

impl Plan {
    fn ordinary(chance: &mut Chance) -> Plan {
        Plan {
            fault: Fault::Cancel,
            trigger: Trigger::Time(Duration::ZERO),
            direct: false,
            channels: chance.pick(&[1, 1, 2, 3]),
            verify: chance.once_in(4),
            bandwidth: if chance.once_in(4) { 100_000_000 + chance.below(700_000_000) } else { 0 },
            paused: chance.once_in(8),
            vcpus: chance.pick(&[1, 1, 2]),
            same_destination: chance.once_in(2),
            noise: chance.bits(),
        }
    }

    /// Nothing is done.
    pub(crate) fn clean(verify: bool) -> Plan {
        let mut plan = Plan::ordinary(&mut Chance::new(0));
        (plan.channels, plan.bandwidth, plan.verify) = (2, 0, verify);
        plan
    }

    /// How long it takes if nothing happens, where `clean` is what it took the last time without
    /// a limit.
    fn duration(&self, clean: Duration) -> Duration {
        if self.bandwidth == 0 {
            return clean;
        }
        clean.max(Duration::from_micros(DATA_BYTES * 1_000_000 / self.bandwidth))
    }

    /// A kill of either side: a quarter spread over the whole migration, a quarter around the
    /// switchover by the clock, half of them at and behind a message.
    pub(crate) fn kill(seed: u64, clean: Duration) -> Plan {
        let mut chance = Chance::new(seed);
        let mut plan = Plan::ordinary(&mut chance);
        plan.fault = Fault::Kill(chance.pick(&[Side::Source, Side::Destination]));
        plan.trigger = match chance.below(4) {
            0 => Trigger::Time(chance.time(plan.duration(clean) * 6 / 5)),
            1 => {
                (plan.bandwidth, plan.verify, plan.direct) = (0, false, true);
                let early = clean.saturating_sub(Duration::from_millis(4));
                Trigger::Time(early + chance.time(Duration::from_millis(6)))
            }
            _ => message(&mut chance),
        };
        if let Trigger::Time(_) = plan.trigger {
            plan.direct |= chance.once_in(2);
        }
        plan
    }

    /// A cut that both sides notice soon, or garbage, or a cancel. A quarter is where it hurts most:
    /// when the source can't know whether the destination has the guest.
    pub(crate) fn cut(seed: u64, clean: Duration) -> Plan {
        let mut chance = Chance::new(seed);
        let mut plan = Plan::ordinary(&mut chance);
        if chance.once_in(4) {
            return plan.cut_in_doubt(&mut chance);
        }
        let way = chance.pick(&[Way::ToDestination, Way::ToSource]);
        let channel = random_channel(&mut chance, plan.channels);
        plan.trigger = match chance.below(4) {
            0 => Trigger::Time(chance.time(plan.duration(clean) * 6 / 5)),
            1 => bytes(&mut chance, &plan, channel, way),
            _ => message(&mut chance),
        };
        plan.fault = match chance.below(8) {
            0 | 1 => Fault::Cut(channel, Cut::Reset),
            2 | 3 => Fault::Cut(channel, Cut::Close),
            // Nobody would notice the end of a way that carries nothing.
            4 if channel != Channel::Control => {
                Fault::Cut(channel, Cut::HalfClose(Way::ToDestination))
            }
            4 => Fault::Cut(channel, Cut::HalfClose(way)),
            5 | 6 => garbage(&mut chance, &mut plan, channel),
            _ => Fault::Cancel,
        };
        plan
    }

    fn cut_in_doubt(mut self, chance: &mut Chance) -> Plan {
        self.trigger = match chance.below(4) {
            0 => Trigger::Message { kind: kind::COMMITTED, passed: false, linger: Duration::ZERO },
            1 => Trigger::Message { kind: kind::COMMIT, passed: false, linger: Duration::ZERO },
            _ => {
                let linger = chance.time(LINGER_MAX / 2);
                Trigger::Message { kind: kind::COMMIT, passed: true, linger }
            }
        };
        let cut = chance.pick(&[Cut::Reset, Cut::Close, Cut::HalfClose(Way::ToSource)]);
        self.fault = Fault::Cut(Channel::Control, cut);
        self
    }

    /// A connection on which nothing comes any more, for one way or both: only a deadline ends
    /// that.
    pub(crate) fn stall(seed: u64, clean: Duration) -> Plan {
        let mut chance = Chance::new(seed);
        let mut plan = Plan::ordinary(&mut chance);
        plan.bandwidth = 0;
        // A running guest keeps a core busy for as long as its attempt takes.
        plan.paused = !chance.once_in(4);
        let channel = random_channel(&mut chance, plan.channels);
        let way = match channel {
            Channel::Control => chance.pick(&[Way::ToDestination, Way::ToSource, Way::Both]),
            Channel::Data(_) | Channel::Query => chance.pick(&[Way::ToDestination, Way::Both]),
        };
        plan.fault = Fault::Cut(channel, chance.pick(&[Cut::Stall(way), Cut::Silence(way)]));
        plan.trigger = match chance.below(4) {
            0 => Trigger::Time(chance.time(clean)),
            1 => bytes(&mut chance, &plan, channel, Way::ToDestination),
            _ => message(&mut chance),
        };
        plan
    }
}

fn message(chance: &mut Chance) -> Trigger {
    let kind = if chance.once_in(4) { chance.pick(&PRECOPY) } else { chance.pick(&SWITCHOVER) };
    let passed = chance.once_in(2);
    // Beside the moment of the message itself, every moment until the next.
    let linger =
        if passed && !chance.once_in(4) { chance.time(LINGER_MAX) } else { Duration::ZERO };
    Trigger::Message { kind, passed, linger }
}

fn bytes(chance: &mut Chance, plan: &Plan, channel: Channel, way: Way) -> Trigger {
    let (way, most) = match channel {
        Channel::Control => (way, CONTROL_BYTES),
        Channel::Data(_) | Channel::Query => {
            (Way::ToDestination, DATA_BYTES / u64::from(plan.channels))
        }
    };
    let count = if chance.once_in(2) { chance.magnitude(most) } else { chance.below(most) };
    Trigger::Bytes { channel, way, count }
}

fn random_channel(chance: &mut Chance, channels: u16) -> Channel {
    let number = u16::try_from(chance.below(u64::from(channels))).expect("a channel's number");
    chance.pick(&[Channel::Control, Channel::Data(number)])
}

/// Garbage that can be told from a migration. What can't: a page's content or number, which
/// nothing but `--verify` would notice, so that is on; and the final state's content. TCP's own
/// checksum is what guards those.
fn garbage(chance: &mut Chance, plan: &mut Plan, channel: Channel) -> Fault {
    let count = u8::try_from(1 + chance.magnitude(64)).expect("at most 64");
    plan.verify = true;
    match channel {
        Channel::Data(_) | Channel::Query => {
            if let Trigger::Message { .. } = plan.trigger {
                plan.trigger = bytes(chance, plan, channel, Way::ToDestination);
            }
            Fault::Cut(channel, Cut::Garble(Way::ToDestination, count))
        }
        Channel::Control => {
            // The first bytes of a message: its magic, its kind, its flags.
            let kind =
                if chance.once_in(2) { chance.pick(&PRECOPY) } else { chance.pick(&SWITCHOVER) };
            plan.trigger = Trigger::Message { kind, passed: false, linger: Duration::ZERO };
            Fault::Cut(channel, Cut::Garble(way_of(kind), count.min(8)))
        }
    }
}
