//! vCPUs: one thread each, ordered about together.

pub(crate) mod backend;
