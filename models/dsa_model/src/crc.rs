//! CRC-32C (Castagnoli), reflected, as RFC 3720 uses it.

const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ POLYNOMIAL } else { value >> 1 };
            bit += 1;
        }
        table[byte as usize] = value;
        byte += 1;
    }
    table
};

/// The checksum of what `seed` is the checksum of, and `bytes` behind it.
pub(crate) fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        let [low, ..] = crc.to_le_bytes();
        crc >> 8 ^ TABLE[usize::from(low ^ byte)]
    };
    !bytes.iter().fold(!seed, step)
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn the_examples_of_rfc_3720() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, ascending, descending.
        assert_eq!(crc32c(0, &[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(0, &[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(0, &ascending), 0x46dd_794e);
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(0, &descending), 0x113f_db5c);
        assert_eq!(crc32c(crc32c(0, b"1234"), b"56789"), crc32c(0, b"123456789"));
    }
}
