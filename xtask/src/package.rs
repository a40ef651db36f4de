//! The crates that are meant for publication: each can be packaged, and says what it is.

use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

pub(crate) const USAGE: &str = "usage: cargo xtask package [--verify]

Packages every crate that is meant for publication, as cargo publish would, into target/package.
--verify builds each from its package alone.";

/// What a package must say of itself, as `cargo metadata` names it.
const SAID: [&str; 4] = ["description", "license", "documentation", "readme"];

/// Files that go with each package.
const FILES: [&str; 3] = ["README.md", "LICENSE-APACHE", "LICENSE-MIT"];

/// Fails on a crate that could not be published, or whose package would lack something.
pub(crate) fn check() -> Result<(), String> {
    let metadata = crate::metadata()?;
    let packages = packages(&metadata)?;
    let published: HashSet<&str> = names(packages, is_published).collect();
    let own: HashSet<&str> = names(packages, |_| true).collect();
    let mut wrong = Vec::new();
    for package in packages.iter().filter(|package| is_published(package)) {
        let name = text(package, "name");
        let lacks = SAID.iter().filter(|field| text(package, field).is_empty());
        wrong.extend(lacks.map(|field| format!("{name} has no {field}")));
        let folder = Path::new(text(package, "manifest_path")).parent().unwrap_or(Path::new(""));
        let lacks = FILES.iter().filter(|file| !folder.join(file).is_file());
        wrong.extend(lacks.map(|file| format!("{name} has no file {file}")));
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        let unpublished = dependencies
            .filter(|it| !published.contains(text(it, "name")) && own.contains(text(it, "name")));
        wrong.extend(unpublished.filter_map(|it| {
            // Cargo leaves out a dev-dependency that is only a path.
            let is_left_out = text(it, "kind") == "dev" && text(it, "req") == "*";
            let on = text(it, "name");
            (!is_left_out).then(|| format!("{name} depends on {on}, which is not published"))
        }));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n       ")) }
}

/// Makes the packages.
pub(crate) fn run(options: &[&str]) -> Result<(), String> {
    let verifies = match options {
        [] => false,
        ["--verify"] => true,
        _ => return Err(format!("unknown option\n{USAGE}")),
    };
    check()?;
    let metadata = crate::metadata()?;
    let published = names(packages(&metadata)?, is_published);
    let mut arguments = vec!["package", "--allow-dirty"];
    if !verifies {
        arguments.push("--no-verify");
    }
    arguments.extend(published.flat_map(|name| ["--package", name]));
    crate::cargo(&arguments)
}

fn packages(metadata: &Value) -> Result<&Vec<Value>, String> {
    metadata["packages"].as_array().ok_or_else(|| "cargo metadata names no packages".to_owned())
}

fn names(packages: &[Value], which: fn(&Value) -> bool) -> impl Iterator<Item = &str> {
    packages.iter().filter(move |package| which(package)).map(|package| text(package, "name"))
}

/// `publish` is null for everywhere, and an empty list for nowhere.
fn is_published(package: &Value) -> bool {
    package["publish"].is_null()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_crate_that_is_published_can_be() {
        super::check().unwrap();
    }
}
