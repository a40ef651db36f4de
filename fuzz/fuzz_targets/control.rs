//! The control connection: any number of frames.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| martlet_wire::fuzz::control(data));
