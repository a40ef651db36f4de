//! Kernel modules in the order of loading.

use super::{Obstacle, failed};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A module, ready to be loaded.
pub(super) struct Module {
    pub(super) name: String,
    pub(super) content: Vec<u8>,
}

/// The modules `wanted` and all that they depend on, those first. What is built into the kernel
/// is left out.
pub(super) fn in_order(tree: &Path, wanted: &[&str]) -> Result<Vec<Module>, Obstacle> {
    let folder = tree.join("usr/lib/modules");
    let mut files = HashMap::new();
    find(&folder, &mut files).map_err(|error| failed("kernel modules", &error))?;
    let builtin = files
        .remove("modules.builtin")
        .and_then(|path| fs::read_to_string(path).ok())
        .unwrap_or_default();
    let builtin: Vec<String> = builtin.lines().map(module_name).collect();
    let mut order: Vec<Module> = Vec::new();
    for name in wanted {
        add(name, &files, &builtin, &mut order)?;
    }
    Ok(order)
}

fn add(
    name: &str,
    files: &HashMap<String, PathBuf>,
    builtin: &[String],
    order: &mut Vec<Module>,
) -> Result<(), Obstacle> {
    if builtin.iter().any(|one| one == name) || order.iter().any(|one| one.name == name) {
        return Ok(());
    }
    let path = files
        .get(name)
        .ok_or_else(|| Obstacle::Failed(format!("the kernel's package has no module {name}")))?;
    let content = read(path)?;
    for dependency in dependencies(&content) {
        add(&dependency, files, builtin, order)?;
    }
    order.push(Module { name: name.to_owned(), content });
    Ok(())
}

fn find(folder: &Path, files: &mut HashMap<String, PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, files)?;
            continue;
        }
        let name = path.to_string_lossy().into_owned();
        if name.ends_with("modules.builtin") {
            files.insert("modules.builtin".to_owned(), path);
        } else if name.contains(".ko") {
            files.insert(module_name(&name), path);
        }
    }
    Ok(())
}

/// As the kernel calls it: without folder and ending, and with `_` for `-`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or_default();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

fn read(path: &Path) -> Result<Vec<u8>, Obstacle> {
    let what = path.display().to_string();
    if path.extension().is_none_or(|ending| ending != "xz") {
        return fs::read(path).map_err(|error| failed(&what, &error));
    }
    let output = Command::new("xz").arg("-dc").arg(path).output();
    let output = output.map_err(|error| failed(&what, &error))?;
    let done = output.status.success();
    if done { Ok(output.stdout) } else { Err(Obstacle::Failed(format!("cannot unpack {what}"))) }
}

/// The entry `depends=` of a module's `.modinfo`, whose strings end with 0.
fn dependencies(content: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = content.windows(KEY.len()).position(|bytes| bytes == KEY) else {
        return Vec::new();
    };
    let value = content[at + KEY.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    let value = String::from_utf8_lossy(value).into_owned();
    value.split(',').filter(|name| !name.is_empty()).map(module_name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_the_module() {
        let content = b"\x7fELF..\0license=GPL\0depends=ib-core,udp_tunnel\0name=x\0";
        assert_eq!(dependencies(content), ["ib_core", "udp_tunnel"]);
        assert!(dependencies(b"\0depends=\0").is_empty());
        assert!(dependencies(b"nothing").is_empty());
        assert_eq!(module_name("kernel/net/ip6-udp-tunnel.ko.xz"), "ip6_udp_tunnel");
    }
}
