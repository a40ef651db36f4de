//! How people write sizes, rates and times on a command line: `1G`, `10Gbit/s`, `300ms`.

use crate::{ByteCount, BytesPerSec};
use core::fmt;
use core::str::FromStr;
use core::time::Duration;

/// Why a text is not a size, a rate or a time. Displays as one line that says what to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseUnitError {
    text: String,
    expected: &'static str,
}

impl fmt::Display for ParseUnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not {}", self.text, self.expected)
    }
}

impl std::error::Error for ParseUnitError {}

/// Splits `1.5G` into a number in thousandths and the unit behind it.
fn split(text: &str) -> Option<(u128, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || whole.len() > 20 || fraction.len() > 3 || fraction.contains('.') {
        return None;
    }
    let mut thousandths = whole.parse::<u128>().ok()? * 1000;
    let mut place = 100;
    for digit in fraction.chars() {
        thousandths += u128::from(digit.to_digit(10)?) * place;
        place /= 10;
    }
    Some((thousandths, unit.trim()))
}

fn scaled(thousandths: u128, factor: u128) -> Option<u64> {
    u64::try_from(thousandths.checked_mul(factor)? / 1000).ok()
}

impl FromStr for ByteCount {
    type Err = ParseUnitError;

    /// A size in bytes, or with K, M, G or T (powers of 1024; `KiB`, `MiB` ... mean the same).
    fn from_str(text: &str) -> Result<ByteCount, ParseUnitError> {
        let parsed = split(text).and_then(|(number, unit)| {
            let shift = match unit {
                "" | "B" => 0,
                "K" | "k" | "KiB" => 10,
                "M" | "m" | "MiB" => 20,
                "G" | "g" | "GiB" => 30,
                "T" | "t" | "TiB" => 40,
                _ => return None,
            };
            scaled(number, 1 << shift)
        });
        parsed.map(ByteCount).ok_or_else(|| ParseUnitError {
            text: text.to_owned(),
            expected: "a size such as 4096, 512M or 1.5G",
        })
    }
}

impl FromStr for BytesPerSec {
    type Err = ParseUnitError;

    /// A rate: bits with `bit/s`, `Kbit/s`, `Mbit/s`, `Gbit/s` (powers of 1000), bytes with
    /// `B/s`, `KB/s` (powers of 1000) or `KiB/s` (powers of 1024). A bare number is refused, as its
    /// unit is a guess.
    fn from_str(text: &str) -> Result<BytesPerSec, ParseUnitError> {
        let parsed = split(text).and_then(|(number, unit)| {
            let unit = unit.strip_suffix("/s").unwrap_or(unit);
            let (factor, bits) = match unit {
                "bit" => (1, true),
                "Kbit" | "kbit" => (1_000, true),
                "Mbit" => (1_000_000, true),
                "Gbit" => (1_000_000_000, true),
                "B" => (1, false),
                "KB" | "kB" => (1_000, false),
                "MB" => (1_000_000, false),
                "GB" => (1_000_000_000, false),
                "KiB" | "K" => (1 << 10, false),
                "MiB" | "M" => (1 << 20, false),
                "GiB" | "G" => (1 << 30, false),
                _ => return None,
            };
            scaled(number, factor).map(|rate| if bits { rate / 8 } else { rate })
        });
        parsed.map(BytesPerSec).ok_or_else(|| ParseUnitError {
            text: text.to_owned(),
            expected: "a rate with its unit, such as 10Gbit/s or 500MiB/s",
        })
    }
}

/// A time: `300ms`, `200us`, `2s`, `10m` (or `10min`), `1h`. A bare number is refused, as its unit is a guess.
pub fn parse_duration(text: &str) -> Result<Duration, ParseUnitError> {
    let parsed = split(text).and_then(|(number, unit)| {
        let nanos = match unit {
            "ns" => 1,
            "us" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" | "min" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        scaled(number, nanos)
    });
    parsed.map(Duration::from_nanos).ok_or_else(|| ParseUnitError {
        text: text.to_owned(),
        expected: "a time with its unit, such as 300ms or 2s",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_powers_of_1024() {
        assert_eq!("1G".parse(), Ok(ByteCount(1 << 30)));
        assert_eq!("1.5M".parse(), Ok(ByteCount(3 << 19)));
        assert_eq!("4096".parse(), Ok(ByteCount(4096)));
        for bad in ["", "G", "1X", "-1", "1.2345G", "99999999999999999999T", "1..2"] {
            assert!(bad.parse::<ByteCount>().is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_tell_bits_from_bytes() {
        assert_eq!("10Gbit/s".parse(), Ok(BytesPerSec(1_250_000_000)));
        assert_eq!("1MiB/s".parse(), Ok(BytesPerSec(1 << 20)));
        for bad in ["fast", "1", "1/s", "1.5"] {
            assert!(bad.parse::<BytesPerSec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("0.5s"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("10m"), parse_duration("600s"));
        assert!(parse_duration("300").is_err());
    }
}
