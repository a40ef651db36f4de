//! Events: what a control socket tells its clients unasked.

use martlet_engine::{Progress, Status};
use martlet_qmp::to_line;
use serde_json::{Value, json};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Something that clients want to know. Names and data are QEMU's (qapi/run-state.json and
/// qapi/migration.json).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The guest was stopped: by its owner, or for a switchover.
    Stop,
    /// The guest runs again, or runs here after it has arrived.
    Resume,
    /// A migration changed its status.
    Migration(&'static str),
    /// A migration begins a round; the first is 1.
    MigrationPass(u32),
    /// The process is about to end.
    Shutdown {
        /// Whether the guest itself wanted it.
        guest: bool,
        /// QEMU's `ShutdownCause`.
        reason: &'static str,
    },
    /// The guest's power button was pressed.
    PowerDown,
    /// The guest was reset. If it was booted elsewhere it can't be booted again here: then the
    /// process ends, as after QEMU's `-no-reboot`.
    Reset {
        /// Whether the guest itself wanted it.
        guest: bool,
    },
}

impl Event {
    fn to_json(&self, since_epoch: Option<std::time::Duration>) -> Value {
        let (name, data) = match self {
            Event::Stop => ("STOP", None),
            Event::Resume => ("RESUME", None),
            Event::Migration(status) => ("MIGRATION", Some(json!({ "status": status }))),
            Event::MigrationPass(pass) => ("MIGRATION_PASS", Some(json!({ "pass": pass }))),
            Event::Shutdown { guest, reason } => {
                ("SHUTDOWN", Some(json!({ "guest": guest, "reason": reason })))
            }
            Event::PowerDown => ("POWERDOWN", None),
            Event::Reset { guest } => {
                let reason = if *guest { "guest-reset" } else { "host-qmp-system-reset" };
                ("RESET", Some(json!({ "guest": guest, "reason": reason })))
            }
        };
        let timestamp = match since_epoch {
            Some(time) => {
                json!({ "seconds": time.as_secs(), "microseconds": time.subsec_micros() })
            }
            None => json!({ "seconds": -1, "microseconds": -1 }),
        };
        let mut object = json!({ "event": name, "timestamp": timestamp });
        if let (Some(data), Some(fields)) = (data, object.as_object_mut()) {
            fields.insert("data".to_owned(), data);
        }
        object
    }
}

/// Where a client's lines wait for the socket.
pub(crate) type Outbox = SyncSender<Arc<str>>;

#[derive(Debug)]
struct Listener {
    id: u64,
    outbox: Outbox,
    stream: Arc<UnixStream>,
}

/// Hands every event to every client that has finished its negotiation.
#[derive(Debug, Default)]
pub(crate) struct EventBus {
    listeners: Mutex<Vec<Listener>>,
}

impl EventBus {
    /// Sends `reply` to this client, and events from now on: none comes before the reply, and none
    /// is missed once it was read. Returns whether the client is still there; one that has not read
    /// what it got before is not waited for.
    pub(crate) fn subscribe(
        &self,
        id: u64,
        outbox: Outbox,
        stream: Arc<UnixStream>,
        reply: Arc<str>,
    ) -> bool {
        let mut listeners = self.lock();
        let is_there = outbox.try_send(reply).is_ok();
        if is_there {
            listeners.push(Listener { id, outbox, stream });
        }
        is_there
    }

    /// No more events for this client.
    pub(crate) fn unsubscribe(&self, id: u64) {
        self.lock().retain(|listener| listener.id != id);
    }

    /// Tells all clients. Never waits: a client whose outbox is full is disconnected, which is
    /// better than to let it believe that nothing happened.
    pub(crate) fn send(&self, event: &Event) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let line: Arc<str> = to_line(&event.to_json(now)).into();
        self.lock().retain(|listener| match listener.outbox.try_send(Arc::clone(&line)) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                tracing::warn!(client = listener.id, "a client does not read: disconnected");
                let _ = listener.stream.shutdown(Shutdown::Both);
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Listener>> {
        // The list is whole between any two of its changes.
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// QEMU's word for a status; ours where QEMU has none.
pub(crate) fn status_word(status: Status) -> &'static str {
    match status {
        Status::Setup => "setup",
        Status::Active => "active",
        Status::Device => "device",
        Status::Completed => "completed",
        Status::Failed => "failed",
        Status::Cancelling => "cancelling",
        Status::Cancelled => "cancelled",
        Status::Undecided => "x-undecided",
        Status::GivenUp => "x-given-up",
    }
}

/// Turns looks at a migration, taken now and then, into the events of its course: none missing,
/// none twice, in order, however fast it went.
#[derive(Debug)]
pub(crate) struct Narrator {
    told: Option<Status>,
    passes: u32,
    ran: bool,
    stopped: bool,
}

/// Most rounds told in one look: a peer of the engine that counts wildly fills no outbox.
const PASSES_PER_LOOK_MAX: u32 = 64;

impl Narrator {
    /// For a migration that begins now. `running` says whether the guest's owner lets it run.
    pub(crate) fn new(running: bool) -> Narrator {
        Narrator { told: None, passes: 0, ran: running, stopped: false }
    }

    /// The events since the last look. `running` is as above, or `None` where that can't be seen
    /// just now, as in the switchover.
    pub(crate) fn look(&mut self, progress: &Progress, running: Option<bool>) -> Vec<Event> {
        let mut events = Vec::new();
        match progress.status {
            Status::Setup => {
                self.ran = running.unwrap_or(self.ran);
                self.run_up_to(&[Status::Setup], progress, &mut events);
            }
            Status::Active => {
                self.ran = running.unwrap_or(self.ran);
                self.run_up_to(&[Status::Setup, Status::Active], progress, &mut events);
                self.tell_passes(progress.round, &mut events);
            }
            Status::Device | Status::Completed | Status::Undecided | Status::GivenUp => {
                let course = [Status::Setup, Status::Active, Status::Device];
                self.run_up_to(&course, progress, &mut events);
                self.tell(progress.status, &mut events);
            }
            Status::Cancelling => self.tell(Status::Cancelling, &mut events),
            Status::Failed | Status::Cancelled => {
                if self.told.is_none() {
                    self.tell(Status::Setup, &mut events);
                }
                if self.stopped {
                    self.stopped = false;
                    events.push(Event::Resume);
                }
                self.tell(progress.status, &mut events);
            }
        }
        events
    }

    /// Tells what comes before and was not told.
    fn run_up_to(&mut self, course: &[Status], progress: &Progress, events: &mut Vec<Event>) {
        for status in course {
            if self.rank() < Narrator::rank_of(*status) {
                if *status == Status::Device {
                    self.tell_passes(progress.round, events);
                    if self.ran {
                        self.stopped = true;
                        events.push(Event::Stop);
                    }
                }
                self.tell(*status, events);
            }
        }
    }

    fn tell_passes(&mut self, round: u32, events: &mut Vec<Event>) {
        let until = round.saturating_add(1);
        let from = self.passes.max(until.saturating_sub(PASSES_PER_LOOK_MAX));
        events.extend((from..until).map(|pass| Event::MigrationPass(pass + 1)));
        self.passes = self.passes.max(until);
    }

    fn tell(&mut self, status: Status, events: &mut Vec<Event>) {
        if self.told != Some(status) {
            self.told = Some(status);
            events.push(Event::Migration(status_word(status)));
        }
    }

    fn rank(&self) -> u8 {
        self.told.map_or(0, Narrator::rank_of)
    }

    /// How far along its course a migration is with this status.
    fn rank_of(status: Status) -> u8 {
        match status {
            Status::Setup => 1,
            Status::Active => 2,
            Status::Device => 3,
            Status::Cancelling => 4,
            Status::Completed
            | Status::Failed
            | Status::Cancelled
            | Status::Undecided
            | Status::GivenUp => 5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::progress;
    use std::io::Read;
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    #[test]
    fn events_have_qemus_shape() {
        let json = Event::MigrationPass(2).to_json(Some(Duration::from_micros(1_500_000)));
        let expected = json!({
            "event": "MIGRATION_PASS", "data": {"pass": 2},
            "timestamp": {"seconds": 1, "microseconds": 500_000},
        });
        assert_eq!(json, expected);
        assert_eq!(Event::Stop.to_json(None).get("data"), None);
    }

    #[test]
    fn a_fast_migration_is_told_in_full() {
        let mut narrator = Narrator::new(true);
        let mut seen = narrator.look(&progress(Status::Setup, 0), Some(true));
        seen.extend(narrator.look(&progress(Status::Completed, 1), None));
        let expected = [
            Event::Migration("setup"),
            Event::Migration("active"),
            Event::MigrationPass(1),
            Event::MigrationPass(2),
            Event::Stop,
            Event::Migration("device"),
            Event::Migration("completed"),
        ];
        assert_eq!(seen, expected);
        assert_eq!(narrator.look(&progress(Status::Completed, 1), None), []);
    }

    #[test]
    fn a_paused_guest_is_not_stopped_again() {
        let mut narrator = Narrator::new(true);
        narrator.look(&progress(Status::Active, 0), Some(false));
        let seen = narrator.look(&progress(Status::Device, 0), None);
        assert_eq!(seen, [Event::Migration("device")]);
        let seen = narrator.look(&progress(Status::Failed, 0), None);
        assert_eq!(seen, [Event::Migration("failed")]);
    }

    #[test]
    fn a_failure_in_the_switchover_resumes_the_guest() {
        let mut narrator = Narrator::new(true);
        narrator.look(&progress(Status::Active, 0), Some(true));
        narrator.look(&progress(Status::Device, 1), None);
        let seen = narrator.look(&progress(Status::Failed, 1), Some(true));
        assert_eq!(seen, [Event::Resume, Event::Migration("failed")]);
    }

    #[test]
    fn an_undecided_one_that_is_settled_goes_on_from_there() {
        let mut narrator = Narrator::new(true);
        narrator.look(&progress(Status::Active, 0), Some(true));
        narrator.look(&progress(Status::Undecided, 0), None);
        let seen = narrator.look(&progress(Status::Failed, 0), Some(true));
        assert_eq!(seen, [Event::Resume, Event::Migration("failed")]);
    }

    #[test]
    fn a_client_that_does_not_read_costs_nothing() {
        let bus = EventBus::default();
        let (outbox, inbox) = sync_channel(1);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert!(bus.subscribe(1, outbox, Arc::new(ours), "reply".into()));
        assert_eq!(&*inbox.recv().unwrap(), "reply");
        bus.send(&Event::Stop);
        bus.send(&Event::Resume);
        assert!(bus.lock().is_empty());
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
        assert!(inbox.recv().unwrap().contains("STOP"));
        assert!(inbox.recv().is_err());
    }
}
