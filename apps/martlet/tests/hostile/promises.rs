//! What a destination has promised to a source is not taken from it by others.

use crate::Destination;
use crate::attempt::{Attempt, captured_setup, captured_state, refusal, setup_of, setup_of_size};
use crate::wire::{
    ABANDONED, ANSWER, COMMIT, COMMIT_REFUSED, FINAL_STATE, PING, PONG, Peer, QUERY, QUERY_FATE,
    REHEARSE, SWITCHOVER_SOON, Value, map, message,
};

#[test]
fn attempts_of_others_push_no_refused_commit_out() {
    let destination = Destination::new(&[]);
    let setup = setup_of(&captured_setup(&[]), 1);
    let name = setup.field(0).unwrap().clone();
    let mut attempt = Attempt::begin(destination.port, &setup);
    attempt.end_round(0);
    let soon = map([(0, Value::Number(1))]);
    let commit = map([(0, name.clone()), (1, Value::Number(1)), (2, Value::Bool(true))]);
    attempt.control.say(&message(SWITCHOVER_SOON, &soon)).unwrap();
    attempt.control.say(&message(COMMIT, &commit)).unwrap();
    attempt.control.expect(COMMIT_REFUSED);
    for other in 100..200 {
        refusal(destination.port, &setup_of_size(other, (1 << 40) - 1));
    }
    let mut asker = Peer::accepted(destination.port, QUERY);
    asker.say(&message(QUERY_FATE, &map([(0, name)]))).unwrap();
    assert_eq!(asker.expect(ANSWER).field(1), Some(&Value::Number(ABANDONED)));
}

/// The last pages never come. The owner ends the destination, and the source gets its guest back.
#[test]
fn a_destination_that_is_ended_gives_a_commit_back_first() {
    let mut destination = Destination::new(&[]);
    let (captured, state) = captured_state();
    let setup = setup_of(&captured, 1);
    let name = setup.field(0).unwrap().clone();
    let mut attempt = Attempt::begin(destination.port, &setup);
    attempt.end_round(0);
    let soon = map([(0, Value::Number(1))]);
    let commit = map([(0, name), (1, Value::Number(1)), (2, Value::Bool(true))]);
    let ping = map([(0, Value::Number(7))]);
    for (kind, body) in
        [(SWITCHOVER_SOON, &soon), (FINAL_STATE, &state), (COMMIT, &commit), (PING, &ping)]
    {
        attempt.control.say(&message(kind, body)).unwrap();
    }
    // The commit is read before the ping that came behind it.
    let (kind, pong) = attempt.control.hear().unwrap();
    assert_eq!((kind, pong.field(0)), (PONG, Some(&Value::Number(7))), "{pong:?}");
    destination.process.ask("quit").unwrap();
    let refused = attempt.control.expect(COMMIT_REFUSED);
    let reason = refused.field(0).unwrap().text();
    assert!(reason.contains("told to stop"), "{reason}");
    destination.process.ended().unwrap();
}

/// A state that was damaged on its way is not loaded.
#[test]
fn a_damaged_state_is_refused() {
    let destination = Destination::new(&[]);
    let (captured, state) = captured_state();
    let mut attempt = Attempt::begin(destination.port, &setup_of(&captured, 1));
    attempt.end_round(0);
    let mut bytes = message(REHEARSE, &state);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    attempt.control.say(&bytes).unwrap();
    let reason = attempt.reason();
    assert!(reason.contains("damaged on the way"), "{reason}");
}

/// The host's boot id was what kept others from sending code.
#[test]
fn no_secret_goes_to_a_peer() {
    let destination = Destination::new(&[]);
    let setup = captured_setup(&[]);
    let attempt = Attempt::begin(destination.port, &setup_of(&setup, 1));
    let nothing = Some(Value::Bytes(vec![0; 16]));
    assert_eq!((setup.field(4), attempt.setup_done.field(2)), (nothing.as_ref(), nothing.as_ref()));
}
