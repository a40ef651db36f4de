//! Named conversions between integers.

/// A count or an index as a 64-bit number.
pub(crate) fn to_u64(value: usize) -> u64 {
    // Lossless: martlet's targets have at most 64 bits.
    value as u64
}

/// A 32-bit number as an index.
pub(crate) fn to_usize(value: u32) -> usize {
    // Lossless: martlet's targets have at least 32 bits.
    value as usize
}

/// The low 8 bits.
pub(crate) fn low8(value: u32) -> u8 {
    value.to_le_bytes()[0]
}

/// The low 16 bits.
pub(crate) fn low16(value: u32) -> u16 {
    let [low, high, ..] = value.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// The low 32 bits.
pub(crate) fn low32(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// The high 32 bits.
pub(crate) fn high32(value: u64) -> u32 {
    low32(value >> 32)
}
