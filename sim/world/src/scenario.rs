//! What is to happen in a run: sizes and faults, all of them data.

use crate::link::{Cut, LinkId, Side};
use core::time::Duration;
use martlet_simulation::Chance;
use martlet_units::Instant;

/// Something that goes wrong, or that an owner wants, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A connection breaks.
    Cut(LinkId, Cut),
    /// A connection carries nothing towards a side for a while.
    Stall(LinkId, Side, Duration),
    /// A process dies. What it had sent arrives, or is lost.
    Crash {
        /// Whose.
        side: Side,
        /// Whether what it had sent arrives.
        delivered: bool,
    },
    /// The owner gives up.
    Cancel(Side),
    /// The next thing that a host is asked to do fails.
    Host(Side),
}

/// When a fault strikes, counted from the beginning of its attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the first step that is not before this time.
    Time(Duration),
    /// Before the step with this number.
    Step(u64),
}

/// A mistake built into the world's own glue, to see that the checkers notice. The machines are
/// the real ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The destination takes the first barrier of a round for all of them.
    FirstBarrierCounts,
    /// The source reads pages before it catches their next write.
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
    /// Guest pages.
    pub pages: usize,
    /// Data channels.
    pub channels: u16,
    /// Whether the guest runs, or is paused by its owner.
    pub running: bool,
    /// Whether memory is compared before the commit.
    pub verify: bool,
    /// One way on a connection takes this long and up to 100 us more.
    pub latency: Duration,
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
        Scenario {
            seed,
            pages: chance.index(40) + 8,
            channels: u16::try_from(chance.between(1, 4)).expect("small"),
            running: !chance.once_in(5),
            verify: chance.once_in(3),
            latency: Duration::from_nanos(chance.between(5_000, 200_000)),
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
    let count = chance.between(1, 3);
    let one = |_| {
        let fault = random_fault(chance, channels);
        // An attempt has up to a few hundred steps and a few milliseconds; late faults hit the
        // commit and what follows.
        let when = if chance.coin() {
            When::Step(chance.below(120))
        } else {
            When::Time(Duration::from_micros(chance.below(6_000)))
        };
        (when, fault)
    };
    (0..count).map(one).collect()
}

fn random_side(chance: &mut Chance) -> Side {
    if chance.coin() { Side::Source } else { Side::Destination }
}

fn random_link(chance: &mut Chance, channels: u16) -> LinkId {
    if chance.coin() {
        return LinkId::Control;
    }
    LinkId::Data(u16::try_from(chance.below(u64::from(channels))).expect("a channel's number"))
}

fn random_fault(chance: &mut Chance, channels: u16) -> Fault {
    match chance.below(10) {
        0..=2 => {
            let cut = match chance.below(5) {
                0 => Cut::Reset { delivered: true },
                1 => Cut::Reset { delivered: false },
                2 => Cut::SilentTowards(random_side(chance)),
                3 => {
                    let by = Duration::from_micros(1 << chance.between(8, 24));
                    Cut::ResetLate { slow: random_side(chance), by }
                }
                _ => Cut::SilentBothWays,
            };
            Fault::Cut(random_link(chance, channels), cut)
        }
        3..=4 => {
            // From a hiccup to longer than every deadline.
            let time = Duration::from_micros(1 << chance.between(8, 26));
            Fault::Stall(random_link(chance, channels), random_side(chance), time)
        }
        5..=6 => Fault::Crash { side: random_side(chance), delivered: chance.coin() },
        7 => Fault::Cancel(random_side(chance)),
        _ => Fault::Host(random_side(chance)),
    }
}

/// Every fault that an exhaustive search tries, for this many channels.
pub fn all_faults(channels: u16) -> Vec<Fault> {
    let sides = [Side::Source, Side::Destination];
    let cuts = [
        Cut::Reset { delivered: true },
        Cut::Reset { delivered: false },
        Cut::SilentTowards(Side::Source),
        Cut::SilentTowards(Side::Destination),
        Cut::SilentBothWays,
        Cut::ResetLate { slow: Side::Source, by: Duration::from_secs(4) },
        Cut::ResetLate { slow: Side::Destination, by: Duration::from_secs(4) },
    ];
    let links = core::iter::once(LinkId::Control).chain((0..channels).map(LinkId::Data));
    let mut faults = Vec::new();
    for link in links {
        faults.extend(cuts.map(|cut| Fault::Cut(link, cut)));
        for side in sides {
            for millis in [2, 9_000, 20_000] {
                faults.push(Fault::Stall(link, side, Duration::from_millis(millis)));
            }
        }
    }
    for side in sides {
        faults.extend([true, false].map(|delivered| Fault::Crash { side, delivered }));
        faults.extend([Fault::Cancel(side), Fault::Host(side)]);
    }
    faults
}
