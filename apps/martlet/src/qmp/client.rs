//! The client side of a control socket, as the commands of martlet use it.

use super::stream::{Next, ValueReader};
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
pub(crate) enum ClientError {
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
pub(crate) struct ClientEvent {
    /// E.g. `MIGRATION`.
    pub(crate) name: String,
    /// Its data, or null.
    pub(crate) data: Value,
}

impl ClientEvent {
    /// Whether it says that the guest was stopped for a switchover.
    pub(crate) fn begins_switchover(&self) -> bool {
        self.name == "STOP" || (self.name == "MIGRATION" && self.data["status"] == "device")
    }
}

/// A connection that has negotiated.
#[derive(Debug)]
pub(crate) struct Client {
    path: PathBuf,
    values: ValueReader<BufReader<UnixStream>>,
    events: VecDeque<ClientEvent>,
}

impl Client {
    /// Connects to a control socket and negotiates.
    pub(crate) fn connect(path: &Path) -> Result<Client, ClientError> {
        let no_server = |source| ClientError::NoServer { path: path.to_owned(), source };
        let stream = UnixStream::connect(path).map_err(no_server)?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT)).map_err(no_server)?;
        let mut client = Client {
            path: path.to_owned(),
            values: ValueReader::new(BufReader::new(stream)),
            events: VecDeque::new(),
        };
        let deadline = Instant::now() + REPLY_TIMEOUT;
        let greeting = client.read_object(deadline, "greeting")?;
        if greeting.get("QMP").is_none() {
            // A server that is full says so instead of greeting.
            return Err(match greeting["error"]["desc"].as_str() {
                Some(desc) => ClientError::Refused { desc: crate::failure::one_line(desc) },
                None => client.foreign("it does not greet as QMP does"),
            });
        }
        client.ask("qmp_capabilities")?;
        Ok(client)
    }

    /// Runs a command without arguments.
    pub(crate) fn ask(&mut self, command: &str) -> Result<Value, ClientError> {
        self.execute(command, &json!({}))
    }

    /// Runs a command and returns its result. Events that come meanwhile are kept.
    pub(crate) fn execute(
        &mut self,
        command: &str,
        arguments: &Value,
    ) -> Result<Value, ClientError> {
        let request = json!({ "execute": command, "arguments": arguments });
        let line = super::to_line(&request);
        let mut stream = self.values.get_ref().get_ref();
        stream.write_all(line.as_bytes()).map_err(|_| self.gone(command))?;
        let limit = if command.starts_with("x-resolve") { RESOLVE_TIMEOUT } else { REPLY_TIMEOUT };
        let deadline = Instant::now() + limit;
        loop {
            let mut object = self.read_object(deadline, command)?;
            if let Some(result) = object.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = object.get("error") {
                let desc = error["desc"].as_str().unwrap_or("no reason given");
                return Err(ClientError::Refused { desc: crate::failure::one_line(desc) });
            }
            self.keep_event(object);
        }
    }

    /// The next event, or `None` if none comes within `timeout`.
    pub(crate) fn next_event(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<ClientEvent>, ClientError> {
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
            match self.values.next() {
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
        ClientError::Foreign { path: self.path.clone(), reason: crate::failure::one_line(reason) }
    }
}

impl From<ClientError> for crate::failure::Failure {
    fn from(error: ClientError) -> crate::failure::Failure {
        crate::failure::Failure::Failed(error.to_string())
    }
}
