//! Which provider of verbs a migration uses, and how.

use crate::{Error, Fault};
use martlet_rdma::{DestinationConfig, SourceConfig};
use martlet_verbs::ibv::{Ibv, Select};
use martlet_wire::rdma::Pinning;
use std::fmt;
use std::net::ToSocketAddrs;
use std::str::FromStr;

/// A provider of verbs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Provider {
    /// An RDMA device if one has the address, else in software.
    #[default]
    Auto,
    /// The kernel's verbs.
    Ibv,
    /// In software, over TCP.
    Soft,
}

impl Provider {
    /// What a destination at `host` will use, and why not a device, if it wanted one and there is
    /// none.
    ///
    /// # Errors
    /// If a device is a must and there is none. One line for people.
    pub fn settle(self, host: &str) -> Result<(Provider, Option<String>), String> {
        let address = (host, 0).to_socket_addrs().ok().and_then(|mut found| found.next());
        let open = || {
            let address = address.ok_or("the name has no address")?;
            let select = match address.ip() {
                any if any.is_unspecified() => Select::Any,
                one => Select::Local(one),
            };
            Ibv::open(&select).map_err(|error| crate::chain(&error))
        };
        match self {
            Provider::Soft => Ok((Provider::Soft, None)),
            Provider::Ibv => open().map(|_| (Provider::Ibv, None)),
            // Which device is settled by the address that a source comes to.
            Provider::Auto => Ok(match open() {
                Ok(_) => (Provider::Auto, None),
                Err(reason) => (Provider::Soft, Some(reason)),
            }),
        }
    }
}

impl FromStr for Provider {
    type Err = Error;

    fn from_str(text: &str) -> Result<Provider, Error> {
        match text {
            "auto" => Ok(Provider::Auto),
            "ibv" => Ok(Provider::Ibv),
            "soft" => Ok(Provider::Soft),
            _ => {
                let reason = format!("`{text}` is no RDMA provider: expected auto, ibv or soft");
                Err(Error::new(Fault::Request, "", reason))
            }
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Provider::Auto => "auto",
            Provider::Ibv => "ibv",
            Provider::Soft => "soft",
        })
    }
}

/// How a source writes guest memory by RDMA.
#[derive(Clone, Copy, Debug)]
pub struct RdmaOptions {
    /// What it wants; [`Provider::Auto`] takes what the destination has.
    pub provider: Provider,
    /// Register all memory at the start, on both sides.
    pub pin_all: bool,
    /// A power of two from 1 MiB to 1 GiB.
    pub chunk_bytes: u64,
    /// Queue pairs, 1 to 64. The destination may grant fewer.
    pub queues: u16,
    /// Most memory that is registered at once without `pin_all`; two chunks are the least.
    pub pinned_bytes_max: u64,
}

impl Default for RdmaOptions {
    fn default() -> RdmaOptions {
        let config = SourceConfig::DEFAULT;
        RdmaOptions {
            provider: Provider::Auto,
            pin_all: false,
            chunk_bytes: config.chunk_bytes,
            queues: config.queues,
            pinned_bytes_max: config.pinned_bytes_max,
        }
    }
}

impl RdmaOptions {
    pub(super) fn config(&self) -> SourceConfig {
        SourceConfig {
            chunk_bytes: self.chunk_bytes,
            queues: self.queues,
            pinning: if self.pin_all { Pinning::All } else { Pinning::Dynamic },
            pinned_bytes_max: self.pinned_bytes_max,
            ..SourceConfig::DEFAULT
        }
    }
}

/// What a destination lets a source do by RDMA.
#[derive(Clone, Copy, Debug)]
pub struct RdmaAccept {
    /// By which provider.
    pub provider: Provider,
    /// Most queue pairs.
    pub queues_max: u16,
}

impl Default for RdmaAccept {
    fn default() -> RdmaAccept {
        let queues_max = DestinationConfig::DEFAULT.queues_max;
        RdmaAccept { provider: Provider::Auto, queues_max }
    }
}

impl RdmaAccept {
    pub(super) fn config(&self) -> DestinationConfig {
        DestinationConfig { queues_max: self.queues_max, ..DestinationConfig::DEFAULT }
    }
}
