//! The client side of a control socket. Nothing waits longer than it was told, whatever the server
//! does.

use crate::stream::{Next, ValueReader};
use crate::{one_line, to_line};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a server may take for a command. None of them waits for a migration.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// How long `x-resolve` may take: it waits for the destination's answer.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(120);
/// Events kept while a reply is waited for; older ones are dropped.
const EVENTS_KEPT_MAX: usize = 4096;
/// Shortest wait that a socket's timeout can say.
const WAIT_MIN: Duration = Duration::from_millis(1);

/// Why a command could not be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody serves the socket.
    #[error("no martlet at {}: {source}", path.display())]
    NoServer {
        /// The socket.
        path: PathBuf,
        /// What connecting to it gave.
        source: io::Error,
    },
    /// The server went away.
    #[error("the martlet at {} went away while it {during}", path.display())]
    Gone {
        /// The socket.
        path: PathBuf,
        /// What was being done.
        during: String,
    },
    /// The server did not answer in time.
    #[error("the martlet at {} does not answer {command}", path.display())]
    Timeout {
        /// The socket.
        path: PathBuf,
        /// What was asked.
        command: String,
    },
    /// The server refused the command.
    #[error("{desc}")]
    Refused {
        /// Why.
        desc: String,
    },
    /// What serves the socket does not speak QMP.
    #[error("{} is no control socket: {reason}", path.display())]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// What came.
        reason: String,
    },
}

/// An event of the server.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientEvent {
    /// E.g. `MIGRATION`.
    pub name: String,
    /// Its data, or null.
    pub data: Value,
}

impl ClientEvent {
    /// Whether it says that the guest was stopped for a switchover.
    pub fn begins_switchover(&self) -> bool {
        self.name == "STOP" || (self.name == "MIGRATION" && self.data["status"] == "device")
    }
}

/// A connection that has negotiated.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    reply_max: Duration,
    values: ValueReader<BufReader<UnixStream>>,
    events: VecDeque<ClientEvent>,
}

impl Client {
    /// Connects to a control socket and negotiates. Each command is given 20 s.
    ///
    /// # Errors
    ///
    /// Nobody serves the socket, or who does is no QMP server, takes no client, or is too slow.
    pub fn connect(path: &Path) -> Result<Client, ClientError> {
        Client::connect_within(path, REPLY_TIMEOUT)
    }

    /// As [`Client::connect`], with another time that the connection and each command may take.
    ///
    /// # Errors
    ///
    /// As [`Client::connect`].
    pub fn connect_within(path: &Path, reply_max: Duration) -> Result<Client, ClientError> {
        let mut client = Client {
            path: path.to_owned(),
            reply_max,
            values: ValueReader::new(BufReader::new(open(path, reply_max)?)),
            events: VecDeque::new(),
        };
        let deadline = Instant::now() + reply_max;
        let greeting = client.read_object(deadline, "greeting")?;
        if greeting.get("QMP").is_none() {
            // A server that is full says so instead of greeting.
            return Err(match greeting["error"]["desc"].as_str() {
                Some(desc) => ClientError::Refused { desc: one_line(desc) },
                None => client.foreign("it does not greet as QMP does"),
            });
        }
        client.ask("qmp_capabilities")?;
        Ok(client)
    }

    /// Runs a command without arguments.
    ///
    /// # Errors
    ///
    /// As [`Client::execute`].
    pub fn ask(&mut self, command: &str) -> Result<Value, ClientError> {
        self.execute(command, &json!({}))
    }

    /// Runs a command and returns its result. Events that come meanwhile are kept.
    ///
    /// # Errors
    ///
    /// The server refuses the command, went away or is too slow.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, ClientError> {
        let request = json!({ "execute": command, "arguments": arguments });
        let line = to_line(&request);
        let mut stream = self.values.get_ref().get_ref();
        stream.write_all(line.as_bytes()).map_err(|_| self.gone(command))?;
        let asks_another_host = command.starts_with("x-resolve");
        let limit = if asks_another_host { RESOLVE_TIMEOUT } else { Duration::ZERO };
        let deadline = Instant::now() + limit.max(self.reply_max);
        loop {
            let mut object = self.read_object(deadline, command)?;
            if let Some(result) = object.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = object.get("error") {
                let desc = error["desc"].as_str().unwrap_or("no reason given");
                return Err(ClientError::Refused { desc: one_line(desc) });
            }
            self.keep_event(object);
        }
    }

    /// The next event, or `None` if none comes within `timeout`.
    ///
    /// # Errors
    ///
    /// The server went away.
    pub fn next_event(&mut self, timeout: Duration) -> Result<Option<ClientEvent>, ClientError> {
        let deadline = Instant::now() + timeout;
        while self.events.is_empty() {
            match self.read_object(deadline, "events") {
                Ok(object) => self.keep_event(object),
                Err(ClientError::Timeout { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(self.events.pop_front())
    }

    fn keep_event(&mut self, mut object: Value) {
        let Some(name) = object.get("event").and_then(Value::as_str).map(str::to_owned) else {
            return;
        };
        if self.events.len() >= EVENTS_KEPT_MAX {
            self.events.pop_front();
        }
        self.events.push_back(ClientEvent { name, data: object["data"].take() });
    }

    /// Reads one object. One that is cut by the deadline goes on at the next call.
    fn read_object(&mut self, deadline: Instant, command: &str) -> Result<Value, ClientError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(WAIT_MIN);
            let set = self.values.get_ref().get_ref().set_read_timeout(Some(left));
            set.map_err(|_| self.gone(command))?;
            match self.values.next_value() {
                Ok(Next::Value(bytes)) => {
                    let object = serde_json::from_slice(&bytes);
                    return object.map_err(|e| self.foreign(&format!("its answer: {e}")));
                }
                Ok(Next::TooLong) => return Err(self.foreign("its answer is too long")),
                Ok(Next::Closed) => return Err(self.gone(command)),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        let (path, command) = (self.path.clone(), command.to_owned());
                        return Err(ClientError::Timeout { path, command });
                    }
                }
                Err(_) => return Err(self.gone(command)),
            }
        }
    }

    fn gone(&self, command: &str) -> ClientError {
        let during = match command {
            "events" => "was watched".to_owned(),
            command => format!("was asked for {command}"),
        };
        ClientError::Gone { path: self.path.clone(), during }
    }

    fn foreign(&self, reason: &str) -> ClientError {
        ClientError::Foreign { path: self.path.clone(), reason: one_line(reason) }
    }
}

/// A connection to the socket. The kernel lets a client wait for room in a listener's queue as
/// long as the client may be blocked in a write, so that limit is set first.
fn open(path: &Path, limit: Duration) -> Result<UnixStream, ClientError> {
    let no_server = |source| ClientError::NoServer { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|e| no_server(e.into()))?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let stream = UnixStream::from(socket.map_err(|e| no_server(e.into()))?);
    stream.set_write_timeout(Some(limit)).map_err(no_server)?;
    loop {
        match connect(&stream, &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let command = "a new client".to_owned();
                return Err(ClientError::Timeout { path: path.to_owned(), command });
            }
            Err(error) => return Err(no_server(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

    use super::*;
    use rustix::net::{bind, listen};

    #[test]
    fn a_server_that_takes_no_client_is_not_waited_for() {
        let name = format!("martlet-qmp-{}-full", std::process::id());
        let path = std::env::temp_dir().join(name);
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let listener = socket.unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 0).unwrap();
        // The queue has one place.
        let _first = UnixStream::connect(&path).unwrap();
        let error = Client::connect_within(&path, Duration::from_millis(50)).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        let words = format!("the martlet at {} does not answer a new client", path.display());
        assert_eq!(error.to_string(), words);
    }
}
