//! Destinations that stop reading, flood, freeze or slow down: the guest's owner is heard, and the
//! guest never stands for long.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::relay::{self, Caller};
use fake::{FakeFactory, FakeVmm, blackout, line};
use martlet_engine::{MigrateOptions, Migration, Outcome, Receiver, Report, Status, Within};
use martlet_transport::Address;
use martlet_units::BytesPerSec;
use martlet_wire::control::{Control, Pong};
use martlet_wire::frame::{Kind, encode};
use martlet_wire::hello::Role;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than anything takes on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// What a thread that is not blocked does at once, with room for a host that has others to run. All
/// that blocked before took ten seconds or more.
const AT_ONCE: Duration = Duration::from_secs(5);

/// What the way between both sides does, from a message of the source on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Nothing goes any way any more, and nobody is told.
    Freeze,
    /// Pages don't go on; messages do.
    HoldPages,
    /// Pages go on at so many bytes a second.
    SlowPages(u64),
    /// The destination answers pings that nobody sent, as fast as it can.
    Flood,
}

/// Stands between a source and a destination.
struct Way {
    from: Kind,
    then: Then,
    begun: Arc<AtomicBool>,
    /// Raised by the test: all goes on.
    over: (Mutex<bool>, Condvar),
    last_bytes: AtomicU64,
    /// Held while something is written to the source: a flood is made of whole messages.
    to_source: Mutex<()>,
}

impl Way {
    fn start(to: &Address, from: Kind, then: Then) -> (Arc<Way>, Address) {
        let way = Arc::new(Way {
            from,
            then,
            begun: Arc::default(),
            over: Default::default(),
            last_bytes: AtomicU64::new(0),
            to_source: Mutex::new(()),
        });
        let ours = Arc::clone(&way);
        let address = relay::start(to, move |caller| Arc::clone(&ours).serve(caller));
        (way, address)
    }

    fn end(&self) {
        *self.over.0.lock().unwrap() = true;
        self.over.1.notify_all();
    }

    fn await_begin(&self) {
        let began = Instant::now();
        while !self.begun.load(Ordering::SeqCst) {
            assert!(began.elapsed() < LIMIT, "it came so far");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn hold(&self) {
        let over = self.over.0.lock().unwrap();
        drop(self.over.1.wait_timeout_while(over, LIMIT, |over| !*over).unwrap());
    }

    fn serve(self: Arc<Way>, caller: Caller) {
        let role = caller.role;
        if self.then == Then::Freeze && self.begun.load(Ordering::SeqCst) {
            self.hold();
        }
        let (client, server) = caller.connect();
        let (back, out) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let way = Arc::clone(&self);
        thread::spawn(move || way.pass(back, out, role, false));
        if role == Role::CONTROL {
            self.pass_messages(&client, server);
        } else {
            self.pass(client, server, role, true);
        }
    }

    /// The source's messages, one by one.
    fn pass_messages(self: Arc<Way>, client: &TcpStream, mut server: TcpStream) {
        relay::messages(client, |kind, frame| {
            let begins = kind == self.from && !self.begun.swap(true, Ordering::SeqCst);
            if begins && self.then == Then::Flood {
                let (way, mut to) = (Arc::clone(&self), client.try_clone().unwrap());
                // The first of them before the destination can answer.
                way.send_pongs(&mut to);
                thread::spawn(move || while way.send_pongs(&mut to) {});
            }
            if self.then == Then::Freeze && self.begun.load(Ordering::SeqCst) {
                self.hold();
            }
            server.write_all(frame).is_ok()
        });
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream, role: Role, forth: bool) {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(got) = from.read(&mut buffer) {
            let begun = self.begun.load(Ordering::SeqCst) && !*self.over.0.lock().unwrap();
            match self.then {
                Then::Freeze if begun => self.hold(),
                Then::HoldPages if begun && forth && role == Role::DATA => self.hold(),
                Then::SlowPages(rate) if begun && forth && role == Role::DATA => {
                    let micros = got as u64 * 1_000_000 / rate;
                    self.last_bytes.fetch_add(got as u64, Ordering::SeqCst);
                    thread::sleep(Duration::from_micros(micros));
                }
                _ => {}
            }
            let whole = (!forth).then(|| self.to_source.lock().unwrap());
            if got == 0 || to.write_all(&buffer[..got]).is_err() {
                break;
            }
            drop(whole);
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    }

    /// Whether the source still takes them.
    fn send_pongs(&self, to: &mut TcpStream) -> bool {
        let mut bytes = Vec::new();
        for sent_ns in 0..1000 {
            encode(&Control::Pong(Pong { sent_ns, answered_ns: 7 }), &mut bytes).unwrap();
        }
        let _whole = self.to_source.lock().unwrap();
        to.write_all(&bytes).is_ok()
    }
}

struct Scene {
    source: Arc<FakeVmm>,
    migration: Migration,
    way: Arc<Way>,
    factory: Arc<FakeFactory>,
    _receiver: Receiver,
}

fn scene(from: Kind, then: Then, options: MigrateOptions) -> Scene {
    scene_of(FakeVmm::booted(), from, then, options)
}

/// A guest that has more to send in its blackout than the sockets hold.
/// What becomes of the way begins with its stop.
fn busy_scene(then: Then, downtime_limit: Duration) -> Scene {
    let source = FakeVmm::booted();
    source.dirty_at_stop.store(true, Ordering::SeqCst);
    let options = MigrateOptions {
        channels: Some(2),
        downtime_limit,
        auto_converge: false,
        ..MigrateOptions::default()
    };
    // No message of a source: it is the stop that begins it.
    scene_of(source, Kind::ALIVE, then, options)
}

fn scene_of(source: Arc<FakeVmm>, from: Kind, then: Then, options: MigrateOptions) -> Scene {
    let factory = Arc::new(FakeFactory::default());
    let listen = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver =
        Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), Default::default()).unwrap();
    let (way, to) = Way::start(&receiver.address(), from, then);
    if from == Kind::ALIVE {
        *source.at_stop.lock().unwrap() = Some(Arc::clone(&way.begun));
    }
    let vmm = Arc::<FakeVmm>::clone(&source);
    let migration = Migration::start(vmm, &to, options).unwrap();
    Scene { source, migration, way, factory, _receiver: receiver }
}

impl Scene {
    fn wait(&self, limit: Duration) -> Report {
        let report = self.migration.wait(limit);
        report.unwrap_or_else(|| panic!("it is not over: {:?}", self.migration.progress()))
    }

    fn cancel(&self) {
        self.way.await_begin();
        self.migration.cancel();
        let report = self.wait(AT_ONCE);
        assert_eq!(report.outcome, Outcome::Cancelled, "{report:?}");
        assert!(self.source.is_running());
        self.source.quit();
    }
}

#[test]
fn a_cancel_is_heard_while_pages_do_not_go_on() {
    scene(Kind::SETUP, Then::HoldPages, MigrateOptions::default()).cancel();
}

#[test]
fn a_cancel_is_heard_while_the_last_pages_do_not_go_on() {
    busy_scene(Then::HoldPages, Duration::from_secs(30)).cancel();
}

#[test]
fn a_cancel_is_heard_while_the_destination_is_frozen() {
    for from in [Kind::SETUP, Kind::REHEARSE] {
        scene(from, Then::Freeze, MigrateOptions::default()).cancel();
    }
    busy_scene(Then::Freeze, Duration::from_secs(30)).cancel();
}

#[test]
fn a_flood_of_answers_ends_the_attempt() {
    for from in [Kind::SETUP, Kind::REHEARSE, Kind::SWITCHOVER_SOON] {
        let flooded = scene(from, Then::Flood, MigrateOptions::default());
        let report = flooded.wait(LIMIT);
        // The last one may lose the race with the commit; then what it says counts no more.
        if report.outcome == Outcome::Failed {
            let error = line(&report).unwrap();
            assert!(error.contains("nobody asked for"), "{error}");
            assert!(flooded.source.is_running());
        } else {
            assert!(from == Kind::SWITCHOVER_SOON, "{report:?}");
        }
        flooded.source.quit();
    }
}

/// At a limit of 300 ms the guest stood for ten seconds and more, and then nobody knew where it was.
#[test]
fn a_destination_that_freezes_before_the_commit_costs_the_guest_a_second() {
    let frozen = scene(Kind::SWITCHOVER_SOON, Then::Freeze, MigrateOptions::default());
    // The state is long in coming: until then nothing is heard of the destination.
    frozen.source.slow_state.store(true, Ordering::SeqCst);
    let report = frozen.wait(LIMIT);
    assert_eq!(report.outcome, Outcome::Failed, "no commit was sent: {report:?}");
    assert!(frozen.source.is_running());
    frozen.source.quit();
}

/// What was sent and not answered is settled by itself, as soon as the destination can be asked.
#[test]
fn a_destination_that_freezes_at_the_commit_is_asked_until_it_answers() {
    let frozen = scene(Kind::COMMIT, Then::Freeze, MigrateOptions::default());
    let report = frozen.wait(AT_ONCE);
    assert_eq!(report.outcome, Outcome::Undecided, "{report:?}");
    assert!(!frozen.source.is_running());
    frozen.way.end();
    let began = Instant::now();
    while frozen.migration.progress().status == Status::Undecided {
        assert!(began.elapsed() < LIMIT, "nobody resolved it");
        thread::sleep(Duration::from_millis(5));
    }
    let there = frozen.factory.last.lock().unwrap().clone().unwrap();
    assert!(frozen.source.is_running() != there.is_running(), "it runs once");
    frozen.source.quit();
    there.quit();
}

/// A link that gets slow under the last pages: the stop is called off, the guest runs on, and leaves
/// when the link is as it was.
#[test]
fn a_stop_is_called_off_when_the_link_gets_slow() {
    let limit = Duration::from_secs(2);
    let slow = busy_scene(Then::SlowPages(200_000), limit);
    slow.way.await_begin();
    let began = Instant::now();
    // Stopped and set running again.
    while slow.source.resumed.load(Ordering::SeqCst) == 0 {
        assert!(began.elapsed() < LIMIT, "{:?}", slow.migration.progress());
        thread::sleep(Duration::from_millis(1));
    }
    let ended = slow.migration.wait(Duration::ZERO);
    assert!(ended.is_none(), "it goes on: {ended:?}");
    slow.way.end();
    let report = slow.wait(LIMIT);
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    let there = slow.factory.last.lock().unwrap().clone().unwrap();
    there.check_memory();
    slow.source.quit();
    there.quit();
}

/// Whoever has a guest stopped for as long as the rest takes does not want it back after a second.
#[test]
fn a_stop_that_its_owner_wants_goes_through_though_the_link_gets_slow() {
    let source = FakeVmm::booted();
    source.dirty_at_stop.store(true, Ordering::SeqCst);
    let within = Within { limit: Duration::from_millis(500), then: martlet_engine::Then::Stop };
    let options = MigrateOptions {
        channels: Some(2),
        // Nothing fits that.
        downtime_limit: Duration::from_nanos(1),
        within: Some(within),
        auto_converge: false,
        ..MigrateOptions::default()
    };
    let slow = scene_of(source, Kind::ALIVE, Then::SlowPages(1_000_000), options);
    let report = slow.wait(LIMIT);
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    assert!(blackout(&report).is_some_and(|blackout| blackout > Duration::from_secs(2)));
    slow.source.quit();
}

/// One barrier had to find room within 30 s in a queue that a slow lane empties in minutes.
#[test]
fn a_limit_of_one_byte_a_second_can_be_lifted() {
    let options = MigrateOptions {
        channels: Some(4),
        bandwidth: Some(BytesPerSec(1)),
        ..MigrateOptions::default()
    };
    let slow = scene(Kind::SWITCHOVER_SOON, Then::Flood, options);
    let began = Instant::now();
    while slow.migration.progress().status != Status::Active {
        assert!(began.elapsed() < LIMIT);
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(Duration::from_millis(100));
    slow.migration.set_bandwidth(None);
    slow.way.await_begin();
    slow.wait(LIMIT);
    slow.source.quit();
}

#[test]
fn a_panic_before_anything_is_sent_ends_the_attempt() {
    let source = FakeVmm::booted();
    source.panic_in_description.store(true, Ordering::SeqCst);
    let broken = scene_of(source, Kind::SETUP, Then::Flood, MigrateOptions::default());
    let report = broken.wait(LIMIT);
    assert_eq!(report.outcome, Outcome::Failed);
    assert!(line(&report).unwrap().contains("internal error: asked to panic"));
    assert!(broken.source.is_running());
    broken.source.quit();
}

#[test]
fn a_panic_before_the_commit_gives_the_guest_back() {
    let broken = scene(Kind::ABANDON, Then::Flood, MigrateOptions::default());
    broken.source.panic_in_state.store(true, Ordering::SeqCst);
    let report = broken.wait(LIMIT);
    assert_eq!(report.outcome, Outcome::Failed);
    assert!(line(&report).unwrap().contains("internal error: asked to panic"));
    assert!(broken.source.is_running());
    broken.source.quit();
}
