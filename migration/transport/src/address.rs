//! Where a destination listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `tcp:HOST:PORT` or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host name or address, and a port. IPv6 addresses stand in brackets.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Port; 0 lets a listener choose.
        port: u16,
    },
    /// A socket in the file system.
    Unix(PathBuf),
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an address: expected tcp:HOST:PORT or unix:PATH")]
pub struct ParseAddressError {
    text: String,
}

/// Longest path of a Unix socket (`sun_path` less its NUL).
const UNIX_PATH_MAX: usize = 107;

impl FromStr for Address {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Address, ParseAddressError> {
        let parsed = if let Some(path) = text.strip_prefix("unix:") {
            let fits = !path.is_empty() && path.len() <= UNIX_PATH_MAX && !path.contains('\0');
            fits.then(|| Address::Unix(PathBuf::from(path)))
        } else if let Some(rest) = text.strip_prefix("tcp:") {
            rest.rsplit_once(':').and_then(|(host, port)| {
                let host = match host.strip_prefix('[') {
                    Some(inner) => inner.strip_suffix(']')?,
                    None if host.contains(':') => return None,
                    None => host,
                };
                let port = port.parse().ok()?;
                (!host.is_empty()).then(|| Address::Tcp { host: host.to_owned(), port })
            })
        } else {
            None
        };
        parsed.ok_or_else(|| ParseAddressError { text: text.to_owned() })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_they_are_written() {
        for text in ["tcp:host:1", "tcp:10.0.0.1:65535", "tcp:[::1]:0", "unix:/run/m.sock"] {
            assert_eq!(text.parse::<Address>().map(|a| a.to_string()), Ok(text.to_owned()));
        }
        for bad in ["", "tcp:", "tcp:host", "tcp::1", "tcp:host:65536", "tcp:::1:5", "unix:", "x:y"]
        {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
        assert!(format!("unix:{}", "x".repeat(108)).parse::<Address>().is_err());
    }
}
