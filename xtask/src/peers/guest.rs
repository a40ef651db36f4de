//! The guest of the comparison: a PVH kernel in a page of assembly and a page of C.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the guest; it is small, so always anew.
pub(super) fn build() -> Result<PathBuf, String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    let elf = super::folder()?.join("guest.elf");
    let script = format!("-Wl,-T,{}", sources.join("guest.ld").display());
    let status = Command::new("cc")
        .args(["-O2", "-ffreestanding", "-fno-stack-protector", "-fno-pic", "-no-pie"])
        .args(["-fno-asynchronous-unwind-tables", "-mno-sse", "-mno-red-zone", "-mcmodel=small"])
        .args(["-nostdlib", "-static", "-Wall", "-Wextra", "-Wl,--build-id=none", &script])
        .arg("-o")
        .arg(&elf)
        .args([sources.join("guest.S"), sources.join("guest.c")])
        .status()
        .map_err(|error| format!("cc does not start: {error}"))?;
    if status.success() { Ok(elf) } else { Err("cc cannot build the guest".to_owned()) }
}

/// The TSC's rate in kHz as the kernel tells it, so that the guest's ticks are true.
pub(super) fn tsc_khz() -> u64 {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("cpu MHz"));
    let mhz = line.and_then(|line| line.split(':').nth(1)?.trim().parse::<f64>().ok());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive rate")]
    mhz.map_or(2_500_000, |mhz| (mhz * 1000.0) as u64)
}
