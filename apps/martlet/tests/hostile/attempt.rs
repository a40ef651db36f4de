//! A source that speaks for itself, as far as it has to before it does harm.

use crate::support::Dir;
use crate::support::process::Process;
use crate::wire::{
    ABANDON, CHANNELS_READY, CONTROL, DATA, Listener, PING, PONG, Peer, REHEARSE, ROUND_RECEIVED,
    SETUP, SETUP_DONE, Value, barrier, hello, map, message, next_barrier,
};
use serde_json::json;
use std::sync::atomic::{AtomicU8, Ordering};

/// What a real source asks for: its first message, taken from one that migrates to us.
pub(crate) fn captured_setup(more: &[&str]) -> Value {
    let dir = Dir::new().expect("a folder");
    let program = "fill=1M,ws=1M,rate=1/ms,tick=1ms";
    let arguments = [&["run", "--memory", "16M", "--program", program], more].concat();
    let mut source = Process::start(dir.path(), 0, &arguments).expect("a source");
    let (listener, port) = Listener::new();
    let uri = json!({ "uri": format!("tcp:127.0.0.1:{port}") });
    source.execute("migrate", &uri).expect("it begins");
    let (mut control, role, _) = listener.accept();
    assert_eq!(role, CONTROL);
    let (kind, setup) = control.hear().expect("a setup");
    assert_eq!(kind, SETUP);
    setup
}

/// What a real source asks for, and a state that it would have loaded: it is played a destination
/// until its first rehearsal.
pub(crate) fn captured_state() -> (Value, Value) {
    let dir = Dir::new().expect("a folder");
    let program = "fill=1M,ws=1M,rate=1/ms,tick=1ms";
    let arguments = ["run", "--memory", "16M", "--program", program];
    let mut source = Process::start(dir.path(), 0, &arguments).expect("a source");
    let (listener, port) = Listener::new();
    source.execute("migrate-set-parameters", &json!({ "multifd-channels": 1 })).expect("it does");
    let uri = json!({ "uri": format!("tcp:127.0.0.1:{port}") });
    source.execute("migrate", &uri).expect("it begins");
    let (mut control, _, _) = listener.accept();
    let (_, setup) = control.hear().expect("a setup");
    let named = |byte| Value::Bytes(vec![byte; 16]);
    let done = map([(0, named(1)), (1, named(2)), (2, named(0))]);
    control.say(&message(SETUP_DONE, &done)).expect("it reads");
    let (mut channel, role, _) = listener.accept();
    assert_eq!(role, DATA);
    control.say(&message(CHANNELS_READY, &map([]))).expect("it reads");
    next_barrier(&mut channel.0).expect("a round");
    control.say(&message(ROUND_RECEIVED, &map([(0, Value::Number(0))]))).expect("it reads");
    loop {
        match control.hear().expect("a rehearsal") {
            (REHEARSE, state) => return (setup, state),
            (PING, ping) => {
                let pong = ping.with(1, Value::Number(1));
                control.say(&message(PONG, &pong)).expect("it reads");
            }
            (kind, _) => panic!("message {kind}"),
        }
    }
}

/// The same for a migration of its own, with so many channels.
pub(crate) fn setup_of(captured: &Value, channels: u16) -> Value {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let name = vec![NEXT.fetch_add(1, Ordering::Relaxed); 16];
    captured.clone().with(0, Value::Bytes(name)).with(3, Value::Number(channels.into()))
}

/// A guest of so much memory that nobody looks at its description.
pub(crate) fn setup_of_size(name: u8, pages: u64) -> Value {
    let region = map([(0, Value::Number(0)), (1, Value::Number(pages))]);
    map([
        (0, Value::Bytes(vec![name; 16])),
        (1, Value::List(vec![region])),
        (2, Value::Bytes(Vec::new())),
        (3, Value::Number(1)),
        (4, Value::Bytes(vec![0; 16])),
    ])
}

/// An attempt whose channels are there: rounds may come.
pub(crate) struct Attempt {
    pub(crate) control: Peer,
    pub(crate) channels: Vec<Peer>,
    pub(crate) setup_done: Value,
}

impl Attempt {
    pub(crate) fn begin(port: u16, setup: &Value) -> Attempt {
        let mut control = Peer::accepted(port, CONTROL);
        control.say(&message(SETUP, setup)).expect("it reads");
        let setup_done = control.expect(SETUP_DONE);
        let token = setup_done.field(1).expect("a token").bytes().to_vec();
        let count = u16::try_from(setup.field(3).expect("channels").number()).expect("few");
        let join = |number| {
            let (peer, status) = Peer::greet(port, &hello(DATA, number, &token)).expect("a reply");
            assert_eq!(status, 0);
            peer
        };
        let channels = (0..count).map(join).collect();
        control.expect(CHANNELS_READY);
        Attempt { control, channels, setup_done }
    }

    /// Ends a round on all channels.
    pub(crate) fn end_round(&mut self, round: u32) {
        for channel in &mut self.channels {
            channel.say(&barrier(round)).expect("it reads");
        }
        let received = self.control.expect(ROUND_RECEIVED);
        assert_eq!(received.field(0), Some(&Value::Number(round.into())));
    }

    /// Why the destination gives up.
    pub(crate) fn reason(&mut self) -> String {
        self.control.expect(ABANDON).field(0).expect("a reason").text().to_owned()
    }
}

/// Why a destination refuses a setup.
pub(crate) fn refusal(port: u16, setup: &Value) -> String {
    let mut control = Peer::accepted(port, CONTROL);
    control.say(&message(SETUP, setup)).expect("it reads");
    control.expect(ABANDON).field(0).expect("a reason").text().to_owned()
}
