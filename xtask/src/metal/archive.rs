//! An initial RAM file system: a cpio archive of the "newc" kind, uncompressed
//! (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_755;

/// An archive in the making.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<String>,
    entries: usize,
}

impl Archive {
    /// Adds a folder, and those above it.
    pub(super) fn folder(&mut self, path: &str) {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
        if self.folders.insert(path.to_owned()) {
            self.entry(path, FOLDER, &[]);
        }
    }

    /// Adds a file, executable, and the folders above it.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
        self.entry(path, FILE, content);
    }

    /// The finished archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let mode = mode as usize;
        // Number, mode, owner, group, links, time, length, device, special file's device, length
        // of the name with its 0, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, path.len() + 1, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_folders_come_first() {
        let mut archive = Archive::default();
        archive.file("usr/bin/a", b"12345");
        archive.file("usr/bin/b", b"");
        let bytes = archive.finish();
        assert!(bytes.len().is_multiple_of(4));
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let places: Vec<usize> = ["usr\0", "usr/bin\0", "usr/bin/a\0", "12345", "TRAILER!!!"]
            .iter()
            .map(|part| text.find(part).unwrap())
            .collect();
        assert!(places.is_sorted());
        assert_eq!(text.matches("070701").count(), 5);
        assert_eq!(&text[..14], "07070100000001");
    }
}
