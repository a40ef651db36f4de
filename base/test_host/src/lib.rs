//! What tests want of their host, and what they do where it has not that.
//!
//! A test that can't run says why and passes: not every host has KVM. On a host that is there to
//! run it, that would hide a test for ever, so `MARTLET_REQUIRE=kvm,dirty-ring` turns it into a failure.

use std::fmt::Display;

/// Lists what the host must have, by [`Want::name`], with commas between.
pub const REQUIRE: &str = "MARTLET_REQUIRE";

/// Something that not every host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// `/dev/kvm`.
    Kvm,
    /// KVM's ring of dirty pages.
    DirtyRing,
    /// KVM's own clock for guests.
    KvmClock,
    /// A KVM that tells guests which interrupts have ended (MSR_KVM_PV_EOI_EN).
    KvmEndOfInterrupt,
    /// A KVM that tells guests which pages are not there (MSR_KVM_ASYNC_PF_EN), and the right to
    /// take one away.
    KvmPageFaults,
    /// A KVM that runs every guest and emulates none of them.
    RealMode,
    /// `PAGEMAP_SCAN` with write protection (Linux 6.7).
    PagemapScan,
    /// `UFFDIO_POISON` (Linux 6.6).
    UffdPoison,
    /// Time namespaces, and the right to make one.
    TimeNamespace,
    /// A C compiler and `linux/idxd.h`.
    IdxdHeader,
    /// A C compiler and the headers of rdma-core.
    VerbsHeaders,
    /// A processor without ENQCMD.
    NoEnqcmd,
}

impl Want {
    const ALL: [Want; 12] = [
        Want::Kvm,
        Want::DirtyRing,
        Want::KvmClock,
        Want::KvmEndOfInterrupt,
        Want::KvmPageFaults,
        Want::RealMode,
        Want::PagemapScan,
        Want::UffdPoison,
        Want::TimeNamespace,
        Want::IdxdHeader,
        Want::VerbsHeaders,
        Want::NoEnqcmd,
    ];

    /// Its name in [`REQUIRE`].
    pub fn name(self) -> &'static str {
        match self {
            Want::Kvm => "kvm",
            Want::DirtyRing => "dirty-ring",
            Want::KvmClock => "kvm-clock",
            Want::KvmEndOfInterrupt => "kvm-end-of-interrupt",
            Want::KvmPageFaults => "kvm-page-faults",
            Want::RealMode => "real-mode",
            Want::PagemapScan => "pagemap-scan",
            Want::UffdPoison => "uffd-poison",
            Want::TimeNamespace => "time-namespace",
            Want::IdxdHeader => "idxd-header",
            Want::VerbsHeaders => "verbs-headers",
            Want::NoEnqcmd => "no-enqcmd",
        }
    }

    /// Whether a test that wants it can run, by what looking for it gave; says so if not.
    ///
    /// # Panics
    ///
    /// It is not there, and [`REQUIRE`] lists it; or that lists what nobody knows.
    #[track_caller]
    pub fn found<E: Display>(self, looked: &Result<(), E>) -> bool {
        let required = std::env::var(REQUIRE).unwrap_or_default();
        match self.missing(looked, &required) {
            Ok(None) => true,
            Ok(Some(skipped)) => {
                println!("{skipped}");
                false
            }
            Err(failure) => panic!("{failure}"),
        }
    }

    /// As [`Want::found`], of what looking for it gave a value.
    ///
    /// # Panics
    ///
    /// As [`Want::found`].
    #[track_caller]
    pub fn take<T, E: Display>(self, looked: Result<T, E>) -> Option<T> {
        match looked {
            Ok(value) => Some(value),
            Err(error) => {
                let _ = self.found(&Err(error));
                None
            }
        }
    }

    fn missing<E: Display>(
        self,
        looked: &Result<(), E>,
        required: &str,
    ) -> Result<Option<String>, String> {
        let required: Vec<&str> = required.split(',').filter(|name| !name.is_empty()).collect();
        let is_known = |name: &&&str| Want::ALL.iter().any(|want| want.name() == **name);
        if let Some(unknown) = required.iter().find(|name| !is_known(name)) {
            let all = Want::ALL.map(Want::name).join(", ");
            return Err(format!("{REQUIRE} lists {unknown}, which is none of {all}"));
        }
        match looked {
            Ok(()) => Ok(None),
            Err(why) if required.contains(&self.name()) => {
                Err(format!("{REQUIRE} lists {}, which is not here: {why}", self.name()))
            }
            Err(why) => Ok(Some(format!("skipped, for want of {}: {why}", self.name()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_required_is_not_skipped() {
        let (here, gone) = (Ok::<(), &str>(()), Err("no such file"));
        assert_eq!(Want::Kvm.missing(&here, "kvm"), Ok(None));
        let skipped = "skipped, for want of kvm: no such file".to_owned();
        assert_eq!(Want::Kvm.missing(&gone, ""), Ok(Some(skipped.clone())));
        assert_eq!(Want::Kvm.missing(&gone, "dirty-ring"), Ok(Some(skipped)));
        let failure = Want::Kvm.missing(&gone, "dirty-ring,kvm").expect_err("it is required");
        assert_eq!(failure, "MARTLET_REQUIRE lists kvm, which is not here: no such file");
        let slip = Want::Kvm.missing(&here, "kmv").expect_err("no such thing");
        assert!(slip.starts_with("MARTLET_REQUIRE lists kmv, which is none of kvm, "), "{slip}");
    }
}
