//! What a device says that it can: the capability registers that Linux shows in sysfs
//! (`version`, `op_cap`).

use crate::Opcode;

/// The VERSION register: `0x100` for Sapphire Rapids, `0x200` for the generation after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl Version {
    /// Version 1: the device file's `write` takes no batches, and a batch needs two descriptors.
    pub const V1: Version = Version(0x100);
    /// Version 2.
    pub const V2: Version = Version(0x200);
}

/// OPCAP: which of 256 operations a device has, or OPCFG: which a work queue may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCapability {
    words: [u64; 4],
}

impl OperationCapability {
    /// By words of 64 bits, the operations 0 to 63 first.
    pub const fn from_words(words: [u64; 4]) -> OperationCapability {
        OperationCapability { words }
    }

    /// Just these.
    pub fn of(operations: &[Opcode]) -> OperationCapability {
        let mut words = [0; 4];
        for operation in operations {
            let word = words.get_mut(usize::from(operation.0 >> 6));
            word.into_iter().for_each(|word| *word |= 1 << (operation.0 & 63));
        }
        OperationCapability { words }
    }

    /// By words of 64 bits, the operations 0 to 63 first.
    pub const fn words(self) -> [u64; 4] {
        self.words
    }

    /// Whether the operation is there.
    pub fn has(self, operation: Opcode) -> bool {
        let word = self.words.get(usize::from(operation.0 >> 6));
        word.is_some_and(|word| word >> (operation.0 & 63) & 1 != 0)
    }

    /// Reads what sysfs prints: words in hexadecimal, the most significant first, of 32 bits between
    /// commas (`%*pb`, since Linux 5.19) or of 64 bits between spaces (before). `None` for anything
    /// else.
    pub fn parse(text: &str) -> Option<OperationCapability> {
        let text = text.trim();
        let (separator, bits) = if text.contains(' ') { (' ', 64) } else { (',', 32) };
        let mut words = [0; 4];
        let mut at = 0_usize;
        for part in text.rsplit(separator) {
            let digits = part.strip_prefix("0x").unwrap_or(part);
            let all_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            let value = u64::from_str_radix(digits, 16).ok().filter(|_| all_hex)?;
            if bits == 32 && value > u64::from(u32::MAX) {
                return None;
            }
            let word = words.get_mut(at / 64)?;
            *word |= value << (at % 64);
            at += bits;
        }
        Some(OperationCapability { words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_capabilities_are_read_as_linux_prints_them() {
        let commas = "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff\n";
        let spaces = "0x0 0x0 0x0 0x1003f03ff\n";
        for text in [commas, spaces, "1,003f03ff"] {
            let parsed = OperationCapability::parse(text).unwrap();
            assert_eq!(parsed.words(), [0x1_003f_03ff, 0, 0, 0], "{text:?}");
            assert!(parsed.has(Opcode::COMPVAL) && parsed.has(Opcode(0x20)));
            assert!(!parsed.has(Opcode(0x0a)));
        }
        for text in ["", "x", "1,2,3,4,5,6,7,8,9", "0 0 0 0 0", "123456789", "1,", "+1", "0x0x1"] {
            assert_eq!(OperationCapability::parse(text), None, "{text:?}");
        }
    }
}
