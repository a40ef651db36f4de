//! Connections of a migration: addresses, greetings, the control connection, data channels.
//!
//! ```text
//! connect_first / Listener::try_accept + Greeting + reply  every connection starts so
//!    ControlLink                                    messages, both ways
//!    PageSender ==> PageReceiver                    pages from guest memory to guest memory
//! ```
//!
//! Sockets never block: a call that may wait takes or names its bound.

mod address;
mod connection;
mod control;
mod data;
mod funnel;
mod greeting;
mod listener;
mod raw;
mod same_host;
mod socket_file;
mod stream;
mod target;
mod wake;

pub use address::{Address, ParseAddressError};
pub use connection::Connection;
pub use control::{ControlLink, ReceiveError};
pub use data::{Arrival, PageReceiver, PageSender, PagesReceiveError, Partly};
pub use greeting::{GREETING_MAX, Greeting, GreetingError, connect_all, connect_first, reply};
pub use listener::Listener;
pub use raw::{Incoming, Outgoing};
pub use socket_file::{SocketFile, SocketFileError, UNIX_PATH_MAX};
pub use stream::{STALL_MAX, Stream, monotonic_now, wait_any};
pub use target::{Target, Until};
pub use wake::Wake;

/// An error and its causes as one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
