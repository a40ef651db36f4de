//! Where a destination listens.

use crate::UNIX_PATH_MAX;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `tcp:HOST:PORT`, `rdma:HOST:PORT` or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host name or address, and a port. IPv6 addresses stand in brackets.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Port; 0 lets a listener choose.
        port: u16,
    },
    /// As `Tcp`, but guest memory goes by RDMA: everything else, keys included, over TCP there.
    Rdma {
        /// Name or address, without brackets.
        host: String,
        /// Port of the TCP connections; 0 lets a listener choose.
        port: u16,
    },
    /// A socket in the file system.
    Unix(PathBuf),
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an address: expected tcp:HOST:PORT, rdma:HOST:PORT or unix:PATH")]
pub struct ParseAddressError {
    text: String,
}

impl FromStr for Address {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Address, ParseAddressError> {
        let parsed = if let Some(path) = text.strip_prefix("unix:") {
            let fits = !path.is_empty() && path.len() <= UNIX_PATH_MAX && !path.contains('\0');
            fits.then(|| Address::Unix(PathBuf::from(path)))
        } else if let Some(rest) = text.strip_prefix("tcp:") {
            host_and_port(rest).map(|(host, port)| Address::Tcp { host, port })
        } else if let Some(rest) = text.strip_prefix("rdma:") {
            host_and_port(rest).map(|(host, port)| Address::Rdma { host, port })
        } else {
            None
        };
        parsed.ok_or_else(|| ParseAddressError { text: text.to_owned() })
    }
}

/// `HOST:PORT`, an IPv6 address in brackets.
fn host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let port = port.parse().ok()?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

impl Address {
    /// The same for a process that runs in another folder: a relative path means one below the
    /// folder of who wrote it.
    pub fn absolute(&self) -> std::io::Result<Address> {
        match self {
            Address::Unix(path) => Ok(Address::Unix(std::path::absolute(path)?)),
            Address::Tcp { .. } | Address::Rdma { .. } => Ok(self.clone()),
        }
    }

    /// The same with another port; a path has none.
    pub(crate) fn with_port(&self, port: u16) -> Address {
        let mut address = self.clone();
        if let Address::Tcp { port: old, .. } | Address::Rdma { port: old, .. } = &mut address {
            *old = port;
        }
        address
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, host, port) = match self {
            Address::Unix(path) => return write!(f, "unix:{}", path.display()),
            Address::Tcp { host, port } => ("tcp", host, port),
            Address::Rdma { host, port } => ("rdma", host, port),
        };
        if host.contains(':') {
            write!(f, "{scheme}:[{host}]:{port}")
        } else {
            write!(f, "{scheme}:{host}:{port}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_they_are_written() {
        for text in [
            "tcp:host:1",
            "tcp:10.0.0.1:65535",
            "tcp:[::1]:0",
            "rdma:host:1",
            "rdma:[fd00::1]:4321",
            "unix:/run/m.sock",
        ] {
            assert_eq!(text.parse::<Address>().map(|a| a.to_string()), Ok(text.to_owned()));
        }
        for bad in [
            "",
            "tcp:",
            "rdma:host",
            "tcp:host",
            "tcp::1",
            "tcp:host:65536",
            "tcp:::1:5",
            "unix:",
            "x:y",
        ] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
        assert!(format!("unix:{}", "x".repeat(108)).parse::<Address>().is_err());
    }
}
