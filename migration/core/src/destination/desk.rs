//! Who may bring a guest to a process, and what it tells those who ask what became of one.

use martlet_protocol::Ledger;
use martlet_wire::control::{Answer, Fate, InstanceId, MigrationId};
use martlet_wire::hello::{Hello, Role, Status};

/// How a destination stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiveStatus {
    /// Nobody migrates here now. After a failed attempt the reason stands here.
    Listening {
        /// Why the attempt before failed.
        last_error: Option<String>,
    },
    /// A source brings a guest.
    Active,
    /// The guest has arrived: it was started, or left paused as it came.
    Arrived,
    /// The receiver was stopped before a guest arrived.
    Stopped,
}

/// What follows from the owner's wish to take no guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopping {
    /// An attempt is under way and was not told yet: tell it.
    TellAttempt,
    /// Nothing more is to be told to anybody.
    Nothing,
}

/// A process's one place for a guest: at most one attempt at a time, and one guest. Holds what
/// became of every attempt.
#[derive(Debug)]
pub struct Desk {
    place: Place,
    /// The owner wants no more attempts.
    stopping: bool,
    /// The owner wants no more answers either.
    closed: bool,
    last_error: Option<String>,
    failures: u64,
    ledger: Ledger,
}

#[derive(Debug)]
enum Place {
    Free,
    Taken(Current),
    Arrived,
    Stopped,
}

/// The attempt under way.
#[derive(Debug)]
struct Current {
    migration: MigrationId,
    /// What is answered to who asks for it.
    fate: Fate,
    /// What its channels must show, once it waits for them.
    awaited: Option<Awaited>,
}

#[derive(Debug)]
struct Awaited {
    token: [u8; 16],
    /// Whether a channel's number is taken.
    taken: Vec<bool>,
}

impl Desk {
    /// The desk of a process that just started; its name must be random.
    pub fn new(instance: InstanceId) -> Desk {
        Desk {
            place: Place::Free,
            stopping: false,
            closed: false,
            last_error: None,
            failures: 0,
            ledger: Ledger::new(instance),
        }
    }

    /// How it stands.
    pub fn status(&self) -> ReceiveStatus {
        match self.place {
            Place::Free => ReceiveStatus::Listening { last_error: self.last_error.clone() },
            Place::Taken(Current { fate: Fate::Committed, .. }) | Place::Arrived => {
                ReceiveStatus::Arrived
            }
            Place::Taken(_) => ReceiveStatus::Active,
            Place::Stopped => ReceiveStatus::Stopped,
        }
    }

    /// How many attempts have failed, and why the last one did.
    pub fn failures(&self) -> (u64, Option<String>) {
        (self.failures, self.last_error.clone())
    }

    /// Whether nobody is answered any more.
    pub fn is_closed(&self) -> bool {
        self.closed || matches!(self.place, Place::Stopped)
    }

    /// Why no source can bring a guest now. [`Status::BUSY`] may pass.
    pub fn refusal(&self) -> Option<Status> {
        match self.place {
            Place::Free if self.stopping => Some(Status::STOPPING),
            Place::Free => None,
            Place::Taken(Current { fate: Fate::Committed, .. }) | Place::Arrived => {
                Some(Status::OCCUPIED)
            }
            Place::Taken(_) => Some(Status::BUSY),
            Place::Stopped => Some(Status::STOPPING),
        }
    }

    /// Gives the place to an attempt whose setup has come, or says why not. A connection that has
    /// said nothing holds no place. From now on who asks for the migration is never told that it is
    /// unknown.
    pub fn try_begin(&mut self, migration: MigrationId) -> Result<Ledger, Status> {
        if let Some(refusal) = self.refusal() {
            return Err(refusal);
        }
        // A migration that was tried here before is answered as before; its attempt will fail.
        let fate = match self.ledger.fate(migration) {
            Fate::Unknown => Fate::Pending,
            known => known,
        };
        self.place = Place::Taken(Current { migration, fate, awaited: None });
        Ok(self.ledger.clone())
    }

    /// The attempt under way is decided; what is left of it is for the record.
    pub fn decide(&mut self, fate: Fate) {
        if let Place::Taken(current) = &mut self.place {
            current.fate = fate;
        }
    }

    /// Ends the attempt under way, with what it left in the ledger; the next one may begin. `error`
    /// says why no guest has arrived.
    pub fn end(&mut self, ledger: Ledger, error: Option<String>) {
        self.ledger = ledger;
        let Some(error) = error else {
            self.place = Place::Arrived;
            return;
        };
        self.place = if self.stopping { Place::Stopped } else { Place::Free };
        self.note_failure(error);
    }

    /// A source came to nothing before it had said what it brings.
    pub fn note_failure(&mut self, error: String) {
        self.last_error = Some(error);
        self.failures += 1;
    }

    /// The owner takes no guest. One that can't be refused any more comes all the same and stays,
    /// and so do the answers about it; once it is here, nobody is answered any more.
    pub fn stop(&mut self) -> Stopping {
        let is_first = !core::mem::replace(&mut self.stopping, true);
        match self.place {
            Place::Free => self.place = Place::Stopped,
            Place::Taken(Current { fate: Fate::Committed, .. }) | Place::Arrived => {
                self.closed = true;
            }
            Place::Taken(_) if is_first => return Stopping::TellAttempt,
            Place::Taken(_) | Place::Stopped => {}
        }
        Stopping::Nothing
    }

    /// As [`Desk::stop`], but one whose guest is here, or can't be refused any more, is left as it
    /// is: it goes on to answer for that guest.
    pub fn stop_unless_arrived(&mut self) -> Stopping {
        match self.status() {
            ReceiveStatus::Arrived => Stopping::Nothing,
            _ => self.stop(),
        }
    }

    /// From now on so many channels that show the token are let in.
    pub fn await_channels(&mut self, count: u16, token: [u8; 16]) {
        if let Place::Taken(current) = &mut self.place {
            current.awaited = Some(Awaited { token, taken: vec![false; usize::from(count)] });
        }
    }

    /// No channel is let in any more.
    pub fn drop_channels(&mut self) {
        if let Place::Taken(current) = &mut self.place {
            current.awaited = None;
        }
    }

    /// Lets a channel in, once, or says why not.
    pub fn admit_channel(&mut self, hello: &Hello) -> Result<(), Status> {
        let Place::Taken(Current { awaited: Some(awaited), .. }) = &mut self.place else {
            return Err(Status::TOKEN);
        };
        // RDMA is the only channel of its migration.
        if hello.role == Role::RDMA && awaited.taken.len() != 1 {
            return Err(Status::CHANNEL);
        }
        if awaited.token != hello.token {
            return Err(Status::TOKEN);
        }
        match awaited.taken.get_mut(usize::from(hello.channel)) {
            Some(taken) if !*taken => {
                *taken = true;
                Ok(())
            }
            _ => Err(Status::CHANNEL),
        }
    }

    /// What became of a migration, as a promise. Never waits for the attempt under way.
    pub fn answer(&self, migration: MigrationId) -> Answer {
        match &self.place {
            Place::Taken(current) if current.migration == migration => {
                Answer { instance: self.ledger.instance(), fate: current.fate }
            }
            _ => self.ledger.answer(migration),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: MigrationId = MigrationId([1; 16]);
    const TWO: MigrationId = MigrationId([2; 16]);

    fn desk() -> Desk {
        Desk::new(InstanceId([9; 16]))
    }

    fn failed(desk: &mut Desk, ledger: Ledger) {
        desk.end(ledger, Some("a reason".to_owned()));
    }

    #[test]
    fn one_attempt_at_a_time_and_one_guest() {
        let mut desk = desk();
        let ledger = desk.try_begin(ONE).unwrap();
        assert_eq!(desk.try_begin(TWO).unwrap_err(), Status::BUSY);
        assert_eq!(desk.answer(ONE).fate, Fate::Pending);
        assert_eq!(desk.answer(TWO).fate, Fate::Unknown);
        failed(&mut desk, ledger);
        let ledger = desk.try_begin(TWO).unwrap();
        desk.decide(Fate::Committed);
        assert_eq!(
            (desk.answer(TWO).fate, desk.status()),
            (Fate::Committed, ReceiveStatus::Arrived)
        );
        assert_eq!(desk.refusal(), Some(Status::OCCUPIED));
        desk.end(ledger, None);
        assert_eq!((desk.refusal(), desk.failures().0), (Some(Status::OCCUPIED), 1));
    }

    #[test]
    fn a_stop_that_comes_too_late_closes_nothing() {
        let mut desk = desk();
        let ledger = desk.try_begin(ONE).unwrap();
        assert_eq!(desk.stop(), Stopping::TellAttempt);
        assert_eq!(desk.stop(), Stopping::Nothing, "it was told");
        desk.decide(Fate::Committed);
        assert!(!desk.is_closed());
        desk.end(ledger, None);
        assert_eq!((desk.status(), desk.is_closed()), (ReceiveStatus::Arrived, false));
        desk.stop();
        assert!(desk.is_closed());
    }

    #[test]
    fn a_guest_that_is_to_stay_is_answered_for() {
        let mut desk = desk();
        let ledger = desk.try_begin(ONE).unwrap();
        desk.decide(Fate::Committed);
        assert_eq!(desk.stop_unless_arrived(), Stopping::Nothing);
        desk.end(ledger, None);
        assert_eq!(desk.stop_unless_arrived(), Stopping::Nothing);
        assert_eq!((desk.status(), desk.is_closed()), (ReceiveStatus::Arrived, false));
        let mut free = Desk::new(InstanceId([8; 16]));
        free.stop_unless_arrived();
        assert!(free.is_closed());
    }

    #[test]
    fn a_stop_ends_with_the_attempt() {
        let mut desk = desk();
        let ledger = desk.try_begin(ONE).unwrap();
        desk.stop();
        assert!(!desk.is_closed(), "its source may ask");
        failed(&mut desk, ledger);
        assert_eq!((desk.status(), desk.is_closed()), (ReceiveStatus::Stopped, true));
        assert_eq!(desk.try_begin(TWO).unwrap_err(), Status::STOPPING);
    }

    #[test]
    fn each_channel_is_let_in_once() {
        let (mut desk, token) = (desk(), [7; 16]);
        assert_eq!(desk.admit_channel(&Hello::data(0, token)), Err(Status::TOKEN));
        let _ledger = desk.try_begin(ONE).unwrap();
        assert_eq!(desk.admit_channel(&Hello::data(0, token)), Err(Status::TOKEN), "too early");
        desk.await_channels(2, token);
        assert_eq!(desk.admit_channel(&Hello::data(0, [8; 16])), Err(Status::TOKEN));
        assert_eq!(desk.admit_channel(&Hello::data(2, token)), Err(Status::CHANNEL));
        assert_eq!(desk.admit_channel(&Hello::data(1, token)), Ok(()));
        assert_eq!(desk.admit_channel(&Hello::data(1, token)), Err(Status::CHANNEL));
        let rdma = Hello { role: Role::RDMA, ..Hello::data(0, token) };
        assert_eq!(desk.admit_channel(&rdma), Err(Status::CHANNEL));
        desk.drop_channels();
        assert_eq!(desk.admit_channel(&Hello::data(0, token)), Err(Status::TOKEN));
    }
}
