//! RDMA migration in virtual time: both machines of `migration/rdma` on a modelled NIC.
//!
//! * [`scenario`]: a guest that writes its memory while it is moved, faults, and a checker of the
//!   invariant; everything by one seed. That the checker finds what goes wrong without a drain is
//!   shown by `cargo xtask mutants --only rdma`.
//! * [`series`]: how long a large idle guest's memory takes on a 100 Gbit/s NIC: as RDMA migration
//!   used to work, as it works with many writes in flight, and as martlet does it.
#![forbid(unsafe_code)]

mod checker;
mod guest;
mod joint;
pub mod scenario;
pub mod series;
