//! The project's own checks: `cargo xtask check`.

mod api;
mod layers;
mod metal;
mod mutants;
mod package;
mod peers;
mod sans_io;
mod tidy;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

const USAGE: &str =
    "usage: cargo xtask check | fmt | clippy | layers | tidy | api | package | mutants | worlds |
                    peers | metal

  check    everything below, in order
  fmt      rustfmt, without changing a file
  clippy   all targets, warnings are errors
  layers   no crate depends on a zone above its own, and what must not do I/O does none
  tidy     house rules that no other tool knows
  api      the interface of the engine is the one that is written down; --write writes it

  package  packages what is meant for publication; that it can be is a part of check
  mutants  puts faults into a copy of the sources and wants a test to fail for each; see --help
  worlds   plays what ships in simulated worlds: --seeds A..B at random, --sweep N thoroughly
  peers    moves one guest with QEMU and with martlet and compares; see cargo xtask peers --help
  metal    runs programs over real kernel parts in an emulated PC; see cargo xtask metal --help";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["check"] => fmt()
            .and_then(|()| layers::check())
            .and_then(|()| tidy::check(&root()))
            .and_then(|()| api::check(&root()))
            .and_then(|()| package::check())
            .and_then(|()| clippy()),
        ["fmt"] => fmt(),
        ["clippy"] => clippy(),
        ["layers"] => layers::check(),
        ["tidy"] => tidy::check(&root()),
        ["api"] => api::check(&root()),
        ["api", "--write"] => api::write(&root()),
        ["--help"] => {
            println!("{USAGE}");
            Ok(())
        }
        ["package", "--help"] => {
            println!("{}", package::USAGE);
            Ok(())
        }
        ["package", options @ ..] => package::run(options),
        ["mutants", "--help"] => {
            println!("{}", mutants::USAGE);
            Ok(())
        }
        ["mutants", options @ ..] => mutants::run(options),
        ["worlds", options @ ..] => worlds(options),
        ["peers", "--help"] => {
            println!("{}", peers::USAGE);
            Ok(())
        }
        ["peers", options @ ..] => peers::run(options),
        ["metal", "--help"] => {
            println!("{}", metal::USAGE);
            Ok(())
        }
        ["metal", options @ ..] => metal::run(options),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn fmt() -> Result<(), String> {
    cargo(&["fmt", "--all", "--", "--check"])
}

fn clippy() -> Result<(), String> {
    cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    // What the command's default features always have, others leave out.
    let without = ["clippy", "-p", "martlet-machine", "--lib", "--no-default-features"];
    cargo(&[&without[..], &["--", "-D", "warnings"]].concat())
}

fn worlds(options: &[&str]) -> Result<(), String> {
    let mut arguments = vec!["run", "--quiet", "--release", "-p", "martlet-world"];
    arguments.extend(["--example", "worlds", "--"]);
    arguments.extend(options);
    cargo(&arguments)
}

/// Runs cargo in the workspace's root.
fn cargo(arguments: &[&str]) -> Result<(), String> {
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(root())
        .status()
        .map_err(|error| format!("cargo does not start: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {} failed", arguments[0])) }
}

/// What cargo knows of this workspace's crates.
fn metadata() -> Result<serde_json::Value, String> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root())
        .output()
        .map_err(|error| format!("cargo metadata does not start: {error}"))?;
    serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata printed no JSON: {error}"))
}

/// The names of all files that git tracks, each with a zero byte behind it.
fn tracked() -> Result<String, String> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()
        .map_err(|error| format!("git does not start: {error}"))?;
    Ok(String::from_utf8_lossy(&listed.stdout).into_owned())
}

/// The workspace's root: this crate lies one folder below it.
fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}
