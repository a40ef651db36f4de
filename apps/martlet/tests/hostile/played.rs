//! A destination that a test plays, and the real source that it is played for.

use crate::support::Dir;
use crate::support::process::Process;
use crate::wire::{
    ANSWER, CHANNELS_READY, COMES_MAX, COMMIT_REFUSED, COMMITTED, CONTROL, DATA, FINAL_STATE,
    Listener, PING, PONG, Peer, QUERY, QUERY_FATE, REHEARSE, REHEARSED, ROUND_RECEIVED, SETUP,
    SETUP_DONE, SWITCHOVER_SOON, UNKNOWN, Value, map, message, next_barrier,
};
use serde_json::{Value as Json, json};
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What it calls itself.
pub(crate) const INSTANCE: [u8; 16] = [7; 16];

/// The blackout that the sources accept. Its bound is three times that: the default's would be a
/// second, and a test that answers later than that, on a host that has much else to do, would see
/// the stop called off, instead of what it lies about. Bounds are tested with a clock of their own
/// (`migration/protocol`).
const LIMIT_MS: u32 = 3000;

/// A guest that does little.
pub(crate) const QUIET: &str = "fill=1M,ws=1M,rate=1/ms,tick=1ms";

/// Between two bytes that a slow reader takes.
const SLOW: Duration = Duration::from_secs(1);

pub(crate) fn numbers<const N: usize>(values: [u64; N]) -> Value {
    map((0..).zip(values.map(Value::Number)))
}

pub(crate) fn answer(instance: [u8; 16], fate: u64) -> Vec<u8> {
    let answer = [(0, Value::Bytes(instance.to_vec())), (1, Value::Number(fate))];
    message(ANSWER, &map(answer))
}

pub(crate) fn refused() -> Vec<u8> {
    message(COMMIT_REFUSED, &map([(0, Value::Text("no".to_owned()))]))
}

pub(crate) fn committed() -> Vec<u8> {
    message(COMMITTED, &numbers([u64::MAX, 0, u64::MAX]))
}

/// Reads like its inner reader, or a byte a second once it is told to.
pub(crate) struct Reader {
    inner: Peer,
    is_slow: Arc<AtomicBool>,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.is_slow.load(Ordering::Relaxed) || buffer.is_empty() {
            return self.inner.0.read(buffer);
        }
        std::thread::sleep(SLOW);
        self.inner.0.read(&mut buffer[..1])
    }
}

/// Reads a byte a second, until the connection ends.
pub(crate) fn read_slowly(peer: Peer) {
    let mut reader = Reader { inner: peer, is_slow: Arc::new(AtomicBool::new(true)) };
    std::thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
}

/// See the module.
pub(crate) struct Played {
    pub(crate) source: Process,
    pub(crate) listener: Listener,
    pub(crate) control: Peer,
    /// From now on pages are read a byte a second.
    pub(crate) pages_slowly: Arc<AtomicBool>,
    _dir: Dir,
}

impl Played {
    /// A migration whose channel is there, and whose rounds are read and confirmed.
    pub(crate) fn begin(parameters: &Json) -> Played {
        Played::begin_with(QUIET, parameters)
    }

    /// As [`Played::begin`], for a guest that runs this.
    pub(crate) fn begin_with(program: &str, parameters: &Json) -> Played {
        let mut played = Played::called(program, parameters);
        let channel = played.set_up();
        let is_slow = Arc::clone(&played.pages_slowly);
        let mut confirm = played.control.twin();
        std::thread::spawn(move || {
            let mut channel = Reader { inner: channel, is_slow };
            while let Ok(round) = next_barrier(&mut channel) {
                let received = message(ROUND_RECEIVED, &numbers([u64::from(round)]));
                if confirm.say(&received).is_err() {
                    return;
                }
            }
        });
        played
    }

    /// A migration of which nothing is there but its control connection.
    pub(crate) fn called(program: &str, parameters: &Json) -> Played {
        let (source, listener, dir) = Played::source(program, parameters);
        let (control, role, _) = listener.accept();
        assert_eq!(role, CONTROL);
        Played::of(source, listener, control, dir)
    }

    /// With the control connection that the source has made.
    pub(crate) fn of(source: Process, listener: Listener, control: Peer, dir: Dir) -> Played {
        Played { source, listener, control, pages_slowly: Arc::default(), _dir: dir }
    }

    /// A source that begins to migrate to the listener.
    pub(crate) fn source(program: &str, parameters: &Json) -> (Process, Listener, Dir) {
        Played::source_by("tcp", program, parameters)
    }

    /// As [`Played::source`], by `tcp` or `rdma`.
    pub(crate) fn source_by(
        way: &str,
        program: &str,
        parameters: &Json,
    ) -> (Process, Listener, Dir) {
        let dir = Dir::new().expect("a folder");
        let run = ["run", "--memory", "32M", "--program", program];
        let mut source = Process::start(dir.path(), 0, &run).expect("a source");
        let (listener, port) = Listener::new();
        let own = json!({ "multifd-channels": 1, "downtime-limit": LIMIT_MS });
        source.execute("migrate-set-parameters", &own).unwrap();
        source.execute("migrate-set-parameters", parameters).unwrap();
        let uri = json!({ "uri": format!("{way}:127.0.0.1:{port}") });
        source.execute("migrate", &uri).expect("it begins");
        (source, listener, dir)
    }

    /// Answers the setup; the channel that comes then.
    pub(crate) fn set_up(&mut self) -> Peer {
        self.set_up_for(DATA)
    }

    /// As [`Played::set_up`], for a channel of this role.
    pub(crate) fn set_up_for(&mut self, wanted: u16) -> Peer {
        assert_eq!(self.control.expect(SETUP).field(3), Some(&Value::Number(1)));
        let bytes = |byte| Value::Bytes(vec![byte; 16]);
        // It takes a stop that is called off.
        let done =
            map([(0, bytes(INSTANCE[0])), (1, bytes(1)), (2, bytes(0)), (4, Value::Bool(true))]);
        self.control.say(&message(SETUP_DONE, &done)).unwrap();
        let (channel, role, _) = self.listener.accept();
        assert_eq!(role, wanted);
        self.control.say(&message(CHANNELS_READY, &map([]))).unwrap();
        channel
    }

    /// Serves the source until it says this. Rehearsals take none of the time, or all of it.
    pub(crate) fn until(&mut self, last: u16, rehearsed_ns: u64) {
        assert_eq!(self.until_one_of(&[last], rehearsed_ns), last);
    }

    /// As [`Played::until`]; which of these it said.
    pub(crate) fn until_one_of(&mut self, last: &[u16], rehearsed_ns: u64) -> u16 {
        loop {
            let (kind, body) = self.control.hear().expect("a message");
            let answer = match kind {
                PING => {
                    let sent = body.field(0).unwrap().number();
                    // A clock that goes everywhere.
                    message(PONG, &numbers([sent, sent.reverse_bits()]))
                }
                REHEARSE => message(REHEARSED, &numbers([rehearsed_ns; 2])),
                _ => Vec::new(),
            };
            self.control.say(&answer).unwrap();
            if last.contains(&kind) {
                return kind;
            }
            assert!([PING, REHEARSE, SWITCHOVER_SOON, FINAL_STATE].contains(&kind), "kind {kind}");
        }
    }

    pub(crate) fn say(&mut self, messages: &[Vec<u8>]) {
        self.control.say(&messages.concat()).unwrap();
    }

    /// The next connection that asks about the attempt, behind its question. One that the source
    /// has given up meanwhile is passed over.
    pub(crate) fn asked(&self) -> Peer {
        loop {
            let (mut asker, role, _) = self.listener.accept();
            if role == QUERY && asker.hear().is_ok_and(|(kind, _)| kind == QUERY_FATE) {
                return asker;
            }
        }
    }

    /// Answers the next question about the attempt.
    pub(crate) fn be_asked(&self, instance: [u8; 16], fate: u64) {
        self.asked().say(&answer(instance, fate)).unwrap();
    }

    pub(crate) fn comes_to(&mut self, status: &str, within: Duration) {
        self.comes_to_one_of(&[status], within);
    }

    /// Waits for one of these; which it was.
    pub(crate) fn comes_to_one_of(&mut self, wanted: &[&str], within: Duration) -> String {
        let began = Instant::now();
        loop {
            let now = self.source.migration().expect("it hears its owner");
            if wanted.contains(&now.status.as_str()) {
                return now.status;
            }
            assert!(began.elapsed() < within, "{wanted:?}: {}", now.raw);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The commit got no answer, but a question does; or it was not even sent. The guest goes on.
    pub(crate) fn settles_undecided(&mut self) {
        if self.comes_to_one_of(&["x-undecided", "failed"], COMES_MAX) == "x-undecided" {
            self.be_asked(INSTANCE, UNKNOWN);
            self.comes_to("failed", COMES_MAX);
        }
        self.runs();
    }

    /// The owner calls it off, and is heard. Says how long that took: 200 ms are meant, on a host
    /// that does nothing else.
    pub(crate) fn cancels(&mut self, when: &str) {
        let asked = Instant::now();
        self.source.ask("migrate_cancel").expect("it hears its owner");
        self.comes_to("cancelled", COMES_MAX);
        println!("cancelled {when} within {:?}", asked.elapsed());
        self.runs();
    }

    /// The guest is here and as it was.
    pub(crate) fn runs(&mut self) {
        let began = Instant::now();
        // The peer may hear of it before it is done.
        while self.source.run_state().unwrap() != "running" {
            assert!(began.elapsed() < COMES_MAX, "it stands");
        }
        let beats = self.source.guest().unwrap().expect("a guest").beats;
        loop {
            let guest = self.source.guest().unwrap().expect("a guest");
            assert_eq!((guest.wrong, guest.clock_steps_back), (0, 0));
            if guest.beats > beats {
                break;
            }
            assert!(began.elapsed() < COMES_MAX, "it stands");
        }
        self.has_no_defect();
    }

    pub(crate) fn has_no_defect(&self) {
        let said = self.source.said();
        assert!(!said.contains("panicked") && !said.contains("defect"), "{said}");
    }
}
