//! What the two ends of a soft queue pair say to each other, and how they greet.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| martlet_verbs_soft::fuzz_frames(data));
