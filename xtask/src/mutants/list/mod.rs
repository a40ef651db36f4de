//! The mutations: a fault, and the test that must fail for it. The text is as the file has it, and
//! is there once. Of several tests that fail, the one that is named is the cheapest.

mod handover;
mod pages;
mod peers;

use super::{Mutation, Test};

/// All of them.
pub(super) fn all() -> impl Iterator<Item = &'static Mutation> {
    [handover::MUTATIONS, pages::MUTATIONS, peers::MUTATIONS].into_iter().flatten()
}
