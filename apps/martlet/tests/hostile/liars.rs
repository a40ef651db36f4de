//! Destinations that speak the wire well, and lie. The source's guest runs on unless the source
//! itself has sent its commit; and then its owner soon knows how it stands.

use crate::support::Dir;
use crate::support::process::Process;
use crate::wire::{
    ALIVE, ANSWER, CHANNELS_READY, COMES_MAX, COMMIT, COMMIT_REFUSED, COMMITTED, CONTROL, DATA,
    FINAL_STATE, Listener, PING, PONG, Peer, QUERY, QUERY_FATE, REHEARSE, REHEARSED,
    ROUND_RECEIVED, SETUP, SETUP_DONE, SWITCHOVER_SOON, UNKNOWN, Value, map, message, next_barrier,
};
use serde_json::{Value as Json, json};
use std::time::{Duration, Instant};

/// What it calls itself.
const INSTANCE: [u8; 16] = [7; 16];
const OTHER_INSTANCE: [u8; 16] = [8; 16];

/// The blackout that the sources accept.
const LIMIT_MS: u32 = 3000;
/// Far above what a source gives a destination behind its commit at that limit.
const SOON: Duration = Duration::from_secs(45);

/// A source whose guest comes to a destination that answers as the test says.
struct Liar {
    source: Process,
    listener: Listener,
    control: Peer,
    _dir: Dir,
}

fn numbers<const N: usize>(values: [u64; N]) -> Value {
    map((0..).zip(values.map(Value::Number)))
}

fn answer(instance: [u8; 16], fate: u64) -> Vec<u8> {
    let answer = [(0, Value::Bytes(instance.to_vec())), (1, Value::Number(fate))];
    message(ANSWER, &map(answer))
}

fn refused() -> Vec<u8> {
    message(COMMIT_REFUSED, &map([(0, Value::Text("no".to_owned()))]))
}

fn committed() -> Vec<u8> {
    message(COMMITTED, &numbers([u64::MAX, 0, u64::MAX]))
}

impl Liar {
    /// A migration whose channel is there, and whose rounds are read and confirmed.
    fn begin(parameters: &Json) -> Liar {
        let dir = Dir::new().expect("a folder");
        let program = "fill=1M,ws=1M,rate=1/ms,tick=1ms";
        let run = ["run", "--memory", "16M", "--program", program];
        let mut source = Process::start(dir.path(), 0, &run).expect("a source");
        let (listener, port) = Listener::new();
        // The bound of the blackout is three times the limit, on a host that has much else to do.
        let own = json!({ "multifd-channels": 1, "downtime-limit": LIMIT_MS });
        source.execute("migrate-set-parameters", &own).unwrap();
        source.execute("migrate-set-parameters", parameters).unwrap();
        let uri = json!({ "uri": format!("tcp:127.0.0.1:{port}") });
        source.execute("migrate", &uri).expect("it begins");
        let (mut control, role, _) = listener.accept();
        assert_eq!((role, control.expect(SETUP).field(3)), (CONTROL, Some(&Value::Number(1))));
        let bytes = |byte| Value::Bytes(vec![byte; 16]);
        let done = map([(0, bytes(INSTANCE[0])), (1, bytes(1)), (2, bytes(0))]);
        control.say(&message(SETUP_DONE, &done)).unwrap();
        let (mut channel, role, _) = listener.accept();
        assert_eq!(role, DATA);
        control.say(&message(CHANNELS_READY, &map([]))).unwrap();
        let mut confirm = Peer(control.0.try_clone().unwrap());
        std::thread::spawn(move || {
            while let Ok(round) = next_barrier(&mut channel) {
                let received = message(ROUND_RECEIVED, &numbers([u64::from(round)]));
                if confirm.say(&received).is_err() {
                    return;
                }
            }
        });
        Liar { source, listener, control, _dir: dir }
    }

    /// Serves the source until it says this. Rehearsals take none of the time, or all of it.
    fn until(&mut self, last: u16, rehearsed_ns: u64) {
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
            if kind == last {
                return;
            }
            assert!([PING, REHEARSE, SWITCHOVER_SOON, FINAL_STATE].contains(&kind), "kind {kind}");
        }
    }

    fn say(&mut self, messages: &[Vec<u8>]) {
        self.control.say(&messages.concat()).unwrap();
    }

    /// Answers the next question about the attempt.
    fn be_asked(&self, instance: [u8; 16], fate: u64) {
        loop {
            let (mut asker, role, _) = self.listener.accept();
            if role == QUERY {
                asker.expect(QUERY_FATE);
                asker.say(&answer(instance, fate)).unwrap();
                return;
            }
        }
    }

    fn comes_to(&mut self, status: &str, within: Duration) {
        let began = Instant::now();
        loop {
            let now = self.source.migration().expect("it hears its owner");
            if now.status == status {
                return;
            }
            assert!(began.elapsed() < within, "{status}: {}", now.raw);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The guest is here and as it was.
    fn runs(&mut self) {
        assert_eq!(self.source.run_state().unwrap(), "running");
        let beats = self.source.guest().unwrap().expect("a guest").beats;
        let began = Instant::now();
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

    fn has_no_defect(&self) {
        let said = self.source.said();
        assert!(!said.contains("panicked") && !said.contains("defect"), "{said}");
    }
}

#[test]
fn who_takes_the_guest_before_it_is_given_gets_none() {
    let alive = message(ALIVE, &numbers([0, 0]));
    for early in [committed(), refused(), alive, answer(INSTANCE, 1)] {
        let mut liar = Liar::begin(&json!({}));
        liar.until(SWITCHOVER_SOON, 0);
        liar.say(&[early]);
        liar.comes_to("failed", COMES_MAX);
        liar.runs();
    }
}

#[test]
fn the_first_word_about_a_commit_counts() {
    let mut liar = Liar::begin(&json!({}));
    liar.until(COMMIT, 0);
    liar.say(&[refused(), committed(), refused()]);
    liar.comes_to("failed", COMES_MAX);
    liar.runs();

    let mut liar = Liar::begin(&json!({}));
    liar.until(COMMIT, 0);
    liar.say(&[committed(), refused(), committed()]);
    liar.comes_to("completed", COMES_MAX);
    assert_eq!(liar.source.run_state().unwrap(), "postmigrate");
    liar.has_no_defect();
}

#[test]
fn absurd_times_of_a_guest_that_arrived_harm_nobody() {
    for time in [0, u64::MAX] {
        let mut liar = Liar::begin(&json!({}));
        liar.until(COMMIT, 0);
        let frames = Value::List(vec![Value::Number(time), Value::Null]);
        let trouble = Value::Text("\u{1b}[2J".repeat(100));
        let devices = numbers([time, !time]).with(2, frames).with(3, trouble);
        // The wall clock is the least number that 64 bits hold.
        let alive = numbers([time; 4]).with(4, devices);
        let times = message(COMMITTED, &numbers([time, !time, time]));
        liar.say(&[times, message(ALIVE, &alive)]);
        liar.comes_to("completed", COMES_MAX);
        liar.has_no_defect();
    }
}

#[test]
fn only_the_process_that_got_the_commit_gives_it_back() {
    let mut liar = Liar::begin(&json!({}));
    liar.until(COMMIT, 0);
    // A breach: there is no telling what it did with the commit.
    liar.say(&[message(SETUP_DONE, &map([]))]);
    liar.be_asked(OTHER_INSTANCE, UNKNOWN);
    liar.comes_to("x-undecided", COMES_MAX);
    assert_ne!(liar.source.run_state().unwrap(), "running");
    liar.be_asked(INSTANCE, UNKNOWN);
    liar.comes_to("failed", COMES_MAX);
    liar.runs();
}

/// Its owner wants the guest stopped, whatever is predicted. How long a destination may take then
/// is not for that destination to say.
#[test]
fn a_rehearsal_that_took_for_ever_gives_no_time_for_an_answer() {
    let stop = json!({ "x-within": { "limit-ms": 1, "then": "stop" } });
    let mut liar = Liar::begin(&stop);
    liar.until(COMMIT, u64::MAX);
    liar.comes_to("x-undecided", SOON);
    liar.say(&[refused()]);
    liar.comes_to("failed", COMES_MAX);
    liar.runs();
}
