//! The modelled NIC keeps every promise of the verbs interface: the same suite runs on it as on
//! libibverbs and on the soft provider. So what is proved on the model is proved on what the
//! drivers use.

mod model_fabric;

use martlet_verbs::conformance::{Loopback, Profile, run};
use martlet_verbs::{Endpoint, Setup};
use model_fabric::ModelFabric;

#[test]
fn the_model_is_a_provider_like_the_others() {
    let (source, target) = ModelFabric::two();
    let at = Endpoint::Ip(([0, 0, 0, 0], 0).into());
    let site = Loopback { source, target, at };
    let slots = usize::try_from(Setup::default().send_slots).unwrap_or(0);
    assert!(slots > 32, "the backlog fits");
    let profile = Profile { backlog_bytes: 1 << 20, trials: 4, ..Profile::default() };
    let mut cases = 0;
    let failed = run(&site, &profile, "", |name, outcome| {
        cases += 1;
        match outcome {
            Ok(note) => println!("ok      {name} {note}"),
            Err(violation) => println!("FAILED  {name}: {violation}"),
        }
    });
    assert_eq!(failed, 0, "of {cases} cases");
    assert!(cases >= 24, "the suite has {cases} cases");
}
