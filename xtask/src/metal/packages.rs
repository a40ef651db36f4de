//! Debian packages: fetched once, unpacked into the cache, never installed.

use super::{Obstacle, failed, need};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The suite whose kernel is 6.12. That of Debian 12 (6.1) is too old: its rdma_rxe transmits
/// within the post, which hides that sources are read late.
const SUITE: &str = "trixie";
const MIRROR: &str = "http://deb.debian.org/debian";
/// Signs the suite (package debian-archive-keyring).
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Depends on the kernel of the day.
const KERNEL: &str = "linux-image-amd64";

/// User space for the machine, and the headers that layouts are compared with.
const PACKAGES: [&str; 10] = [
    "busybox-static",
    "libc6",
    "libgcc-s1",
    "libibverbs1",
    "ibverbs-providers",
    "librdmacm1t64",
    "libnl-3-200",
    "libnl-route-3-200",
    "libibverbs-dev",
    "librdmacm-dev",
];

/// What of the kernel's package is unpacked: not its 400 MB of drivers.
const KERNEL_PARTS: [&str; 12] = [
    "./boot/vmlinuz-*",
    "*/modules.builtin",
    "*/kernel/arch/*",
    "*/kernel/crypto/*",
    "*/kernel/drivers/char/hw_random/*",
    "*/kernel/drivers/crypto/ccp/*",
    "*/kernel/drivers/infiniband/*",
    "*/kernel/drivers/net/dummy.ko*",
    "*/kernel/fs/configfs/*",
    "*/kernel/lib/*",
    "*/kernel/net/*",
    "*/kernel/virt/*",
];

/// Says which packages are unpacked; written last.
const STAMP: &str = "unpacked";

/// A kernel's image.
pub(super) struct Kernel {
    pub(super) path: PathBuf,
    /// As `uname -r` tells it.
    pub(super) version: String,
}

/// Unpacked packages.
pub(super) struct Packages {
    cache: PathBuf,
}

impl Packages {
    /// Where their files are.
    pub(super) fn tree(&self) -> PathBuf {
        self.cache.join("tree")
    }

    /// Headers of the C libraries.
    pub(super) fn headers(&self) -> PathBuf {
        self.tree().join("usr/include")
    }

    /// The kernel that is booted.
    pub(super) fn kernel(&self) -> Result<Kernel, Obstacle> {
        let folder = self.tree().join("boot");
        let listed = fs::read_dir(&folder).map_err(|error| failed("the kernel", &error))?;
        let mut files = listed.flatten().map(|entry| entry.path());
        let found = files.find_map(|path| {
            let version = path.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
            Some(Kernel { path, version })
        });
        found.ok_or_else(|| Obstacle::Failed(format!("no kernel in {}", folder.display())))
    }

    /// For files that are made anew each time.
    pub(super) fn cache(&self) -> &Path {
        &self.cache
    }
}

/// What the stamp says if the cache is what this version wants.
fn stamp() -> String {
    format!("{SUITE} {KERNEL} {} {}\n", PACKAGES.join(" "), KERNEL_PARTS.join(" "))
}

/// The packages, from the cache if they are there.
pub(super) fn fetch(cache: &Path) -> Result<Packages, Obstacle> {
    let packages = Packages { cache: cache.to_owned() };
    if std::env::consts::ARCH != "x86_64" {
        return Err(Obstacle::Missing("the emulated PC needs programs for x86-64".to_owned()));
    }
    for (tool, package) in
        [("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("tar", "tar"), ("xz", "xz-utils")]
    {
        need(tool, package)?;
    }
    let stamped = cache.join(STAMP);
    if fs::read_to_string(&stamped).is_ok_and(|text| text == stamp()) {
        return Ok(packages);
    }
    if !Path::new(KEYRING).is_file() {
        return Err(Obstacle::Missing(format!("{KEYRING} is not there (debian-archive-keyring)")));
    }
    println!("metal: fetching Debian packages into {}", cache.display());
    let debs = download(cache)?;
    let tree = packages.tree();
    let _ = fs::remove_dir_all(&tree);
    fs::create_dir_all(&tree).map_err(|error| failed("the cache", &error))?;
    for deb in debs {
        unpack(&deb, &tree)?;
    }
    fs::write(stamped, stamp()).map_err(|error| failed("the cache", &error))?;
    Ok(packages)
}

/// Fetches all packages by an apt of their own, which shares nothing with the host's but its
/// proxy settings.
fn download(cache: &Path) -> Result<Vec<PathBuf>, Obstacle> {
    let apt = cache.join("apt");
    let debs = cache.join("debs");
    let _ = fs::remove_dir_all(&debs);
    for folder in
        [apt.join("state/lists/partial"), apt.join("cache/archives/partial"), debs.clone()]
    {
        fs::create_dir_all(folder).map_err(|error| failed("the cache", &error))?;
    }
    let sources = format!("deb [signed-by={KEYRING}] {MIRROR} {SUITE} main\n");
    fs::write(apt.join("sources.list"), sources).map_err(|error| failed("the cache", &error))?;
    fs::write(apt.join("status"), "").map_err(|error| failed("the cache", &error))?;
    let network = |what: &str| Obstacle::Missing(format!("{what}: no Debian mirror is reached"));
    ask_apt(&apt, &debs, "apt-get", &["-q", "update"]).map_err(|why| network(&why))?;
    let about = ask_apt(&apt, &debs, "apt-cache", &["show", "--no-all-versions", KERNEL])
        .map_err(|why| network(&why))?;
    let kernel = kernel_of(&about)
        .ok_or_else(|| Obstacle::Failed(format!("{KERNEL} names no kernel in {SUITE}")))?;
    let mut arguments = vec!["-q", "download", kernel];
    arguments.extend(PACKAGES);
    ask_apt(&apt, &debs, "apt-get", &arguments).map_err(|why| network(&why))?;
    let listed = fs::read_dir(&debs).map_err(|error| failed("the cache", &error))?;
    let mut list: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
    list.sort();
    Ok(list)
}

/// The package that the kernel's meta package depends on.
fn kernel_of(about: &str) -> Option<&str> {
    let depends = about.lines().find_map(|line| line.strip_prefix("Depends:"))?;
    depends.split([',', ' ']).find(|word| word.starts_with("linux-image-"))
}

fn ask_apt(apt: &Path, folder: &Path, tool: &str, arguments: &[&str]) -> Result<String, String> {
    let settings = [
        format!("Dir::State={}", apt.join("state").display()),
        format!("Dir::State::status={}", apt.join("status").display()),
        format!("Dir::Cache={}", apt.join("cache").display()),
        format!("Dir::Etc::SourceList={}", apt.join("sources.list").display()),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        "APT::Architecture=amd64".to_owned(),
        "APT::Architectures=amd64".to_owned(),
        "APT::Update::Error-Mode=any".to_owned(),
        "Acquire::Languages=none".to_owned(),
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        // Root's apt would download as a user who may not write here.
        "APT::Sandbox::User=root".to_owned(),
    ];
    let mut command = Command::new(tool);
    for setting in &settings {
        command.args(["-o", setting]);
    }
    let output = command.args(arguments).current_dir(folder).output();
    let Output { status, stdout, stderr } = output.map_err(|error| format!("{tool}: {error}"))?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&stderr).into_owned();
    let first = errors.lines().find(|line| line.starts_with("E:")).unwrap_or("it failed");
    Err(format!("{tool} {}: {first}", arguments.join(" ")))
}

fn unpack(deb: &Path, tree: &Path) -> Result<(), Obstacle> {
    let what = deb.display().to_string();
    let mut files = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(deb)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed(&what, &error))?;
    let mut tar = Command::new("tar");
    tar.args(["-x", "-C"]).arg(tree);
    if deb.file_name().is_some_and(|name| name.to_string_lossy().starts_with("linux-image-")) {
        tar.arg("--wildcards").args(KERNEL_PARTS);
    }
    let stdout = files.stdout.take().map_or_else(Stdio::null, Stdio::from);
    let unpacked = tar.stdin(stdout).status().map_err(|error| failed(&what, &error))?;
    let read = files.wait().map_err(|error| failed(&what, &error))?;
    let done = unpacked.success() && read.success();
    if done { Ok(()) } else { Err(Obstacle::Failed(format!("cannot unpack {what}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_found_in_its_meta_package() {
        let about = "Package: linux-image-amd64\nDepends: linux-image-6.12.1+deb13-amd64 (= 6)\n";
        assert_eq!(kernel_of(about), Some("linux-image-6.12.1+deb13-amd64"));
        assert_eq!(kernel_of("Package: linux-image-amd64\n"), None);
    }
}
