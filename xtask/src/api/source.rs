//! A crate's modules, and what is where in them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, UseTree, Visibility};

/// Names from the crate's root to a module.
type Place = Vec<String>;

/// A crate as its files say.
pub(super) struct Crate {
    modules: HashMap<Place, Vec<Item>>,
}

/// What stands behind a path.
pub(super) enum Found<'a> {
    Item(&'a Item),
    Module(Place),
    /// In another crate.
    Elsewhere,
    Nowhere,
}

impl Crate {
    /// Reads the crate whose root is this file. What is there for tests only is left out.
    pub(super) fn read(root: &Path) -> Result<Crate, String> {
        let mut read = Crate { modules: HashMap::new() };
        let folder = root.parent().unwrap_or(Path::new("."));
        read.file(Vec::new(), root, folder)?;
        Ok(read)
    }

    fn file(&mut self, at: Place, path: &Path, folder: &Path) -> Result<(), String> {
        let say = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = fs::read_to_string(path).map_err(|error| say(&error))?;
        let file = syn::parse_file(&text).map_err(|error| say(&error))?;
        self.module(at, file.items, folder)
    }

    fn module(&mut self, at: Place, items: Vec<Item>, folder: &Path) -> Result<(), String> {
        let items: Vec<Item> = items.into_iter().filter(|item| !is_for_tests(item)).collect();
        for item in &items {
            let Item::Mod(inner) = item else { continue };
            let name = inner.ident.to_string();
            let below = folder.join(&name);
            let at = [&at[..], std::slice::from_ref(&name)].concat();
            match &inner.content {
                Some((_, items)) => self.module(at, items.clone(), &below)?,
                None => {
                    let file = path_of(&inner.attrs, folder)
                        .or_else(|| existing(folder.join(format!("{name}.rs"))))
                        .unwrap_or_else(|| below.join("mod.rs"));
                    self.file(at, &file, &below)?;
                }
            }
        }
        self.modules.insert(at, items);
        Ok(())
    }

    /// The items of a module.
    pub(super) fn items(&self, at: &[String]) -> &[Item] {
        self.modules.get(at).map_or(&[], Vec::as_slice)
    }

    /// All items of all modules.
    pub(super) fn all(&self) -> impl Iterator<Item = &Item> {
        self.modules.values().flatten()
    }

    /// What a path means in a module.
    pub(super) fn find(&self, at: &[String], path: &[String]) -> Found<'_> {
        let Some((first, rest)) = path.split_first() else { return Found::Module(at.to_vec()) };
        match first.as_str() {
            "crate" => return self.find_in(&[], rest),
            "self" => return self.find_in(at, rest),
            "super" => return self.find_in(&at[..at.len().saturating_sub(1)], rest),
            _ => {}
        }
        match self.find_in(at, path) {
            Found::Nowhere => Found::Elsewhere,
            found => found,
        }
    }

    fn find_in(&self, at: &[String], path: &[String]) -> Found<'_> {
        let Some((first, rest)) = path.split_first() else { return Found::Module(at.to_vec()) };
        let below = [at, std::slice::from_ref(first)].concat();
        if self.modules.contains_key(&below) {
            return self.find_in(&below, rest);
        }
        for item in self.items(at) {
            if name(item).is_some_and(|(name, _)| name == *first) && rest.is_empty() {
                return Found::Item(item);
            }
            let Item::Use(import) = item else { continue };
            for (from, name) in imports(&import.tree) {
                if name == *first && from != path {
                    return self.find(at, &[&from[..], rest].concat());
                }
            }
        }
        Found::Nowhere
    }
}

/// What an import brings: the path, and the name that it gets.
pub(super) fn imports(tree: &UseTree) -> Vec<(Place, String)> {
    match tree {
        UseTree::Path(path) => {
            let mut inner = imports(&path.tree);
            for (from, name) in &mut inner {
                if from.last().is_some_and(|last| last == "self") && from.len() == 1 {
                    *name = path.ident.to_string();
                    from.clear();
                }
                from.insert(0, path.ident.to_string());
            }
            inner
        }
        UseTree::Name(name) => vec![(vec![name.ident.to_string()], name.ident.to_string())],
        UseTree::Rename(rename) => {
            vec![(vec![rename.ident.to_string()], rename.rename.to_string())]
        }
        UseTree::Glob(_) => vec![(vec!["*".to_owned()], "*".to_owned())],
        UseTree::Group(group) => group.items.iter().flat_map(imports).collect(),
    }
}

/// An item's name, if it has one, and who sees it.
pub(super) fn name(item: &Item) -> Option<(String, &Visibility)> {
    let (ident, visibility) = match item {
        Item::Const(item) => (&item.ident, &item.vis),
        Item::Enum(item) => (&item.ident, &item.vis),
        Item::Fn(item) => (&item.sig.ident, &item.vis),
        Item::Static(item) => (&item.ident, &item.vis),
        Item::Struct(item) => (&item.ident, &item.vis),
        Item::Trait(item) => (&item.ident, &item.vis),
        Item::Type(item) => (&item.ident, &item.vis),
        Item::Union(item) => (&item.ident, &item.vis),
        _ => return None,
    };
    Some((ident.to_string(), visibility))
}

fn is_for_tests(item: &Item) -> bool {
    let attributes = match item {
        Item::Const(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => return false,
    };
    let is_test = |attribute: &Attribute| {
        let condition =
            attribute.path().is_ident("cfg").then(|| attribute.parse_args::<syn::Path>());
        condition.is_some_and(|path| path.is_ok_and(|path| path.is_ident("test")))
    };
    attributes.iter().any(is_test)
}

/// The file that `#[path = ".."]` names.
fn path_of(attributes: &[Attribute], folder: &Path) -> Option<PathBuf> {
    let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("path"))?;
    let syn::Meta::NameValue(value) = &attribute.meta else { return None };
    let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) = &value.value else {
        return None;
    };
    Some(folder.join(path.value()))
}

fn existing(path: PathBuf) -> Option<PathBuf> {
    path.exists().then_some(path)
}
