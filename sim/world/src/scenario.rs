//! What is to happen in a run: sizes and faults, all of them data.

use crate::net::Side;
use martlet_simulation::Chance;
use martlet_units::Instant;
use std::time::Duration;

/// A connection of the attempt under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkId {
    /// Messages.
    Control,
    /// Pages, on this channel.
    Data(u16),
}

/// How a connection breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Both ends learn it; what was under way arrives before.
    Close,
    /// Both ends learn it; what was under way is lost.
    Reset,
    /// Nothing arrives at this side any more.
    Silence(Side),
    /// Nothing arrives at either.
    SilenceBoth,
}

/// Connections of somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// Says nothing.
    Silent,
    /// Says what is no greeting.
    Garbage,
    /// Greets as a source and says nothing more.
    IdleSource,
    /// Wants to be a data channel.
    Channel,
}

/// Something that goes wrong, or that an owner wants, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A connection breaks.
    Cut(LinkId, Cut),
    /// A connection carries nothing towards a side for a while.
    Stall(LinkId, Side, Duration),
    /// From now on it carries one byte a second towards a side.
    Trickle(LinkId, Side),
    /// The peer of a side sends messages as fast as they are read, and then nothing more.
    Flood(Side),
    /// A process gets no processor for a while.
    Freeze(Side, Duration),
    /// A process dies. What it had sent arrives, or is lost. Another one listens in the
    /// destination's place.
    Crash {
        /// Whose.
        side: Side,
        /// Whether what it had sent arrives.
        delivered: bool,
    },
    /// The source's owner wants the guest to stay.
    Cancel,
    /// A process is told to end: SIGTERM, or its owner's quit.
    Quit(Side),
    /// The next thing that a host is asked to do fails.
    Host(Side),
    /// A device of the source never answers its suspend.
    SilentDevice,
    /// The source's hypervisor writes pages by itself.
    HypervisorWrites,
    /// Somebody else connects.
    Unknown(Unknown),
}

/// When a fault strikes, counted from the beginning of its attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the first step that is not before this time.
    Time(Duration),
    /// Before the step with this number.
    Step(u64),
}

/// A mistake built into the world's own parts, to see that the checkers notice. What ships is as it
/// ships.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The destination takes the first barrier of a round for all of them.
    FirstBarrierCounts,
    /// Pages are read before their next write is caught.
    ReadBeforeRearm,
    /// The destination does not load the final state, having loaded a rehearsal's.
    KeepRehearsedState,
    /// The source runs the guest as soon as the migration is undecided.
    ResumeWhenUndecided,
    /// The operator takes the guest back as soon as the migration is undecided, whether or not the
    /// destination is gone.
    OperatorLies,
    /// The source, resuming, forgets that the guest was paused by its owner.
    ForgetPaused,
}

/// One run of the world.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// Pages of each region of the guest's memory.
    pub regions: Vec<u64>,
    /// Data channels.
    pub channels: u16,
    /// Whether the guest runs, or is paused by its owner.
    pub running: bool,
    /// Whether memory is compared before the commit.
    pub verify: bool,
    /// One way on a connection takes this long and a little more.
    pub latency: Duration,
    /// Bytes that a connection holds.
    pub buffer: usize,
    /// What goes wrong in the first attempt.
    pub faults: Vec<(When, Fault)>,
    /// What goes wrong in the second, if there is one; it is made only if this isn't empty. The
    /// attempt after that goes well.
    pub faults_again: Vec<(When, Fault)>,
    /// What is built wrongly.
    pub sabotage: Option<Sabotage>,
}

/// When a run begins: some time after the hosts' start.
pub(crate) const START: Instant = Instant(1_000_000_000);

impl Scenario {
    /// A run in which nothing goes wrong.
    pub fn clean(seed: u64) -> Scenario {
        let mut chance = Chance::new(seed);
        let regions = chance.between(1, 4);
        Scenario {
            seed,
            regions: (0..regions).map(|_| chance.between(2, 10)).collect(),
            channels: u16::try_from(chance.between(1, 4)).expect("small"),
            running: !chance.once_in(5),
            verify: chance.once_in(3),
            latency: Duration::from_nanos(chance.between(5_000, 200_000)),
            buffer: chance.pick(&[6_000, 20_000, 60_000]),
            faults: Vec::new(),
            faults_again: Vec::new(),
            sabotage: None,
        }
    }

    /// A run in which one to three things go wrong at random moments, and in a third of the runs
    /// some more in a second attempt.
    pub fn random(seed: u64) -> Scenario {
        let scenario = Scenario::clean(seed);
        let mut chance = Chance::new(seed ^ 0x6661_756c_7473);
        let faults = random_faults(&mut chance, scenario.channels);
        let again = chance.once_in(3);
        let faults_again =
            if again { random_faults(&mut chance, scenario.channels) } else { Vec::new() };
        Scenario { faults, faults_again, ..scenario }
    }

    /// The same, but built wrongly.
    pub fn sabotaged(self, sabotage: Sabotage) -> Scenario {
        Scenario { sabotage: Some(sabotage), ..self }
    }
}

fn random_faults(chance: &mut Chance, channels: u16) -> Vec<(When, Fault)> {
    let all = all_faults(channels);
    let count = chance.between(1, 3);
    let one = |_| {
        let fault = match chance.pick(&all) {
            // From a hiccup to longer than every deadline.
            Fault::Stall(link, side, _) => {
                Fault::Stall(link, side, Duration::from_micros(1 << chance.between(8, 25)))
            }
            Fault::Freeze(side, _) => {
                Fault::Freeze(side, Duration::from_micros(1 << chance.between(8, 25)))
            }
            fault => fault,
        };
        // An attempt has some hundred steps and some milliseconds; late faults hit the commit and
        // what follows.
        let when = if chance.coin() {
            When::Step(chance.below(400))
        } else {
            When::Time(Duration::from_micros(chance.below(8_000)))
        };
        (when, fault)
    };
    (0..count).map(one).collect()
}

/// Every fault that an exhaustive search tries, for this many channels.
pub fn all_faults(channels: u16) -> Vec<Fault> {
    let sides = [Side::Source, Side::Destination];
    let cuts = [
        Cut::Close,
        Cut::Reset,
        Cut::Silence(Side::Source),
        Cut::Silence(Side::Destination),
        Cut::SilenceBoth,
    ];
    let links = core::iter::once(LinkId::Control).chain((0..channels).map(LinkId::Data));
    let mut faults = Vec::new();
    for link in links {
        faults.extend(cuts.map(|cut| Fault::Cut(link, cut)));
        for side in sides {
            for millis in [2, 9_000, 20_000] {
                faults.push(Fault::Stall(link, side, Duration::from_millis(millis)));
            }
            faults.push(Fault::Trickle(link, side));
        }
    }
    for side in sides {
        faults.extend([true, false].map(|delivered| Fault::Crash { side, delivered }));
        faults.extend([Fault::Quit(side), Fault::Host(side), Fault::Flood(side)]);
        faults.push(Fault::Freeze(side, Duration::from_millis(40)));
        faults.push(Fault::Freeze(side, Duration::from_secs(15)));
    }
    let unknown = [Unknown::Silent, Unknown::Garbage, Unknown::IdleSource, Unknown::Channel];
    faults.extend(unknown.map(Fault::Unknown));
    faults.extend([Fault::Cancel, Fault::SilentDevice, Fault::HypervisorWrites]);
    faults
}
