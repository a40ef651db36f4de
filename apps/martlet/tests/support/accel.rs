//! What executes the guests of the tests.

use std::fs::File;

/// By this all processes of the tests know each other, where there is no KVM.
pub(crate) const THREADS_KEY: &str = "a key of the tests";

/// What executes the guest, for a command that does not say: a destination takes a guest on threads
/// only if it is told to.
pub(crate) fn accel(arguments: &[&str]) -> &'static [&'static str] {
    let has_kvm = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if has_kvm || arguments.contains(&"--accel") { &[] } else { &["--accel", "threads"] }
}
