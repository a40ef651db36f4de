//! Maps for tests.
#![allow(unsafe_code)]
// UNSAFETY: memory is named by addresses that nothing lies at, and nothing here looks there.

use martlet_vdpa::{Access, HostMemory, Iova, MapRun};
use proptest::prelude::*;
use std::sync::Arc;

pub(crate) const PAGE: u64 = 4096;

/// Memory that is only a name; each call has an owner of its own.
pub(crate) fn fake_memory(address: u64, bytes: u64) -> HostMemory {
    // SAFETY: nobody here reads or writes by the name.
    unsafe { HostMemory::new(address, bytes, Arc::new([0_u8; 1])) }
}

/// The run of `pages` pages at page `iova`, with the memory's pages from `offset`.
pub(crate) fn run(
    iova: u64,
    memory: &HostMemory,
    offset: u64,
    pages: u64,
    access: Access,
) -> MapRun {
    let memory = memory.slice(offset * PAGE, pages * PAGE).unwrap();
    MapRun { iova: Iova(iova * PAGE), memory, access }
}

/// A map that was made up.
#[derive(Clone, Debug)]
pub(crate) struct AnyMap {
    pub(crate) runs: Vec<MapRun>,
}

impl AnyMap {
    /// Each page: where the guest has it, where it is, what is allowed.
    pub(crate) fn pages(&self) -> Vec<(u64, u64, Access)> {
        let pages = |run: &MapRun| {
            let (iova, address, access) = (run.iova.0, run.memory.address(), run.access);
            (0..run.memory.bytes() / PAGE)
                .map(move |page| (iova + page * PAGE, address + page * PAGE, access))
        };
        self.runs.iter().flat_map(pages).collect()
    }
}

pub(crate) fn any_access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::ReadWrite), Just(Access::Read), Just(Access::Write)]
}

/// Runs of up to 40 pages with holes of up to 3, often none, somewhere in 2^20 pages of memory.
pub(crate) fn any_map() -> impl Strategy<Value = AnyMap> {
    let one = (0_u64..6, 1_u64..40, 0_u64..1 << 20, any_access());
    proptest::collection::vec(one, 1..12).prop_map(|list| {
        let memory = fake_memory(1 << 30, (1 << 21) * PAGE);
        let mut at = 0;
        let mut runs = Vec::new();
        for (hole, pages, offset, access) in list {
            at += hole.saturating_sub(2);
            runs.push(run(at, &memory, offset, pages, access));
            at += pages;
        }
        AnyMap { runs }
    })
}
