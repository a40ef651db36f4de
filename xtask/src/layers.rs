//! A folder is a zone, and dependencies go down only.

use serde_json::Value;
use std::collections::HashMap;

/// Zones from the top to the bottom. A crate may depend on its own zone and those below, but see
/// [`SIBLINGS_APART`] and [`SIDEWAYS_FORBIDDEN`].
const ZONES: [&str; 10] =
    ["examples", "tests", "apps", "sim", "vmm", "migration", "drivers", "models", "abi", "base"];

/// Zones whose crates must not know each other: a driver or a model stands alone.
const SIBLINGS_APART: [&str; 2] = ["drivers", "models"];

/// Crates that stand under their siblings: what all models are made with, and the interface that
/// providers of verbs have in common.
const GROUND: [&str; 3] = ["martlet-fault-plan", "martlet-soft-bus", "martlet-verbs"];

/// A zone and one below it that it must not name all the same, but in dev-dependencies. Drivers
/// never know models, and models never know drivers: only the binary interface joins them.
const SIDEWAYS_FORBIDDEN: [(&str, &str); 1] = [("drivers", "models")];

/// All that an example may name of this project: it stands for who uses the library.
const LIBRARY: (&str, &str) = ("examples", "martlet-engine");

/// Crates outside the order: they build and check the others.
const OUTSIDE: [&str; 1] = ["xtask"];

/// Reads `cargo metadata` and the sources of what does no I/O: fails on an arrow that goes up, and on
/// a thread, a socket or a clock where there must be none.
pub(crate) fn check() -> Result<(), String> {
    let mut wrong = wrong_arrows(&crate::metadata()?)?;
    let names = crate::tracked()?;
    wrong.extend(crate::sans_io::check(&crate::root(), names.split('\0')));
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n       ")) }
}

fn wrong_arrows(metadata: &Value) -> Result<Vec<String>, String> {
    let root = metadata["workspace_root"].as_str().ok_or("cargo metadata names no root")?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata names no packages")?;
    let mut zones = HashMap::new();
    for package in packages {
        let name = package["name"].as_str().ok_or("a package has no name")?;
        let manifest = package["manifest_path"].as_str().ok_or("a package has no manifest")?;
        let zone = manifest
            .strip_prefix(root)
            .and_then(|path| path.trim_start_matches('/').split('/').next())
            .ok_or_else(|| format!("{name} lies outside the workspace"))?;
        zones.insert(name, zone);
    }
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let from = zones[name];
        if OUTSIDE.contains(&from) {
            continue;
        }
        let depth =
            rank(from).ok_or_else(|| format!("{name} lies in `{from}`, which is no zone"))?;
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let Some(to) = zones.get(target) else { continue };
            let dev = dependency["kind"].as_str() == Some("dev");
            let up = rank(to).is_none_or(|to| to < depth);
            let sideways = !dev
                && ((from == *to && SIBLINGS_APART.contains(&from) && !GROUND.contains(&target))
                    || (from == LIBRARY.0 && target != LIBRARY.1)
                    || SIDEWAYS_FORBIDDEN.contains(&(from, to)));
            if up || sideways {
                wrong.push(format!("{name} ({from}) must not depend on {target} ({to})"));
            }
        }
    }
    Ok(wrong)
}

fn rank(zone: &str) -> Option<usize> {
    ZONES.iter().position(|known| *known == zone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn arrows(dependencies: &[(&str, &str, Option<&str>)]) -> Vec<String> {
        let folders = [
            "base/low",
            "drivers/one",
            "drivers/two",
            "models/toy",
            "migration/martlet-engine",
            "apps/top",
            "examples/user",
        ];
        let packages: Vec<Value> = folders
            .iter()
            .map(|folder| {
                let name = folder.rsplit('/').next().unwrap();
                let list: Vec<Value> = dependencies
                    .iter()
                    .filter(|(from, ..)| *from == name)
                    .map(|(_, to, kind)| json!({"name": to, "kind": kind}))
                    .collect();
                json!({"name": name, "manifest_path": format!("/w/{folder}/Cargo.toml"),
                       "dependencies": list})
            })
            .collect();
        wrong_arrows(&json!({"workspace_root": "/w", "packages": packages})).unwrap()
    }

    #[test]
    fn arrows_go_down_only() {
        assert!(
            arrows(&[("top", "one", None), ("one", "low", None), ("top", "serde", None)])
                .is_empty()
        );
        assert_eq!(arrows(&[("low", "top", None)]), ["low (base) must not depend on top (apps)"]);
    }

    #[test]
    fn an_example_knows_the_library_only() {
        assert!(arrows(&[("user", "martlet-engine", None), ("user", "serde", None)]).is_empty());
        assert_eq!(arrows(&[("user", "low", None)]).len(), 1);
    }

    #[test]
    fn drivers_stand_alone() {
        assert_eq!(arrows(&[("one", "two", None)]).len(), 1);
        assert_eq!(arrows(&[("one", "toy", None)]).len(), 1);
        assert!(arrows(&[("one", "toy", Some("dev"))]).is_empty());
    }
}
