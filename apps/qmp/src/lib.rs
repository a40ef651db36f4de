//! QMP, QEMU's machine protocol, as both of its ends need it: values out of a stream of bytes, an
//! object as a line, and a client for a control socket of martlet's or of QEMU's.

mod client;
mod stream;

pub use client::{Client, ClientError, ClientEvent};
pub use stream::{Next, VALUE_BYTES_MAX, ValueReader};

use serde_json::Value;

/// An object as it goes over the wire: ASCII only, and CRLF at its end, as the specification
/// wants it from a server. Clients take it too.
pub fn to_line(object: &Value) -> String {
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

/// The text without line breaks and control characters, which a peer may have put there.
pub fn one_line(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.trim().chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

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
}
