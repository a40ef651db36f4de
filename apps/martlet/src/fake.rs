//! A pretended guest, migration and receiver, for testing what stands above them.

use crate::guest::{Attempt, Guest, Incoming, Listen};
use martlet_engine::{
    Error, Fault, MigrateOptions, OperatorOverride, PageCounts, Progress, ReceiveStatus, Report,
    Status,
};
use martlet_guest_program::GuestCounters;
use martlet_machine::{Accel, EndCause, GuestStatus, MachineInfo};
use martlet_transport::Address;
use martlet_units::{ByteCount, BytesPerSec, PageCount};
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A look at a migration of a 1 GiB guest.
pub(crate) fn progress(status: Status, round: u32) -> Progress {
    Progress {
        status,
        elapsed: Duration::from_micros(120_500),
        round,
        bytes_sent: ByteCount(400 << 20),
        rate: BytesPerSec(3_000_000_000),
        remaining: PageCount(1000),
        total: PageCount(1 << 18),
        dirty_pages_per_s: 4000,
        outrun: None,
        predicted_blackout: Some(Duration::from_micros(610)),
        throttle_percent: 0,
        pages: PageCounts { normal: 100_000, zero: 5, untouched: 130_000 },
        error: None,
    }
}

/// A migration whose course the test decides.
pub(crate) struct FakeAttempt {
    state: Mutex<(Progress, Option<Report>)>,
    changed: Condvar,
    guest: Arc<FakeGuest>,
    pub(crate) asked: Mutex<Vec<String>>,
    /// Why the destination says nothing, if it does.
    pub(crate) unanswered: Mutex<Option<String>>,
}

impl FakeAttempt {
    /// The migration comes to this status and round.
    pub(crate) fn reach(&self, status: Status, round: u32) {
        let error =
            (status == Status::Failed).then(|| Error::new(Fault::Peer, "", "the link broke"));
        let report = status.is_final().then(|| {
            let mut report = crate::report_json::tests::sample();
            report.outcome = match status {
                Status::Completed => martlet_engine::Outcome::Completed,
                Status::Cancelled => martlet_engine::Outcome::Cancelled,
                Status::Undecided => martlet_engine::Outcome::Undecided,
                Status::GivenUp => martlet_engine::Outcome::GivenUp,
                _ => martlet_engine::Outcome::Failed,
            };
            report.error.clone_from(&error);
            report
        });
        *self.state.lock().unwrap() = (Progress { error, ..progress(status, round) }, report);
        self.changed.notify_all();
    }

    fn note(&self, text: String) {
        self.asked.lock().unwrap().push(text);
    }
}

impl Attempt for FakeAttempt {
    fn progress(&self) -> Progress {
        self.state.lock().unwrap().0.clone()
    }

    fn wait(&self, timeout: Duration) -> Option<Report> {
        let state = self.state.lock().unwrap();
        let (state, _) =
            self.changed.wait_timeout_while(state, timeout, |s| s.1.is_none()).unwrap();
        state.1.clone()
    }

    fn guest_ended(&self, how: &str) {
        self.note(format!("the guest has ended: {how}"));
        self.reach(Status::Failed, 0);
    }

    fn cancel(&self) {
        self.note("cancel".to_owned());
        // In the switchover it may be too late.
        if self.progress().status != Status::Device {
            self.reach(Status::Cancelled, 0);
        }
    }

    fn set_downtime_limit(&self, limit: Duration) {
        self.note(format!("limit {limit:?}"));
    }

    fn set_bandwidth(&self, bandwidth: Option<BytesPerSec>) {
        self.note(format!("bandwidth {bandwidth:?}"));
    }

    fn resolve(&self) -> Result<Status, Error> {
        self.note("resolve".to_owned());
        if let Some(reason) = self.unanswered.lock().unwrap().clone() {
            return Err(Error::new(Fault::Peer, "", reason));
        }
        if self.progress().status == Status::Undecided {
            *self.guest.state.lock().unwrap() = GuestStatus::Running;
            self.reach(Status::Failed, 0);
        }
        Ok(self.progress().status)
    }

    fn override_undecided(&self, by: OperatorOverride) -> Result<Status, Error> {
        self.note(format!("{by:?}"));
        match by {
            OperatorOverride::RunHere(_) => {
                *self.guest.state.lock().unwrap() = GuestStatus::Running;
                self.reach(Status::Failed, 0);
            }
            OperatorOverride::GiveUp(_) => self.reach(Status::GivenUp, 0),
        }
        Ok(self.progress().status)
    }
}

/// A guest that does what it is told.
pub(crate) struct FakeGuest {
    pub(crate) state: Mutex<GuestStatus>,
    pub(crate) attempts: Mutex<Vec<(Address, MigrateOptions, Arc<FakeAttempt>)>>,
    me: std::sync::Weak<FakeGuest>,
    /// So many of the next looks at it panic.
    pub(crate) looks_that_panic: AtomicU32,
    owner_resets: AtomicU32,
}

impl FakeGuest {
    pub(crate) fn new() -> Arc<FakeGuest> {
        Arc::new_cyclic(|me| FakeGuest {
            state: Mutex::new(GuestStatus::Running),
            attempts: Mutex::default(),
            me: me.clone(),
            looks_that_panic: AtomicU32::new(0),
            owner_resets: AtomicU32::new(0),
        })
    }

    /// The attempt that was started last.
    pub(crate) fn last_attempt(&self) -> Arc<FakeAttempt> {
        Arc::clone(&self.attempts.lock().unwrap().last().unwrap().2)
    }
}

impl Guest for FakeGuest {
    fn status(&self) -> GuestStatus {
        let panics = self.looks_that_panic.load(Ordering::Relaxed);
        if panics > 0 {
            self.looks_that_panic.store(panics - 1, Ordering::Relaxed);
            panic!("a look at the guest");
        }
        self.state.lock().unwrap().clone()
    }

    fn stop(&self) -> Result<(), String> {
        *self.state.lock().unwrap() = GuestStatus::Paused;
        Ok(())
    }

    fn cont(&self) -> Result<(), String> {
        *self.state.lock().unwrap() = GuestStatus::Running;
        Ok(())
    }

    fn reset(&self) -> Result<(), String> {
        self.owner_resets.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn press_power_button(&self) -> Result<(), String> {
        *self.state.lock().unwrap() = GuestStatus::Ended(EndCause::Shutdown);
        Ok(())
    }

    fn resets(&self) -> (u64, u64) {
        (0, self.owner_resets.load(Ordering::Relaxed).into())
    }

    fn info(&self) -> MachineInfo {
        MachineInfo { accel: Accel::Threads, tracking: "log", memory: PageCount(1 << 18), vcpus: 1 }
    }

    fn check(&self) -> Option<GuestCounters> {
        Some(GuestCounters {
            vcpus: 1,
            ready: true,
            filled_pages: 1 << 17,
            heartbeats: 3,
            verified_pages: 10,
            ..GuestCounters::default()
        })
    }

    fn migrate(&self, to: &Address, options: MigrateOptions) -> io::Result<Arc<dyn Attempt>> {
        let attempt = Arc::new(FakeAttempt {
            state: Mutex::new((progress(Status::Setup, 0), None)),
            changed: Condvar::new(),
            guest: self.me.upgrade().unwrap(),
            asked: Mutex::default(),
            unanswered: Mutex::default(),
        });
        self.attempts.lock().unwrap().push((to.clone(), options, Arc::clone(&attempt)));
        Ok(attempt)
    }

    fn quit(&self) {
        *self.state.lock().unwrap() = GuestStatus::Paused;
    }
}

/// A receiver whose course the test decides.
pub(crate) struct FakeIncoming {
    pub(crate) status: Mutex<ReceiveStatus>,
    stops: AtomicU32,
    failures: AtomicU32,
    address: Address,
    guest: Arc<FakeGuest>,
}

impl FakeIncoming {
    /// An attempt has failed, however short it was.
    pub(crate) fn fail(&self, reason: &str) {
        let last_error = Some(reason.to_owned());
        *self.status.lock().unwrap() = ReceiveStatus::Listening { last_error };
        self.failures.fetch_add(1, Ordering::SeqCst);
    }

    /// How often it was asked to stop.
    pub(crate) fn stops(&self) -> u32 {
        self.stops.load(Ordering::SeqCst)
    }
}

impl Incoming for FakeIncoming {
    fn address(&self) -> Address {
        self.address.clone()
    }

    fn failures(&self) -> (u64, Option<String>) {
        let count = self.failures.load(Ordering::SeqCst).into();
        match self.status() {
            ReceiveStatus::Listening { last_error } => (count, last_error),
            _ => (count, None),
        }
    }

    fn status(&self) -> ReceiveStatus {
        self.status.lock().unwrap().clone()
    }

    fn wait(&self, timeout: Duration) -> ReceiveStatus {
        std::thread::sleep(timeout.min(Duration::from_millis(1)));
        self.status()
    }

    /// An attempt that is under way goes on, as behind its commit.
    fn stop(&self) {
        self.stops.fetch_add(1, Ordering::SeqCst);
        let mut status = self.status.lock().unwrap();
        if matches!(*status, ReceiveStatus::Listening { .. }) {
            *status = ReceiveStatus::Stopped;
        }
    }

    fn stop_unless_arrived(&self) {
        if self.status() != ReceiveStatus::Arrived {
            self.stop();
        }
    }

    fn guest(&self) -> Option<Arc<dyn Guest>> {
        (self.status() == ReceiveStatus::Arrived).then(|| Arc::clone(&self.guest) as _)
    }
}

/// Opens pretended receivers; port 1 is taken, and port 2 is not answered for until it is let.
#[derive(Default)]
pub(crate) struct FakeListen {
    pub(crate) opened: Mutex<Vec<Arc<FakeIncoming>>>,
    may_answer: Mutex<bool>,
    changed: Condvar,
}

impl FakeListen {
    /// Opens one.
    pub(crate) fn open(&self, address: &Address) -> Arc<FakeIncoming> {
        let incoming = Arc::new(FakeIncoming {
            status: Mutex::new(ReceiveStatus::Listening { last_error: None }),
            stops: AtomicU32::new(0),
            failures: AtomicU32::new(0),
            address: address.clone(),
            guest: FakeGuest::new(),
        });
        self.opened.lock().unwrap().push(Arc::clone(&incoming));
        incoming
    }

    /// Lets the name of port 2 be found.
    pub(crate) fn answer(&self) {
        *self.may_answer.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Listen for FakeListen {
    fn listen(&self, address: &Address) -> io::Result<Arc<dyn Incoming>> {
        if matches!(address, Address::Tcp { port: 1, .. }) {
            return Err(io::Error::from(io::ErrorKind::AddrInUse));
        }
        if matches!(address, Address::Tcp { port: 2, .. }) {
            let waiting = self.may_answer.lock().unwrap();
            drop(self.changed.wait_while(waiting, |answers| !*answers).unwrap());
        }
        Ok(self.open(address))
    }
}
