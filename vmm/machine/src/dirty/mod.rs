//! Dirty tracking beside that of KVM: what devices wrote, and what threads wrote.

mod devices;
pub(crate) mod pagemap;

pub(crate) use devices::NicPages;
