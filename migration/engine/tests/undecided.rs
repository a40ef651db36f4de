//! A migration whose connection breaks at the commit: what `resolve` says, and to how many.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::relay::{self, Caller};
use fake::{FakeFactory, FakeVmm, line};
use martlet_engine::{
    MigrateOptions, Migration, OperatorOverride, OperatorsWord, Receiver, Status,
};
use martlet_transport::Address;
use martlet_wire::frame::Kind;
use martlet_wire::hello::Role;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

/// Longer than anything takes on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// What becomes of the commit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commit {
    /// The connection breaks before it.
    Lost,
    /// It gets there, and no word comes back.
    Unanswered,
}

/// Stands between the two sides, breaks the control connection at the commit, and holds queries
/// back until they are let through.
struct Proxy {
    commit: Commit,
    /// Whether they are let through, and how many came.
    queries: Mutex<(bool, u32)>,
    /// The host of the destination is gone: connections are closed at once.
    gone: AtomicBool,
    changed: Condvar,
}

impl Proxy {
    fn start(to: &Address, commit: Commit) -> (Arc<Proxy>, Address) {
        let proxy = Arc::new(Proxy {
            commit,
            queries: Mutex::default(),
            gone: AtomicBool::new(false),
            changed: Condvar::new(),
        });
        let ours = Arc::clone(&proxy);
        let address = relay::start(to, move |caller| ours.serve(caller));
        (proxy, address)
    }

    fn let_queries_through(&self) {
        self.queries.lock().unwrap().0 = true;
        self.changed.notify_all();
    }

    fn serve(&self, caller: Caller) {
        if self.gone.load(Ordering::SeqCst) {
            return;
        }
        if caller.role == Role::QUERY {
            let mut queries = self.queries.lock().unwrap();
            queries.1 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(queries, |queries| !queries.0).unwrap());
            if self.gone.load(Ordering::SeqCst) {
                return;
            }
        }
        let is_control = caller.role == Role::CONTROL;
        let (client, server) = caller.connect();
        if is_control {
            return self.pass_until_commit(&client, server);
        }
        let (back, out) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answers = thread::spawn(move || pass(back, out, &AtomicBool::new(false)));
        pass(client, server, &AtomicBool::new(false));
        let _ = answers.join();
    }

    fn pass_until_commit(&self, client: &TcpStream, mut server: TcpStream) {
        let cut = Arc::new(AtomicBool::new(false));
        let (back, out) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let is_cut = Arc::clone(&cut);
        let answers = thread::spawn(move || pass(back, out, &is_cut));
        relay::messages(client, |kind, frame| {
            let is_commit = kind == Kind::COMMIT;
            cut.fetch_or(is_commit, Ordering::SeqCst);
            let is_lost = is_commit && self.commit == Commit::Lost;
            !(is_lost || server.write_all(frame).is_err() || is_commit)
        });
        let _ = client.shutdown(Shutdown::Both);
        if self.commit == Commit::Lost {
            let _ = server.shutdown(Shutdown::Both);
        }
        let _ = answers.join();
    }
}

/// Copies one way until an end; what comes once it is cut goes nowhere.
fn pass(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(got) = from.read(&mut buffer) {
        let lost = is_cut.load(Ordering::SeqCst);
        if got == 0 || !lost && to.write_all(&buffer[..got]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

struct Undecided {
    source: Arc<FakeVmm>,
    migration: Migration,
    proxy: Arc<Proxy>,
    _receiver: Receiver,
}

/// A guest whose migration broke at the commit.
fn undecided(commit: Commit) -> Undecided {
    let factory = Arc::new(FakeFactory::default());
    let receiver =
        Receiver::start(&"tcp:127.0.0.1:0".parse().unwrap(), factory, Default::default()).unwrap();
    let (proxy, to) = Proxy::start(&receiver.address(), commit);
    let source = FakeVmm::booted();
    let vmm = Arc::<FakeVmm>::clone(&source);
    let migration = Migration::start(vmm, &to, MigrateOptions::default()).unwrap();
    let report = migration.wait(LIMIT).expect("it is over");
    assert_eq!(report.outcome, martlet_engine::Outcome::Undecided, "{report:?}");
    assert!(!source.is_running());
    Undecided { source, migration, proxy, _receiver: receiver }
}

/// Asks from three threads at once; the destination hears of it only when all of them wait.
fn resolve_thrice(pair: &Undecided) -> Vec<Result<Status, String>> {
    let asked: Vec<_> = (0..3)
        .map(|_| {
            let migration = pair.migration.clone();
            thread::spawn(move || migration.resolve().map_err(|error| error.to_string()))
        })
        .collect();
    // Until the first question is on its way. The others may come before or after the answer.
    let queries = pair.proxy.queries.lock().unwrap();
    drop(pair.proxy.changed.wait_timeout_while(queries, LIMIT, |queries| queries.1 == 0).unwrap());
    pair.proxy.let_queries_through();
    asked.into_iter().map(|asked| asked.join().unwrap()).collect()
}

#[test]
fn a_guest_that_never_left_runs_here_and_everybody_who_asked_is_told() {
    let pair = undecided(Commit::Lost);
    for answer in resolve_thrice(&pair) {
        assert_eq!(answer, Ok(Status::Failed));
    }
    assert!(pair.source.is_running());
    assert_eq!(pair.migration.progress().status, Status::Failed);
    assert_eq!(pair.migration.resolve().unwrap(), Status::Failed, "the same for who asks later");
    pair.source.quit();
}

#[test]
fn a_guest_that_left_is_said_to_have_left() {
    let pair = undecided(Commit::Unanswered);
    for answer in resolve_thrice(&pair) {
        assert_eq!(answer, Ok(Status::Completed));
    }
    assert!(!pair.source.is_running() && !pair.source.holds_permit());
    pair.source.quit();
}

fn run_here() -> OperatorOverride {
    OperatorOverride::RunHere(OperatorsWord::given_by_a_person())
}

#[test]
fn a_guest_whose_destination_is_gone_is_taken_back_or_given_up_by_its_operator() {
    for (by, end) in [
        (run_here(), Status::Failed),
        (OperatorOverride::GiveUp(OperatorsWord::given_by_a_person()), Status::GivenUp),
    ] {
        let pair = undecided(Commit::Lost);
        pair.proxy.gone.store(true, Ordering::SeqCst);
        pair.proxy.let_queries_through();
        assert!(pair.migration.resolve().is_err(), "nobody answers");
        assert!(!pair.source.is_running());
        assert_eq!(pair.migration.override_undecided(by).unwrap(), end);
        assert_eq!(pair.source.is_running(), end == Status::Failed);
        let report = pair.migration.wait(LIMIT).unwrap();
        assert!(line(&report).unwrap().contains("by its operator"));
        assert_eq!(pair.migration.resolve().unwrap(), end, "who asks later is told the same");
        pair.source.quit();
    }
}

/// What this host still holds of a commit when its operator takes the guest back never arrives.
#[test]
fn a_commit_that_did_not_get_away_is_not_sent_once_the_guest_is_taken_back() {
    let factory = Arc::new(FakeFactory::default());
    let receiver =
        Receiver::start(&"tcp:127.0.0.1:0".parse().unwrap(), factory, Default::default()).unwrap();
    let ((go_on, held), (seen, kinds)) = (mpsc::channel(), mpsc::channel());
    let ends = Mutex::new(Some((held, seen)));
    let to = relay::start(&receiver.address(), move |caller| {
        if caller.role == Role::QUERY {
            return;
        }
        let control = (caller.role == Role::CONTROL).then(|| ends.lock().unwrap().take().unwrap());
        let (client, mut server) = caller.connect();
        let (back, out) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answers = thread::spawn(move || pass(back, out, &AtomicBool::new(false)));
        match control {
            None => pass(client, server, &AtomicBool::new(false)),
            Some((held, seen)) => relay::messages(&client, |kind, frame| {
                // From here on nothing is read until the guest is taken back.
                let _ = kind != Kind::SWITCHOVER_SOON || held.recv().is_ok();
                seen.send(kind).is_ok() && server.write_all(frame).is_ok()
            }),
        }
        let _ = answers.join();
    });
    let source = FakeVmm::booted();
    source.long_state.store(true, Ordering::SeqCst);
    let vmm = Arc::<FakeVmm>::clone(&source);
    let migration = Migration::start(vmm, &to, MigrateOptions::default()).unwrap();
    let report = migration.wait(LIMIT).expect("it is over");
    assert_eq!(report.outcome, martlet_engine::Outcome::Undecided, "{report:?}");
    assert_eq!(migration.override_undecided(run_here()).unwrap(), Status::Failed);
    assert!(source.is_running());
    go_on.send(()).unwrap();
    let kinds: Vec<Kind> = kinds.iter().collect();
    assert!(!kinds.contains(&Kind::COMMIT), "{kinds:?}");
    source.quit();
}

#[test]
fn an_operator_does_not_overrule_a_destination_that_answers() {
    let pair = undecided(Commit::Unanswered);
    pair.proxy.let_queries_through();
    assert_eq!(pair.migration.override_undecided(run_here()).unwrap(), Status::Completed);
    assert!(!pair.source.is_running() && !pair.source.holds_permit());
    pair.source.quit();
}
