//! Both processes of an attempt, looked at again and again until nothing happens any more.

use crate::desk::Desk;
use crate::log::Log;
use crate::plan::Side;
use crate::process::{Guest, Migration, Process};
use martlet_qmp::ClientError;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// How long everything may take. The longest way through the protocol's deadlines is a stalled
/// data channel: 30 s until a round is given up. The rest is for hosts that hang.
const SETTLE_MAX: Duration = Duration::from_secs(150);
/// A destination that nobody speaks to is taken to stay so after this long.
const QUIET: Duration = Duration::from_millis(60);

/// A heartbeat counter as it was seen: the guest had this many beats at some moment in between.
#[derive(Clone, Copy, Debug)]
struct Sample {
    from: Instant,
    to: Instant,
    beats: u64,
}

/// A process, and what it said the last time.
pub(crate) struct Watched {
    pub(crate) process: Process,
    /// `None` before the first look, and from its death on.
    migration: Option<Migration>,
    dead: bool,
    samples: Vec<Sample>,
}

impl Watched {
    pub(crate) fn new(process: Process) -> Watched {
        Watched { process, migration: None, dead: false, samples: Vec::new() }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead
    }

    pub(crate) fn status(&self) -> &str {
        match &self.migration {
            Some(migration) => &migration.status,
            None if self.dead => "dead",
            None => "not looked at",
        }
    }

    pub(crate) fn error(&self) -> &str {
        self.migration.as_ref().map_or("", |migration| &migration.error)
    }

    /// What was measured, once the attempt is over.
    pub(crate) fn report(&self) -> Value {
        self.migration.as_ref().map_or(Value::Null, |migration| migration.raw["x-martlet"].clone())
    }

    /// Looks at it. Its death is no error here; whether it was one is judged later.
    fn look(&mut self, log: &Log) -> Result<(), String> {
        let before = self.status().to_owned();
        if self.dead {
            return Ok(());
        }
        self.migration = match self.process.migration() {
            Ok(migration) => Some(migration),
            Err(ClientError::Gone { .. }) => {
                self.dead = true;
                None
            }
            Err(trouble) => return Err(format!("{}: {trouble}", self.process.name)),
        };
        if before != self.status() {
            let (name, status, error) = (&self.process.name, self.status(), self.error());
            log.note(format!("{name} is {status} {error}"));
        }
        if self.dead {
            let status = self.process.ended()?;
            log.note(format!("{} ended: {status}", self.process.name));
            return Ok(());
        }
        self.sample();
        Ok(())
    }

    /// Remembers the guest's heartbeats, if there is a guest.
    fn sample(&mut self) -> Option<Guest> {
        let from = Instant::now();
        // A process that dies just now is noticed at the next look.
        let guest = self.process.guest().ok().flatten()?;
        self.samples.push(Sample { from, to: Instant::now(), beats: guest.beats });
        Some(guest)
    }
}

/// The two of an attempt.
pub(crate) struct Pair {
    pub(crate) source: Watched,
    pub(crate) destination: Watched,
    pub(crate) log: Log,
}

impl Pair {
    pub(crate) fn new(source: Process, destination: Process, log: Log) -> Pair {
        let (source, destination) = (Watched::new(source), Watched::new(destination));
        Pair { source, destination, log }
    }

    pub(crate) fn side(&mut self, side: Side) -> &mut Watched {
        match side {
            Side::Source => &mut self.source,
            Side::Destination => &mut self.destination,
        }
    }

    /// Watches until the source's attempt and the destination's have ended, or they themselves.
    pub(crate) fn settle(&mut self, desk: &Desk) -> Result<(), String> {
        let deadline = Instant::now() + SETTLE_MAX;
        let mut quiet_since = None;
        loop {
            self.source.look(&self.log)?;
            self.destination.look(&self.log)?;
            self.never_two()?;
            match self.rest(desk) {
                Rest::No => quiet_since = None,
                Rest::Yes => return Ok(()),
                Rest::IfQuiet => {
                    let since = *quiet_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > QUIET {
                        return Ok(());
                    }
                }
            }
            if Instant::now() > deadline {
                let raw = |side: &Watched| side.migration.as_ref().map(|m| m.raw.to_string());
                return Err(format!(
                    "nothing settles within {SETTLE_MAX:?}: source {:?}, destination {:?}",
                    raw(&self.source),
                    raw(&self.destination)
                ));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    fn rest(&self, desk: &Desk) -> Rest {
        let source = match self.source.status() {
            "completed" | "failed" | "cancelled" | "x-undecided" | "dead" => self.source.status(),
            _ => return Rest::No,
        };
        match self.destination.status() {
            "active" => Rest::No,
            "dead" => Rest::Yes,
            // Its control socket has the guest a moment later.
            "completed" if self.destination.samples.is_empty() => Rest::No,
            "completed" => Rest::Yes,
            // It arrives before the source learns of it, but is heard of later.
            _ if source == "completed" => Rest::No,
            // It may not even have seen yet what was sent to it.
            _ if desk.is_accepted() && self.destination.error().is_empty() => Rest::No,
            _ => Rest::IfQuiet,
        }
    }

    /// From the first moment on at which the destination has a guest, the source's heartbeats
    /// must stand still.
    fn never_two(&self) -> Result<(), String> {
        let Some(first) = self.destination.samples.first() else { return Ok(()) };
        let after = self.source.samples.iter().filter(|sample| sample.from >= first.to);
        let (mut least, mut most) = (u64::MAX, 0);
        for sample in after {
            (least, most) = (least.min(sample.beats), most.max(sample.beats));
        }
        if least < most {
            return Err(format!(
                "TWO GUESTS: the destination has one since {:?} ago, and at the source it went on \
                 from heartbeat {least} to {most}",
                first.to.elapsed()
            ));
        }
        Ok(())
    }

    /// Checks that the guest of a process goes on, or stands still, while the other's does not go
    /// on. Returns what the guest of `lively` says at the end.
    pub(crate) fn only(&mut self, lively: Side) -> Result<Guest, String> {
        const BEATS: u64 = 3;
        const LIMIT: Duration = Duration::from_secs(30);
        let other = match lively {
            Side::Source => Side::Destination,
            Side::Destination => Side::Source,
        };
        let still = self.beats(other);
        let name = self.side(lively).process.name.clone();
        let missing = || format!("LOST: there is no guest at {name}");
        let start = self.side(lively).sample().ok_or_else(missing)?;
        let deadline = Instant::now() + LIMIT;
        let now = loop {
            let now = self.side(lively).sample().ok_or_else(missing)?;
            if now.beats >= start.beats + BEATS {
                break now;
            }
            if Instant::now() > deadline {
                return Err(format!("LOST: the guest at {name} stands still at {}", now.beats));
            }
            std::thread::sleep(LOOK_INTERVAL);
        };
        if self.beats(other) != still {
            return Err(format!("TWO GUESTS: both sides' heartbeats go on, {name} and {other:?}"));
        }
        self.never_two()?;
        Ok(now)
    }

    /// Checks that no guest goes on here for a while.
    pub(crate) fn stands_still(&mut self, side: Side) -> Result<(), String> {
        const WHILE: Duration = Duration::from_millis(30);
        let before = self.beats(side);
        std::thread::sleep(WHILE);
        let after = self.beats(side);
        if before != after {
            let name = &self.side(side).process.name;
            return Err(format!("the guest at {name} runs: {before:?}, then {after:?}"));
        }
        Ok(())
    }

    fn beats(&mut self, side: Side) -> Option<u64> {
        let watched = self.side(side);
        if watched.is_dead() { None } else { watched.sample().map(|guest| guest.beats) }
    }

    /// The most heartbeats that were seen at the source.
    pub(crate) fn beats_at_source(&self) -> u64 {
        self.source.samples.iter().map(|sample| sample.beats).max().unwrap_or(0)
    }
}

enum Rest {
    No,
    Yes,
    /// Unless something begins soon.
    IfQuiet,
}
