//! RDMA migration in virtual time: both machines of `migration/rdma` on a modelled NIC.
//!
//! * [`scenario`]: a guest that writes its memory while it is moved, faults, and a checker of the
//!   invariant; everything by one seed. With [`Unsound`](martlet_rdma::Unsound) the
//!   checker has to find what goes wrong without a drain.
//! * [`series`]: how long a large idle guest's memory takes on a 100 Gbit/s NIC: as RDMA migration
//!   used to work, as it works with many writes in flight, and as martlet does it.
#![forbid(unsafe_code)]

mod checker;
mod guest;
mod joint;
pub mod scenario;
pub mod series;
