//! House rules that rustfmt and clippy do not know.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file longer than this has more than one subject.
const FILE_LINES_MAX: usize = 800;

/// Checks every file that git tracks.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("git does not start: {error}"))?;
    let names = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut wrong = Vec::new();
    for name in names.split('\0').filter(|name| name.ends_with(".rs")) {
        let path: PathBuf = root.join(name);
        let Ok(text) = fs::read_to_string(&path) else { continue };
        wrong.extend(complaints(name, &text));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n       ")) }
}

fn complaints(name: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        wrong.push(format!("{name}: {lines} lines, at most {FILE_LINES_MAX}: split it"));
    }
    // Split so that this file passes its own check.
    let opt_in = concat!("allow(unsafe", "_code)");
    let reason = concat!("// UNSAF", "ETY:");
    if text.contains(opt_in) && !text.contains(reason) {
        wrong.push(format!("{name}: opts in to unsafe code without an UNSAFETY comment"));
    }
    for (index, line) in text.lines().enumerate() {
        let marker = concat!("TO", "DO");
        if line.contains(marker) {
            wrong.push(format!("{name}:{}: {marker}s belong in an issue", index + 1));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_needs_a_reason() {
        let opted = concat!("#![allow(unsafe", "_code)]\n");
        assert_eq!(complaints("a.rs", opted).len(), 1);
        let explained = format!("{opted}// {}: because\n", concat!("UNSAF", "ETY"));
        assert!(complaints("a.rs", &explained).is_empty());
        assert_eq!(complaints("a.rs", &"\n".repeat(FILE_LINES_MAX + 1)).len(), 1);
    }
}
