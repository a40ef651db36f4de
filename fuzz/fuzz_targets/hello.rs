//! The first bytes of a connection, from whoever connects.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| martlet_wire::fuzz::hello(data));
