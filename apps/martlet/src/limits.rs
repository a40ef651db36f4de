//! Limits that the host sets to this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the number of files that may be open to what the host allows at most. The lower default
/// is there for programs that use select(2).
pub(crate) fn raise_descriptors() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // Without it the process works on under the lower limit.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
