//! What executes the guests of the tests.

use martlet_test_host::Want;
use std::fs::File;

/// By this all processes of the tests know each other, where there is no KVM.
pub(crate) const THREADS_KEY: &str = "a key of the tests";

/// What executes the guest, for a command that does not say: a destination takes a guest on threads
/// only if it is told to.
pub(crate) fn accel(arguments: &[&str]) -> &'static [&'static str] {
    let kvm = File::options().read(true).write(true).open("/dev/kvm").map(drop);
    if arguments.contains(&"--accel") || Want::Kvm.found(&kvm) {
        &[]
    } else {
        &["--accel", "threads"]
    }
}
