//! The connection beside RDMA queue pairs: any number of messages, or a queue pair's hello.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| martlet_wire::fuzz::rdma(data));
