//! What the users of a library see, one line an item, in a file that is checked in: whoever changes
//! the interface changes a file that a review reads.
//!
//! Read from the sources (rustdoc's own description needs a nightly compiler), so it knows what is
//! written and not what macros make. Derived traits count, blanket and automatic ones don't. An
//! `impl` belongs to the public type of its name, wherever in the crate it stands.

mod source;
mod text;

use source::{Crate, Found};
use std::fs;
use std::path::Path;
use syn::{Item, Visibility};

/// The libraries whose interface is watched: the folder, and how users call it.
const WATCHED: [(&str, &str); 1] = [("migration/engine", "martlet_engine")];

/// The listing, in the library's folder.
const LISTING: &str = "api.txt";

/// Fails if a listing is not that of the sources.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    for (folder, name) in WATCHED {
        let written = fs::read_to_string(root.join(folder).join(LISTING)).unwrap_or_default();
        let found = listing(&root.join(folder), name)?;
        if written != found {
            return Err(format!(
                "{folder}/{LISTING} is not the interface of today{}\n       \
                 cargo xtask api --write writes it anew",
                first_difference(&written, &found)
            ));
        }
    }
    Ok(())
}

/// Writes the listings.
pub(crate) fn write(root: &Path) -> Result<(), String> {
    for (folder, name) in WATCHED {
        let path = root.join(folder).join(LISTING);
        fs::write(&path, listing(&root.join(folder), name)?)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(())
}

fn first_difference(written: &str, found: &str) -> String {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (written, found) = (lines(written), lines(found));
    let gone = written.iter().find(|line| !found.contains(line) && !line.starts_with('#'));
    let new = found.iter().find(|line| !written.contains(line) && !line.starts_with('#'));
    let say = |what: &str, line: Option<&String>| {
        line.map_or(String::new(), |line| format!("\n       {what}: {line}"))
    };
    say("gone", gone) + &say("new", new)
}

fn listing(folder: &Path, name: &str) -> Result<String, String> {
    let read = Crate::read(&folder.join("src/lib.rs"))?;
    let mut lines = Vec::new();
    module(&read, &[], name, &mut lines)?;
    lines.sort();
    lines.dedup();
    let items = lines.iter().filter(|line| !line.starts_with("impl ")).count();
    Ok(format!("# {name}: {items} public items\n{}\n", lines.join("\n")))
}

/// What a public module shows.
fn module(read: &Crate, at: &[String], path: &str, lines: &mut Vec<String>) -> Result<(), String> {
    for item in read.items(at) {
        match item {
            Item::Mod(inner) if is_public(&inner.vis) => {
                let name = inner.ident.to_string();
                lines.push(format!("mod {path}::{name}"));
                let at = [at, std::slice::from_ref(&name)].concat();
                module(read, &at, &format!("{path}::{name}"), lines)?;
            }
            Item::Use(import) if is_public(&import.vis) => {
                for (from, name) in source::imports(&import.tree) {
                    match read.find(at, &from) {
                        Found::Item(item) => text::item(read, item, path, &name, lines),
                        Found::Module(inner) => {
                            module(read, &inner, &format!("{path}::{name}"), lines)?
                        }
                        Found::Elsewhere => {
                            lines.push(format!("use {path}::{name} = {}", from.join("::")));
                        }
                        Found::Nowhere => {
                            return Err(format!("{path}: nothing is at {}", from.join("::")));
                        }
                    }
                }
            }
            item => {
                if let Some((name, visibility)) = source::name(item)
                    && is_public(visibility)
                {
                    text::item(read, item, path, &name, lines);
                }
            }
        }
    }
    Ok(())
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_has_what_users_see_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("martlet-api-{}", std::process::id()));
        fs::create_dir_all(folder.join("src")).expect("a folder");
        let lib = "mod inner;\npub use inner::{Shape, grow as widen};\npub use other_crate::Thing;\n\
                   pub const MOST: u32 = 3;\nfn hidden() {}\n#[cfg(test)]\npub mod tests {}\n";
        let inner = "#[derive(Clone)]\npub struct Shape<T> { pub side: Option<T>, area: u8 }\n\
                     impl<T> Shape<T> { pub fn new(side: &'static T) -> Shape<T> { todo() }\n\
                     fn secret(&self) {} }\nimpl<T> Drop for Shape<T> { fn drop(&mut self) {} }\n\
                     pub fn grow(by: u8) -> u8 { by }\npub fn unseen() {}\n";
        fs::write(folder.join("src/lib.rs"), lib).expect("written");
        fs::write(folder.join("src/inner.rs"), inner).expect("written");
        let found = listing(&folder, "shapes");
        let _ = fs::remove_dir_all(&folder);
        let expected = "\
# shapes: 6 public items
const shapes::MOST: u32
field shapes::Shape::side: Option<T>
fn shapes::Shape::new(side: &'static T) -> Shape<T>
fn shapes::widen(by: u8) -> u8
impl Clone for shapes::Shape
impl Drop for shapes::Shape
struct shapes::Shape<T>
use shapes::Thing = other_crate::Thing
";
        assert_eq!(found.expect("it reads"), expected);
    }
}
