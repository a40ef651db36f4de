//! Compiles the guest program and lays it out as one block of bytes that runs at any address.
//!
//! The compiler makes an object file; the linking, a handful of relocations between a handful of
//! sections, is done here. That takes no linker, linker script or second toolchain, and it proves
//! what a linker would hide: a relocation that is not relative to the program itself, a symbol
//! from outside and a writable section each fail the build.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const ENTRY_SYMBOL: &str = "martlet_guest_entry";
const SOURCES: [&str; 8] = [
    "src/guest/main.rs",
    "src/guest/abi.rs",
    "src/guest/page.rs",
    "src/guest/nic/mod.rs",
    "src/guest/nic/frame.rs",
    "src/guest/nic/queue.rs",
    "src/guest/nic/registers.rs",
    "src/guest/nic/setup.rs",
];

fn main() {
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    assert_eq!(arch, "x86_64", "martlet runs on x86-64 only");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let object = out.join("guest.o");
    compile(Path::new(SOURCES[0]), &object);
    let bytes = fs::read(&object).expect("the compiler wrote its object file");
    let image = link(&bytes).unwrap_or_else(|reason| panic!("guest program: {reason}"));
    fs::write(out.join("guest.bin"), &image.bytes).expect("OUT_DIR is writable");
    let constants = format!(
        "/// Offset of the program's first instruction in its image.\n\
         pub(crate) const ENTRY_OFFSET: u64 = {};\n",
        image.entry
    );
    fs::write(out.join("image.rs"), constants).expect("OUT_DIR is writable");
}

/// The same code whatever the profile: the guest's speed is part of what is measured.
fn compile(source: &Path, object: &Path) {
    let rustc = env::var_os("RUSTC").expect("cargo sets it");
    let target = env::var("TARGET").expect("cargo sets it");
    let status = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=lib", "--crate-name=martlet_guest"])
        .args(["--target", &target, "-Cpanic=abort", "-Copt-level=2", "-Ccodegen-units=1"])
        .args(["-Crelocation-model=pic", "-Cdebuginfo=0", "-Cembed-bitcode=no"])
        .args(["-Cdebug-assertions=off", "-Coverflow-checks=off", "-Ctarget-cpu=x86-64"])
        .arg(format!("--emit=obj={}", object.display()))
        .arg(source)
        .status()
        .expect("the compiler that compiled this script can be started");
    assert!(status.success(), "the guest program does not compile");
}

struct Image {
    bytes: Vec<u8>,
    entry: usize,
}

/// A section header of the object file; the names are those of the ELF-64 specification.
struct Section {
    kind: u32,
    flags: u64,
    offset: usize,
    size: usize,
    link: usize,
    info: usize,
    align: usize,
}

const SHT_PROGBITS: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_RELA: u32 = 4;
const SHT_X86_64_UNWIND: u32 = 0x7000_0001;
const SHF_WRITE: u64 = 1;
const SHF_ALLOC: u64 = 2;
const SHN_UNDEF: usize = 0;
const R_X86_64_PC32: u32 = 2;
const R_X86_64_PLT32: u32 = 4;

fn link(object: &[u8]) -> Result<Image, String> {
    let sections = read_sections(object);
    let symbol_table = sections.iter().find(|s| s.kind == SHT_SYMTAB).ok_or("no symbols")?;
    let mut bytes = Vec::new();
    let mut places = vec![None; sections.len()];
    for (section, place) in sections.iter().zip(&mut places) {
        let loaded = section.flags & SHF_ALLOC != 0 && section.size > 0;
        if !loaded || section.kind == SHT_X86_64_UNWIND {
            continue;
        }
        if section.kind != SHT_PROGBITS || section.flags & SHF_WRITE != 0 {
            return Err(format!(
                "a section of type {:#x} and flags {:#x} is neither code nor constants: \
                 the program may have no variables outside its stack",
                section.kind, section.flags
            ));
        }
        bytes.resize(bytes.len().next_multiple_of(section.align), 0);
        *place = Some(bytes.len());
        bytes.extend_from_slice(&object[section.offset..section.offset + section.size]);
    }
    for section in sections.iter().filter(|s| s.kind == SHT_RELA) {
        if let Some(place) = places[section.info] {
            relocate(object, section, symbol_table, &sections, &places, place, &mut bytes)?;
        }
    }
    let entry = find_entry(object, symbol_table, &sections, &places)?;
    Ok(Image { bytes, entry })
}

fn relocate(
    object: &[u8],
    relocations: &Section,
    symbol_table: &Section,
    sections: &[Section],
    places: &[Option<usize>],
    place: usize,
    bytes: &mut [u8],
) -> Result<(), String> {
    for at in (relocations.offset..relocations.offset + relocations.size).step_by(24) {
        let field = place + word(object, at);
        let info = word(object, at + 8);
        let addend = i64::from_le_bytes(eight(object, at + 16));
        let kind = u32::from_le_bytes(four(object, at + 8));
        let (name, target) = symbol(object, symbol_table, sections, places, info >> 32);
        if kind != R_X86_64_PC32 && kind != R_X86_64_PLT32 {
            return Err(format!("relocation type {kind} against `{name}` needs a fixed address"));
        }
        let target = target.ok_or_else(|| format!("`{name}` is not part of the program"))?;
        let distance = signed(target) + addend - signed(field);
        let distance = i32::try_from(distance).expect("the program is small");
        bytes[field..field + 4].copy_from_slice(&distance.to_le_bytes());
    }
    Ok(())
}

/// Name of a symbol and its offset in the image, if it is there.
fn symbol(
    object: &[u8],
    table: &Section,
    sections: &[Section],
    places: &[Option<usize>],
    index: usize,
) -> (String, Option<usize>) {
    let at = table.offset + index * 24;
    let name_at = sections[table.link].offset + half(object, at) + half(object, at + 2) * 65536;
    let name = object[name_at..].iter().take_while(|b| **b != 0).copied().collect();
    let section = half(object, at + 6);
    let place = if section == SHN_UNDEF { None } else { places.get(section).copied().flatten() };
    let name = String::from_utf8(name).unwrap_or_default();
    (name, place.map(|place| place + word(object, at + 8)))
}

fn find_entry(
    object: &[u8],
    table: &Section,
    sections: &[Section],
    places: &[Option<usize>],
) -> Result<usize, String> {
    (0..table.size / 24)
        .map(|index| symbol(object, table, sections, places, index))
        .find_map(|(name, place)| if name == ENTRY_SYMBOL { place } else { None })
        .ok_or_else(|| format!("no `{ENTRY_SYMBOL}`"))
}

fn read_sections(object: &[u8]) -> Vec<Section> {
    assert_eq!(&object[..6], b"\x7fELF\x02\x01", "the compiler makes ELF-64 object files");
    let table = word(object, 0x28);
    let (length, count) = (half(object, 0x3a), half(object, 0x3c));
    let section = |index: usize| {
        let at = table + index * length;
        Section {
            kind: u32::from_le_bytes(four(object, at + 4)),
            flags: u64::from_le_bytes(eight(object, at + 8)),
            offset: word(object, at + 0x18),
            size: word(object, at + 0x20),
            link: half(object, at + 0x28),
            info: half(object, at + 0x2c),
            align: word(object, at + 0x30).max(1),
        }
    };
    (0..count).map(section).collect()
}

fn eight(bytes: &[u8], at: usize) -> [u8; 8] {
    bytes[at..at + 8].try_into().expect("eight bytes are eight bytes")
}

fn four(bytes: &[u8], at: usize) -> [u8; 4] {
    bytes[at..at + 4].try_into().expect("four bytes are four bytes")
}

fn half(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn word(bytes: &[u8], at: usize) -> usize {
    usize::try_from(u64::from_le_bytes(eight(bytes, at))).expect("hosts have 64 bits")
}

fn signed(offset: usize) -> i64 {
    i64::try_from(offset).expect("the program is small")
}
