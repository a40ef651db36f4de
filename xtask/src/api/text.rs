//! An item as lines of the listing.

use super::source::Crate;
use quote::ToTokens;
use syn::{Attribute, Fields, ImplItem, Item, ItemImpl, Signature, TraitItem, Type, Visibility};

/// The lines of an item that users call `path::name`.
pub(super) fn item(read: &Crate, item: &Item, path: &str, name: &str, lines: &mut Vec<String>) {
    let full = format!("{path}::{name}");
    match item {
        Item::Const(item) => lines.push(format!("const {full}: {}", text(&item.ty))),
        Item::Static(item) => lines.push(format!("static {full}: {}", text(&item.ty))),
        Item::Type(item) => {
            lines.push(format!("type {full}{} = {}", text(&item.generics), text(&item.ty)));
        }
        Item::Fn(item) => lines.push(function(&full, &item.sig)),
        Item::Struct(item) => {
            lines.push(format!("struct {full}{}{}", text(&item.generics), open(&item.attrs)));
            fields(&item.fields, &full, is_public, lines);
            type_itself(read, &item.ident.to_string(), &item.attrs, &full, lines);
        }
        Item::Enum(item) => {
            lines.push(format!("enum {full}{}{}", text(&item.generics), open(&item.attrs)));
            for variant in &item.variants {
                let of = format!("{full}::{}", variant.ident);
                lines.push(format!("variant {of}"));
                fields(&variant.fields, &of, |_| true, lines);
            }
            type_itself(read, &item.ident.to_string(), &item.attrs, &full, lines);
        }
        Item::Trait(item) => {
            let above = text(&item.supertraits);
            let above = if above.is_empty() { above } else { format!(": {above}") };
            lines.push(format!("trait {full}{}{above}", text(&item.generics)));
            for inner in &item.items {
                match inner {
                    TraitItem::Fn(inner) => {
                        let line = function(&format!("{full}::{}", inner.sig.ident), &inner.sig);
                        let given = if inner.default.is_some() { " (provided)" } else { "" };
                        lines.push(format!("{line}{given}"));
                    }
                    TraitItem::Type(inner) => lines.push(format!("type {full}::{}", inner.ident)),
                    TraitItem::Const(inner) => {
                        lines.push(format!("const {full}::{}: {}", inner.ident, text(&inner.ty)));
                    }
                    _ => {}
                }
            }
        }
        _ => lines.push(format!("item {full}")),
    }
}

fn function(full: &str, signature: &Signature) -> String {
    let before = if signature.unsafety.is_some() { "unsafe fn" } else { "fn" };
    let inputs: Vec<String> = signature.inputs.iter().map(text).collect();
    let output = text(&signature.output);
    let output = if output.is_empty() { output } else { format!(" {output}") };
    let generics = text(&signature.generics);
    let bounds = signature.generics.where_clause.as_ref().map_or(String::new(), text);
    let bounds = if bounds.is_empty() { bounds } else { format!(" {bounds}") };
    format!("{before} {full}{generics}({}){output}{bounds}", inputs.join(", "))
}

fn fields(fields: &Fields, of: &str, shown: impl Fn(&Visibility) -> bool, lines: &mut Vec<String>) {
    for (number, field) in fields.iter().enumerate() {
        if shown(&field.vis) {
            let name = field.ident.as_ref().map_or(number.to_string(), ToString::to_string);
            lines.push(format!("field {of}::{name}: {}", text(&field.ty)));
        }
    }
}

/// What a type can do, by its own functions and by traits.
fn type_itself(
    read: &Crate,
    name: &str,
    attributes: &[Attribute],
    full: &str,
    lines: &mut Vec<String>,
) {
    for derive in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let _ = derive.parse_nested_meta(|meta| {
            let name = meta.path.segments.last().map(|last| last.ident.to_string());
            lines.push(format!("impl {} for {full}", name.unwrap_or_default()));
            Ok(())
        });
    }
    let all = read.all().filter_map(|item| match item {
        Item::Impl(item) if is_of(&item.self_ty, name) => Some(item),
        _ => None,
    });
    for block in all {
        match &block.trait_ {
            Some((_, path, _)) => lines.push(format!("impl {} for {full}", text(path))),
            None => functions(block, full, lines),
        }
    }
}

fn functions(block: &ItemImpl, full: &str, lines: &mut Vec<String>) {
    for inner in &block.items {
        match inner {
            ImplItem::Fn(inner) if is_public(&inner.vis) => {
                lines.push(function(&format!("{full}::{}", inner.sig.ident), &inner.sig));
            }
            ImplItem::Const(inner) if is_public(&inner.vis) => {
                lines.push(format!("const {full}::{}: {}", inner.ident, text(&inner.ty)));
            }
            _ => {}
        }
    }
}

fn is_of(of: &Type, name: &str) -> bool {
    let Type::Path(path) = of else { return false };
    path.path.segments.last().is_some_and(|last| last.ident == name)
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Fields or variants may be added to it.
fn open(attributes: &[Attribute]) -> &'static str {
    let is_open = attributes.iter().any(|attribute| attribute.path().is_ident("non_exhaustive"));
    if is_open { " (non_exhaustive)" } else { "" }
}

/// Tokens as people write them, near enough.
fn text(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    for (from, to) in [
        (" :: ", "::"),
        (":: ", "::"),
        (" < ", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" ,", ","),
        ("& ", "&"),
        (" :", ":"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        ("[ ", "["),
        (" ]", "]"),
        (" ;", ";"),
        (",>", ">"),
        ("- >", "->"),
    ] {
        text = text.replace(from, to);
    }
    text
}
