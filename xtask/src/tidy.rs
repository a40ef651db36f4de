//! House rules that rustfmt and clippy do not know.

use std::fs;
use std::path::{Path, PathBuf};

/// A file longer than this has more than one subject.
const FILE_LINES_MAX: usize = 800;

/// Who may make the right to run a guest out of nothing: the boot of a new guest, once. Everybody
/// else gets it from a commit. Tests and the simulated world boot guests of their own.
const BOOT: &str = "vmm/machine/src/machine.rs";
const EXAMPLES: [&str; 2] =
    ["examples/stranger/src/vm.rs", "migration/engine/examples/in_memory.rs"];
const MAKER: &str = "migration/protocol/src/permit.rs";
/// Who may take a person's word for it that the destination of an undecided attempt is gone.
const OPERATOR: &str = "apps/martlet/src/control/outgoing.rs";

/// Checks every file that git tracks.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let names = crate::tracked()?;
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
    wrong.extend(permit_complaint(name, text));
    wrong.extend(override_complaint(name, text));
    for (index, line) in text.lines().enumerate() {
        let marker = concat!("TO", "DO");
        if line.contains(marker) {
            wrong.push(format!("{name}:{}: {marker}s belong in an issue", index + 1));
        }
    }
    wrong
}

fn permit_complaint(name: &str, text: &str) -> Option<String> {
    let made = text.matches(concat!("for_new", "_guest")).count();
    let allowed = match name {
        BOOT => 1,
        _ if EXAMPLES.contains(&name) => 1,
        _ if name == MAKER || is_test(name) => usize::MAX,
        _ => 0,
    };
    (made > allowed).then(|| {
        format!("{name}: makes the right to run a guest, which only {BOOT} does, once, at a boot")
    })
}

fn override_complaint(name: &str, text: &str) -> Option<String> {
    let taken = text.matches(concat!("given_by", "_a_person")).count();
    let allowed = match name {
        OPERATOR => 1,
        _ if name == MAKER || is_test(name) => usize::MAX,
        _ => 0,
    };
    (taken > allowed).then(|| {
        format!("{name}: takes a person's word on a guest, which only {OPERATOR} does, once")
    })
}

/// Tests, and the simulated world, which is one.
fn is_test(name: &str) -> bool {
    name.contains("/tests/") || name.ends_with("tests.rs") || name.starts_with("sim/world/")
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

    #[test]
    fn only_one_command_takes_a_persons_word() {
        let once = concat!("OperatorsWord::given_by", "_a_person()");
        assert!(complaints(OPERATOR, once).is_empty());
        assert_eq!(complaints(OPERATOR, &format!("{once}; {once}")).len(), 1);
        assert_eq!(complaints("migration/engine/src/source/driver.rs", once).len(), 1);
    }

    #[test]
    fn only_a_boot_makes_a_permit() {
        let once = concat!("RunPermit::for_new", "_guest()");
        let twice = format!("{once}; {once}");
        for name in [BOOT, MAKER, "migration/engine/tests/fake/mod.rs", "sim/world/src/machine.rs"]
        {
            assert!(complaints(name, once).is_empty(), "{name}");
        }
        for name in ["vmm/machine/src/source.rs", "apps/martlet/src/main.rs"] {
            assert_eq!(complaints(name, once).len(), 1, "{name}");
        }
        assert_eq!(complaints(BOOT, &twice).len(), 1);
    }
}
