//! The layouts against Linux's own header: a small C program prints the offset of every field and
//! the value of every code, and each must be what this crate says. An offset that is wrong here
//! would be wrong in the driver and in the model alike, and no other test could see it.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_dsa_abi::{Descriptor, Flags, Opcode, Status};
use martlet_test_host::Want;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const DESCRIPTOR_FIELDS: &[(&str, usize, usize)] = &[
    // Name in the header, offset and size as this crate lays it out (bit fields have no offset).
    ("completion_addr", 8, 8),
    ("src_addr", 16, 8),
    ("desc_list_addr", 16, 8),
    ("comp_pattern", 24, 8),
    ("xfer_size", 32, 4),
    ("desc_count", 32, 4),
    ("int_handle", 36, 2),
    ("rsvd1", 38, 2),
    ("expected_res", 40, 1),
    ("op_specific", 40, 24),
];

const RECORD_FIELDS: &[(&str, usize, usize)] = &[
    ("status", 0, 1),
    ("result", 1, 1),
    ("rsvd", 2, 2),
    ("bytes_completed", 4, 4),
    ("fault_addr", 8, 8),
    ("op_specific", 16, 16),
];

const OPCODES: &[(&str, Opcode)] = &[
    ("DSA_OPCODE_NOOP", Opcode::NOOP),
    ("DSA_OPCODE_BATCH", Opcode::BATCH),
    ("DSA_OPCODE_DRAIN", Opcode::DRAIN),
    ("DSA_OPCODE_COMPVAL", Opcode::COMPVAL),
];

const STATUSES: &[(&str, Status)] = &[
    ("DSA_COMP_NONE", Status::NONE),
    ("DSA_COMP_SUCCESS", Status::SUCCESS),
    ("DSA_COMP_SUCCESS_PRED", Status::SUCCESS_FALSE_PREDICATE),
    ("DSA_COMP_PAGE_FAULT_NOBOF", Status::PAGE_FAULT),
    ("DSA_COMP_PAGE_FAULT_IR", Status::PAGE_FAULT_INVALID),
    ("DSA_COMP_BATCH_FAIL", Status::BATCH_FAILED),
    ("DSA_COMP_BATCH_PAGE_FAULT", Status::BATCH_LIST_FAULT),
    ("DSA_COMP_DR_OFFSET_NOINC", Status::DELTA_OFFSET_ORDER),
    ("DSA_COMP_DR_OFFSET_ERANGE", Status::DELTA_OFFSET_RANGE),
    ("DSA_COMP_DIF_ERR", Status::DIF_ERROR),
    ("DSA_COMP_BAD_OPCODE", Status::BAD_OPCODE),
    ("DSA_COMP_INVALID_FLAGS", Status::INVALID_FLAGS),
    ("DSA_COMP_NOZERO_RESERVE", Status::RESERVED_NOT_ZERO),
    ("DSA_COMP_XFER_ERANGE", Status::TRANSFER_SIZE),
    ("DSA_COMP_DESC_CNT_ERANGE", Status::DESCRIPTOR_COUNT),
    ("DSA_COMP_DR_ERANGE", Status::DELTA_SIZE),
    ("DSA_COMP_OVERLAP_BUFFERS", Status::OVERLAP),
    ("DSA_COMP_DCAST_ERR", Status::DUALCAST_ALIGN),
    ("DSA_COMP_DESCLIST_ALIGN", Status::LIST_ALIGN),
    ("DSA_COMP_INT_HANDLE_INVAL", Status::INTERRUPT_HANDLE),
    ("DSA_COMP_CRA_XLAT", Status::COMPLETION_TRANSLATION),
    ("DSA_COMP_CRA_ALIGN", Status::COMPLETION_ALIGN),
    ("DSA_COMP_ADDR_ALIGN", Status::ADDRESS_ALIGN),
    ("DSA_COMP_PRIV_BAD", Status::PRIVILEGE),
    ("DSA_COMP_TRAFFIC_CLASS_CONF", Status::TRAFFIC_CLASS),
    ("DSA_COMP_PFAULT_RDBA", Status::READBACK_FAULT),
    ("DSA_COMP_HW_ERR1", Status::HARDWARE),
    ("DSA_COMP_HW_ERR_DRB", Status::HARDWARE_READBACK),
    ("DSA_COMP_TRANSLATION_FAIL", Status::TRANSLATION),
    ("DSA_COMP_STATUS_MASK", Status(Status::MASK)),
    ("DSA_COMP_STATUS_WRITE", Status(Status::WRITE_FAULT)),
];

const FLAGS: &[(&str, Flags)] = &[
    ("IDXD_OP_FLAG_FENCE", Flags::FENCE),
    ("IDXD_OP_FLAG_BOF", Flags::BLOCK_ON_FAULT),
    ("IDXD_OP_FLAG_CRAV", Flags::COMPLETION_VALID),
    ("IDXD_OP_FLAG_RCR", Flags::REQUEST_COMPLETION),
    ("IDXD_OP_FLAG_RCI", Flags::INTERRUPT),
    ("IDXD_OP_FLAG_CRSTS", Flags::COMPLETION_STEERING),
    ("IDXD_OP_FLAG_CR", Flags::CHECK_RESULT),
    ("IDXD_OP_FLAG_ADDR1_TCS", Flags::ADDRESS1_CLASS),
    ("IDXD_OP_FLAG_CR_TCS", Flags::COMPLETION_CLASS),
];

/// The C program: a line for each field and each code, and a descriptor filled by the header's own
/// names, for the bit fields that have no offset.
fn program() -> String {
    let mut lines = String::new();
    let structs = [("dsa_hw_desc", DESCRIPTOR_FIELDS), ("dsa_completion_record", RECORD_FIELDS)];
    for (name, fields) in structs {
        lines += &format!("P(\"{name}\", sizeof(struct {name}));\n");
        for (field, ..) in fields {
            let member = format!("((struct {name} *)0)->{field}");
            lines += &format!("P(\"{name}.{field}\", offsetof(struct {name}, {field}));\n");
            lines += &format!("P(\"{name}.{field}.size\", sizeof({member}));\n");
        }
    }
    let codes = OPCODES.iter().map(|(name, _)| name);
    let codes = codes.chain(STATUSES.iter().map(|(name, _)| name));
    for name in codes.chain(FLAGS.iter().map(|(name, _)| name)) {
        lines += &format!("P(\"{name}\", {name});\n");
    }
    format!(
        "#include <stdio.h>\n#include <stddef.h>\n#include <string.h>\n#include <linux/idxd.h>\n\
         #define P(name, value) printf(\"%s %llu\\n\", name, (unsigned long long)(value))\n\
         int main(void) {{\n{lines}\
         struct dsa_hw_desc d; memset(&d, 0, sizeof d);\n\
         d.pasid = 0x54321; d.priv = 1; d.flags = 0xabcdef; d.opcode = 0x42;\n\
         unsigned char *bytes = (unsigned char *)&d;\n\
         for (int i = 0; i < 8; i++) printf(\"byte%d %d\\n\", i, bytes[i]);\n\
         return 0; }}\n"
    )
}

/// What the program printed; `None`, with a reason, where there is no compiler or no header.
fn probe(directory: &Path) -> Option<HashMap<String, u64>> {
    if !Path::new("/usr/include/linux/idxd.h").exists() {
        return Want::IdxdHeader.take(Err("no linux/idxd.h (package linux-libc-dev)"));
    }
    Want::IdxdHeader.take(Command::new("cc").arg("--version").output())?;
    let (source, binary) = (directory.join("probe.c"), directory.join("probe"));
    std::fs::write(&source, program()).unwrap();
    let built = Command::new("cc").arg(&source).arg("-o").arg(&binary).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&binary).output().unwrap();
    assert!(ran.status.success());
    let text = String::from_utf8(ran.stdout).unwrap();
    let pairs = text.lines().map(|line| line.split_once(' ').unwrap());
    Some(pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect())
}

#[test]
fn offsets_and_codes_are_those_of_the_header() {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("header");
    std::fs::create_dir_all(&directory).unwrap();
    let Some(header) = probe(&directory) else { return };
    assert_eq!(header["dsa_hw_desc"], 64);
    assert_eq!(header["dsa_completion_record"], 32);
    let structs = [("dsa_hw_desc", DESCRIPTOR_FIELDS), ("dsa_completion_record", RECORD_FIELDS)];
    for (name, fields) in structs {
        for (field, offset, size) in fields {
            assert_eq!(header[&format!("{name}.{field}")], *offset as u64, "{name}.{field}");
            assert_eq!(header[&format!("{name}.{field}.size")], *size as u64, "{name}.{field}");
        }
    }
    for (name, code) in OPCODES {
        assert_eq!(header[*name], u64::from(code.0), "{name}");
    }
    for (name, code) in STATUSES {
        assert_eq!(header[*name], u64::from(code.0), "{name}");
    }
    for (name, flags) in FLAGS {
        assert_eq!(header[*name], u64::from(flags.bits()), "{name}");
    }
    // The first eight bytes are bit fields: the header's assignments, read by this crate.
    let mut bytes = [0; 64];
    for (index, byte) in bytes.iter_mut().take(8).enumerate() {
        *byte = u8::try_from(header[&format!("byte{index}")]).unwrap();
    }
    let descriptor = Descriptor::from_bytes(&bytes);
    assert_eq!(descriptor.pasid(), 0x54321);
    assert!(descriptor.is_privileged() && descriptor.reserved_are_zero());
    assert_eq!(descriptor.flags().bits(), 0x00ab_cdef);
    assert_eq!(descriptor.opcode(), Opcode(0x42));
}
