//! The port instructions, all that a guest may do that a process may not; and the two instructions
//! by which the program accesses devices in memory.

/// A port instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortAccess {
    /// Which way.
    pub(super) direction: Direction,
    /// The port if it is in the instruction, else it is in `dx`.
    pub(super) immediate_port: Option<u8>,
    /// Bytes moved: 1, 2 or 4, from or to the low end of `rax`.
    pub(super) size: u8,
    /// Length of the instruction.
    pub(super) length: u64,
}

/// Which way the data of an access goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the port or the device.
    In,
    /// To the port or the device.
    Out,
}

/// An access to a device in memory: 32 bits between `eax` and the address in `rdx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryAccess {
    /// Which way.
    pub(super) direction: Direction,
    /// Length of the instruction.
    pub(super) length: u64,
}

/// Decodes the only two forms that the program uses (Intel SDM volume 2B, MOV; ModR/M byte 02 is
/// `eax` and `[rdx]`). `None` for anything else.
pub(super) fn decode_memory(bytes: &[u8]) -> Option<MemoryAccess> {
    match bytes {
        [0x8b, 0x02, ..] => Some(MemoryAccess { direction: Direction::In, length: 2 }),
        [0x89, 0x02, ..] => Some(MemoryAccess { direction: Direction::Out, length: 2 }),
        _ => None,
    }
}

/// Most bytes of an instruction that are looked at.
pub(super) const BYTES_MAX: usize = 3;

/// Decodes `in` and `out` (Intel SDM volume 2A, IN; 2B, OUT) with or without the prefix for 16
/// bits. `None` for anything else, string instructions included: the program has none.
pub(super) fn decode(bytes: &[u8]) -> Option<PortAccess> {
    const OPERAND_SIZE: u8 = 0x66;
    let (prefix, rest) = match bytes {
        [OPERAND_SIZE, rest @ ..] => (1, rest),
        rest => (0, rest),
    };
    let (opcode, operands) = rest.split_first()?;
    let direction = if opcode & 2 == 0 { Direction::In } else { Direction::Out };
    let size = match (opcode & 1, prefix) {
        (0, _) => 1,
        (_, 1) => 2,
        _ => 4,
    };
    match opcode {
        0xe4..=0xe7 => {
            let port = operands.first().copied()?;
            Some(PortAccess { direction, immediate_port: Some(port), size, length: prefix + 2 })
        }
        0xec..=0xef => {
            Some(PortAccess { direction, immediate_port: None, size, length: prefix + 1 })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_eight_opcodes() {
        // Typed from the manual: opcode, direction, port, bytes, length.
        type Row = (&'static [u8], Direction, Option<u8>, u8, u64);
        let table: [Row; 12] = [
            (&[0xe4, 0x60], Direction::In, Some(0x60), 1, 2),
            (&[0xe5, 0x60], Direction::In, Some(0x60), 4, 2),
            (&[0x66, 0xe5, 0x60], Direction::In, Some(0x60), 2, 3),
            (&[0xe6, 0xe9], Direction::Out, Some(0xe9), 1, 2),
            (&[0xe7, 0xe9], Direction::Out, Some(0xe9), 4, 2),
            (&[0x66, 0xe7, 0xe9], Direction::Out, Some(0xe9), 2, 3),
            (&[0xec], Direction::In, None, 1, 1),
            (&[0xed], Direction::In, None, 4, 1),
            (&[0x66, 0xed], Direction::In, None, 2, 2),
            (&[0xee, 0x90], Direction::Out, None, 1, 1),
            (&[0xef, 0x90], Direction::Out, None, 4, 1),
            (&[0x66, 0xef], Direction::Out, None, 2, 2),
        ];
        for (bytes, direction, immediate_port, size, length) in table {
            let expected = PortAccess { direction, immediate_port, size, length };
            assert_eq!(decode(bytes), Some(expected), "{bytes:x?}");
        }
    }

    #[test]
    fn two_forms_of_mov() {
        let access = |direction| Some(MemoryAccess { direction, length: 2 });
        assert_eq!(decode_memory(&[0x8b, 0x02, 0xc3]), access(Direction::In));
        assert_eq!(decode_memory(&[0x89, 0x02]), access(Direction::Out));
        for other in [&[][..], &[0x8b], &[0x8b, 0x03], &[0x8a, 0x02], &[0x48, 0x8b, 0x02]] {
            assert_eq!(decode_memory(other), None, "{other:x?}");
        }
    }

    #[test]
    fn everything_else_is_not_a_port_instruction() {
        for opcode in (0..=0xff_u8).filter(|o| !matches!(o, 0xe4..=0xe7 | 0xec..=0xef | 0x66)) {
            assert_eq!(decode(&[opcode, 0, 0]), None, "{opcode:#x}");
        }
        for cut in [&[][..], &[0x66], &[0xe4], &[0x66, 0xe7]] {
            assert_eq!(decode(cut), None, "{cut:x?}");
        }
    }
}
