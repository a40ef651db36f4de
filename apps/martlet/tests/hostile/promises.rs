//! What a destination has promised to a source is not taken from it by others.

use crate::Destination;
use crate::attempt::{Attempt, captured_setup, refusal, setup_of, setup_of_size};
use crate::wire::{
    ABANDONED, ANSWER, COMMIT, COMMIT_REFUSED, Peer, QUERY, QUERY_FATE, SWITCHOVER_SOON, Value,
    map, message,
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

/// The host's boot id was what kept strangers from sending code.
#[test]
fn no_secret_goes_to_a_peer() {
    let destination = Destination::new(&[]);
    let setup = captured_setup(&[]);
    let attempt = Attempt::begin(destination.port, &setup_of(&setup, 1));
    let nothing = Some(Value::Bytes(vec![0; 16]));
    assert_eq!((setup.field(4), attempt.setup_done.field(2)), (nothing.as_ref(), nothing.as_ref()));
}
