//! Many migrating VMs that share accelerators, in virtual time.
//!
//! Two questions about finding zero pages with Intel DSA while guests migrate. What did QEMU's
//! series measure, and what do martlet's changes do to it ([`scenarios`], [`changes`])? And what
//! happens when a hundred guests migrate at once on one host ([`table`])? Nobody has measured the
//! second, so it is modelled: threads, processors, memory, network and devices as queues, with
//! constants whose origin is stated (`constants.rs`), and with the policy's real code
//! (`martlet_policy::admission`). `docs/dsa.md` says what came out.
//!
//! All time is virtual, and all chance is of a seed: the same options give the same figures.
#![forbid(unsafe_code)]

mod channel;
mod clock;
mod constants;
mod device;
mod host;
mod lane;
mod picture;
mod report;
mod scenario;
mod sharing;

pub use host::{Cell, Measured, simulate};
pub use picture::picture;
pub use report::{
    Change, DEVICES_MAX, LANES_MAX, Options, Report, Row, ScenarioCpu, Scenarios, changes,
    scenarios, table,
};
pub use scenario::{Plan, Run, Scenario, run};
