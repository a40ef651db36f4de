//! QMP, QEMU's machine protocol: a stream of JSON objects over the control socket. As QEMU's
//! docs/interop/qmp-spec has it, with QEMU's names where QEMU has them; what is ours begins with
//! `x-`. A difference: strings take double quotes only.

pub(crate) mod client;
pub(crate) mod clients;
mod dispatch;
pub(crate) mod events;
pub(crate) mod schema;
pub(crate) mod server;
#[cfg(test)]
mod server_tests;
mod stream;

use serde_json::Value;

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
}
