//! JSON values out of a stream of bytes. Where one ends is told by itself: line ends mean nothing,
//! a value may come a byte at a time or several at once, pretty-printed or not.

use std::io::{self, BufRead, ErrorKind};

/// Longest value that is read, in bytes. The longest sensible command is some hundred bytes, the
/// longest reply some ten thousand.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// What [`ValueReader::next_value`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// The bytes of an object, an array or a string, or of something that is none of them and so
    /// no command: up to the end of its line, or to the next `{`.
    Value(Vec<u8>),
    /// A value is longer than [`VALUE_BYTES_MAX`].
    TooLong,
    /// The peer has closed; an unfinished value is dropped.
    Closed,
}

/// Where in a value the next byte stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before it.
    Between,
    /// In an object or array, this deep, outside of strings.
    Nested(usize),
    /// In a string this deep; 0 is a value that is a string.
    Text { depth: usize, escaped: bool },
    /// In what can't be a value of these.
    Junk,
}

/// Cuts a stream into values. What came of one before an error (a timeout of the socket, say) is
/// still there at the next call.
#[derive(Debug)]
pub struct ValueReader<R> {
    reader: R,
    value: Vec<u8>,
    place: Place,
}

impl<R: BufRead> ValueReader<R> {
    /// Reads from the beginning of a value.
    pub fn new(reader: R) -> ValueReader<R> {
        ValueReader { reader, value: Vec::new(), place: Place::Between }
    }

    /// What it reads from.
    pub fn get_ref(&self) -> &R {
        &self.reader
    }

    /// The next value.
    ///
    /// # Errors
    ///
    /// The reader's own.
    pub fn next_value(&mut self) -> io::Result<Next> {
        loop {
            let available = match self.reader.fill_buf() {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if available.is_empty() {
                return Ok(Next::Closed);
            }
            let mut used = 0;
            let mut is_whole = false;
            for byte in available {
                let (place, takes, ends) = step(self.place, *byte);
                self.place = place;
                used += usize::from(takes);
                if takes && (place, ends) != (Place::Between, false) {
                    self.value.push(*byte);
                }
                is_whole = ends;
                if ends || self.value.len() > VALUE_BYTES_MAX {
                    break;
                }
            }
            self.reader.consume(used);
            if self.value.len() > VALUE_BYTES_MAX {
                return Ok(Next::TooLong);
            }
            if is_whole {
                return Ok(Next::Value(std::mem::take(&mut self.value)));
            }
        }
    }
}

/// Where `byte` leads, whether it is used up, and whether the value ends with (or before) it.
fn step(place: Place, byte: u8) -> (Place, bool, bool) {
    if is_in_no_value(byte) {
        return (Place::Between, true, true);
    }
    match place {
        Place::Between => match byte {
            b' ' | b'\t' | b'\r' | b'\n' => (Place::Between, true, false),
            b'{' | b'[' => (Place::Nested(1), true, false),
            b'"' => (Place::Text { depth: 0, escaped: false }, true, false),
            _ => (Place::Junk, true, false),
        },
        Place::Nested(depth) => match byte {
            b'{' | b'[' => (Place::Nested(depth + 1), true, false),
            b'}' | b']' if depth == 1 => (Place::Between, true, true),
            b'}' | b']' => (Place::Nested(depth - 1), true, false),
            b'"' => (Place::Text { depth, escaped: false }, true, false),
            _ => (place, true, false),
        },
        Place::Text { depth, escaped: true } => {
            (Place::Text { depth, escaped: false }, true, false)
        }
        Place::Text { depth, escaped: false } => match byte {
            b'\\' => (Place::Text { depth, escaped: true }, true, false),
            b'"' if depth == 0 => (Place::Between, true, true),
            b'"' => (Place::Nested(depth), true, false),
            // No string has one of these: what was begun is broken, and the next value is looked
            // for from here.
            b'\t' | b'\r' | b'\n' => (Place::Between, true, true),
            _ => (place, true, false),
        },
        Place::Junk => match byte {
            b'\n' => (Place::Between, true, true),
            b'{' => (Place::Between, false, true),
            _ => (Place::Junk, true, false),
        },
    }
}

/// A client that does not know what it has sent sends such a byte, and waits for the error that it
/// gives (qmp-spec, "Forcing the JSON parser into known-good state").
fn is_in_no_value(byte: u8) -> bool {
    matches!(byte, 0..=0x1f | 0xff) && !matches!(byte, b'\t' | b'\r' | b'\n')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

    use super::*;
    use std::io::{BufReader, Read};

    /// All values of a text that is read `piece` bytes at a time.
    fn values(text: &[u8], piece: usize) -> Vec<String> {
        let mut reader = ValueReader::new(BufReader::with_capacity(piece, text));
        let mut values = Vec::new();
        while let Next::Value(value) = reader.next_value().unwrap() {
            values.push(String::from_utf8_lossy(&value).into_owned());
        }
        values
    }

    #[test]
    fn values_are_found_however_they_come() {
        let text = b"{\"a\":1} {\"b\":[{}]}\r\n\n{\n  \"c}\": \"\\\"{\"\n}[3]\"text\"{}";
        let expected =
            ["{\"a\":1}", "{\"b\":[{}]}", "{\n  \"c}\": \"\\\"{\"\n}", "[3]", "\"text\"", "{}"];
        for piece in [1, 2, 3, 7, 64] {
            assert_eq!(values(text, piece), expected, "{piece} bytes at a time");
        }
    }

    #[test]
    fn what_is_no_value_ends_with_its_line_or_before_the_next_object() {
        assert_eq!(values(b"help me\n{}", 64), ["help me\n", "{}"]);
        assert_eq!(values(b"3{}", 64), ["3", "{}"]);
        assert_eq!(values(b"}{}", 1), ["}", "{}"]);
        assert_eq!(values(b"{\"cut\n{}", 64), ["{\"cut\n", "{}"]);
        assert_eq!(values(b"{\"half\":", 64), [""; 0], "an unfinished value is dropped");
    }

    #[test]
    fn a_byte_that_is_in_no_value_ends_whatever_was_begun() {
        for broken in ["{\"half\": [", "{\"text", "\"", "[\"\\", "junk", ""] {
            for byte in [0x01, 0x1b, 0xff] {
                let mut text = [broken.as_bytes(), &[byte]].concat();
                // The client waits for the error before it goes on.
                let ended = String::from_utf8_lossy(&text).into_owned();
                assert_eq!(values(&text, 64), [ended.as_str()], "{broken} {byte:#x}");
                text.extend(b"{}");
                assert_eq!(values(&text, 1), [ended.as_str(), "{}"], "{broken} {byte:#x}");
            }
        }
    }

    #[test]
    fn a_value_without_end_is_refused() {
        let endless = std::io::repeat(b'[').take(1 << 30);
        let mut reader = ValueReader::new(BufReader::new(endless));
        assert_eq!(reader.next_value().unwrap(), Next::TooLong);
        let mut spaces = ValueReader::new(BufReader::new(std::io::repeat(b' ').take(1 << 22)));
        assert_eq!(spaces.next_value().unwrap(), Next::Closed, "nothing is kept of them");
    }

    #[test]
    fn a_timeout_loses_nothing() {
        struct Halting(Vec<Option<&'static [u8]>>);
        impl Read for Halting {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                match self.0.pop() {
                    Some(Some(bytes)) => {
                        buffer[..bytes.len()].copy_from_slice(bytes);
                        Ok(bytes.len())
                    }
                    Some(None) => Err(ErrorKind::WouldBlock.into()),
                    None => Ok(0),
                }
            }
        }
        let pieces = Halting(vec![Some(b"1}"), None, Some(b"{\"a\":")]);
        let mut reader = ValueReader::new(BufReader::new(pieces));
        assert!(reader.next_value().is_err());
        assert_eq!(reader.next_value().unwrap(), Next::Value(b"{\"a\":1}".to_vec()));
    }
}
