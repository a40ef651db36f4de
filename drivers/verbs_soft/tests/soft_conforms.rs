//! The conformance suite over the soft provider.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_verbs::Endpoint;
use martlet_verbs::conformance::{Loopback, Profile, run};
use martlet_verbs_soft::Soft;

fn conforms(at: Endpoint) {
    let site = Loopback { source: Soft::new(), target: Soft::new(), at };
    let mut wrong = Vec::new();
    run(&site, &Profile::default(), "", |name, outcome| match outcome {
        Ok(note) => println!("ok    {name}: {note}"),
        Err(violation) => wrong.push(format!("{name}: {violation}")),
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn over_tcp() {
    conforms(Endpoint::Ip("127.0.0.1:0".parse().unwrap()));
}

#[test]
fn over_a_unix_socket() {
    let path = std::env::temp_dir().join(format!("martlet-verbs-{}.sock", std::process::id()));
    conforms(Endpoint::Unix(path));
}
