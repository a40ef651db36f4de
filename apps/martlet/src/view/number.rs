//! Numbers as people read them.

use martlet_units::{ByteCount, BytesPerSec};

/// `1 234 567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// A time given in milliseconds, with three digits that matter: `0.463 ms`, `41.2 ms`, `1.34 s`.
pub(crate) fn millis(ms: f64) -> String {
    let (value, unit) = if ms.abs() < 1000.0 { (ms, "ms") } else { (ms / 1000.0, "s") };
    let decimals = if value.abs() < 10.0 {
        if unit == "ms" { 3 } else { 2 }
    } else if value.abs() < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.decimals$} {unit}")
}

/// A rate as links are measured: `3.12 Gbit/s`.
pub(crate) fn bit_rate(rate: BytesPerSec) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people, three digits")]
    let mut value = rate.0 as f64 * 8.0;
    let mut unit = "bit/s";
    for next in ["Kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$} {unit}")
}

/// A size; a whole number of a unit has no decimals: `1 GiB`, `515.9 MiB`.
pub(crate) fn size(bytes: ByteCount) -> String {
    bytes.to_string().replacen(".0 ", " ", 1)
}

/// `1 page`, `2 pages`.
pub(crate) fn plural(count: u64, noun: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{} {noun}{s}", grouped(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1 234 567");
        assert_eq!(grouped(123), "123");
        assert_eq!(millis(0.463), "0.463 ms");
        assert_eq!(millis(41.234), "41.2 ms");
        assert_eq!(millis(412.3), "412 ms");
        assert_eq!(millis(1340.0), "1.34 s");
        assert_eq!(bit_rate(BytesPerSec(1_250_000_000)), "10.0 Gbit/s");
        assert_eq!(bit_rate(BytesPerSec(0)), "0.00 bit/s");
        assert_eq!(size(ByteCount(1 << 30)), "1 GiB");
        assert_eq!(size(ByteCount(541_000_000)), "515.9 MiB");
        assert_eq!(plural(1, "page"), "1 page");
        assert_eq!(plural(2000, "page"), "2 000 pages");
    }
}
