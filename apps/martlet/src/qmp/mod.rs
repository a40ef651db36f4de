//! QMP, QEMU's machine protocol: a stream of JSON objects over the control socket. As QEMU's
//! docs/interop/qmp-spec has it, with QEMU's names where QEMU has them; what is ours begins with
//! `x-`. A difference: strings take double quotes only.

pub(crate) mod clients;
mod dispatch;
pub(crate) mod events;
pub(crate) mod schema;
pub(crate) mod server;
#[cfg(test)]
mod server_tests;
