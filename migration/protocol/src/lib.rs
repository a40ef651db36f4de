//! The migration protocol without sockets, threads or clock: two state machines and the permit.

mod permit;

pub use permit::RunPermit;
