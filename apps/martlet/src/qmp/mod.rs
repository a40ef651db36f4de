//! QMP, QEMU's machine protocol: JSON objects, one a line, over the control socket. As QEMU's
//! docs/interop/qmp-spec has it, with QEMU's names where QEMU has them; what is ours begins with
//! `x-`. Differences: an object may not span lines, and strings take double quotes only.

pub(crate) mod client;
mod dispatch;
pub(crate) mod events;
pub(crate) mod schema;
pub(crate) mod server;
#[cfg(test)]
mod server_tests;

use serde_json::Value;
use std::io::{self, BufRead, ErrorKind};

/// Longest line that is read, in bytes. The longest sensible command is some hundred bytes, the
/// longest reply some ten thousand.
pub(crate) const LINE_BYTES_MAX: usize = 1 << 20;

/// An object as it goes over the wire: ASCII only, and CRLF at its end, as the specification
/// wants it from a server. Clients take it too.
pub(crate) fn to_line(object: &Value) -> String {
    use std::fmt::Write as _;
    let json = object.to_string();
    let mut line = String::with_capacity(json.len() + 2);
    let mut units = [0u16; 2];
    for c in json.chars() {
        if c.is_ascii() {
            line.push(c);
        } else {
            // Beyond ASCII there is text only inside strings, where JSON allows this form.
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(line, "\\u{unit:04x}");
            }
        }
    }
    line.push_str("\r\n");
    line
}

/// What [`read_line`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A whole line is in the buffer, without its end.
    Whole,
    /// The line is longer than [`LINE_BYTES_MAX`].
    TooLong,
    /// The peer has closed; an unfinished line is dropped.
    Closed,
}

/// Reads a line into `buffer`. A part of a line that came before an error (a timeout of the
/// socket, say) is still there at the next call, so clear the buffer only after [`Line::Whole`].
pub(crate) fn read_line(reader: &mut impl BufRead, buffer: &mut Vec<u8>) -> io::Result<Line> {
    loop {
        let available = match reader.fill_buf() {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if available.is_empty() {
            return Ok(Line::Closed);
        }
        let end = available.iter().position(|byte| *byte == b'\n');
        let part = available.get(..end.unwrap_or(available.len())).unwrap_or_default();
        if buffer.len() + part.len() > LINE_BYTES_MAX {
            return Ok(Line::TooLong);
        }
        buffer.extend_from_slice(part);
        let used = part.len() + usize::from(end.is_some());
        reader.consume(used);
        if end.is_some() {
            return Ok(Line::Whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_are_ascii_and_come_back() {
        let object = json!({"desc": "größer \u{1f426}\n\"", "n": 1});
        let line = to_line(&object);
        assert!(line.is_ascii() && line.ends_with("\r\n"));
        assert_eq!(line.trim_end().lines().count(), 1);
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), object);
    }

    #[test]
    fn lines_are_read_whole_or_refused() {
        let mut input: &[u8] = b"{}\r\n\nhalf";
        let mut buffer = Vec::new();
        assert_eq!(read_line(&mut input, &mut buffer).unwrap(), Line::Whole);
        assert_eq!(buffer, b"{}\r");
        buffer.clear();
        assert_eq!(read_line(&mut input, &mut buffer).unwrap(), Line::Whole);
        assert!(buffer.is_empty());
        assert_eq!(read_line(&mut input, &mut buffer).unwrap(), Line::Closed);
        let long = vec![b' '; LINE_BYTES_MAX + 1];
        buffer.clear();
        assert_eq!(read_line(&mut &long[..], &mut buffer).unwrap(), Line::TooLong);
    }
}
