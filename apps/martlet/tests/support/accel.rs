//! What executes the guests of the tests.

use martlet_test_host::Want;
use std::fs::File;

/// Lets a destination take a guest on threads over TCP from a process of the same user.
pub(crate) const THREADS_BY_TCP: (&str, &str) = ("MARTLET_THREADS_BY_TCP", "1");

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
