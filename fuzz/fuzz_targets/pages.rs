//! A data channel: any number of frames, without their payload.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| martlet_wire::fuzz::pages(data));
