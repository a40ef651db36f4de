//! The registry with a firmware that keeps books, and the port on a real command queue.
#![allow(clippy::unwrap_used, reason = "tests")]

mod keys;
mod maps;
mod port;
mod support;
