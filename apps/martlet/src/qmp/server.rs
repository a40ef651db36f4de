//! The server side of a control socket. Each client has a thread that reads and executes and one
//! that writes, so that a client that does not read holds up nobody else.

use super::clients::Clients;
use super::dispatch::{Mode, QmpError, execute};
use super::schema;
use crate::control::{Control, guarded, keep, spawn};
use martlet_qmp::{Next, VALUE_BYTES_MAX, ValueReader, to_line};
use martlet_transport::wait_any;
use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;

/// Lines that wait for a client to read them.
const OUTBOX_LINES_MAX: usize = 256;
/// A client that takes nothing for this long is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after the kernel refused to accept a client (too many open files, say).
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long the next client is waited for at a time.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// Serves clients of `listener` until the process ends, on threads of its own.
pub(crate) fn serve(listener: UnixListener, control: Arc<Control>) -> Arc<Clients> {
    let clients = Arc::new(Clients::default());
    let ours = Arc::clone(&clients);
    // A file that is open only to be closed when the host gives no other descriptor: its owner must
    // be able to end this process then.
    let mut spare = spare();
    let mut is_short = false;
    keep("control accept", move || {
        loop {
            let waited = wait_any(&mut [PollFd::new(&listener, PollFlags::IN)], WAIT_MAX);
            if matches!(waited, Ok(false)) {
                continue;
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    is_short = false;
                    serve_client(stream, &control, &ours);
                    if spare.is_none() {
                        spare = self::spare();
                    }
                }
                Err(_) if spare.take().is_some() => {}
                Err(error) => {
                    if !std::mem::replace(&mut is_short, true) {
                        let text = "cannot accept a client of the control socket; trying on";
                        tracing::warn!(%error, "{text}");
                    }
                    ours.evict_one();
                    thread::sleep(ACCEPT_RETRY);
                }
            }
        }
    });
    clients
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Starts the two threads of a client.
pub(crate) fn serve_client(stream: UnixStream, control: &Arc<Control>, clients: &Arc<Clients>) {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    // Relaxed: the numbers only have to differ.
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let stream = Arc::new(stream);
    if let Err(error) = stream.set_write_timeout(Some(WRITE_TIMEOUT)) {
        tracing::warn!(%error, "cannot set a client's timeout: disconnected");
        return;
    }
    let place = match clients.admit(id, &stream) {
        Ok(place) => place,
        Err(error) => {
            let _ = (&*stream).write_all(to_line(&failure(&error, None)).as_bytes());
            return;
        }
    };
    let (outbox, inbox) = sync_channel(OUTBOX_LINES_MAX);
    let client = Client {
        id,
        stream: Arc::clone(&stream),
        outbox,
        control: Arc::clone(control),
        clients: Arc::clone(clients),
    };
    spawn("control read", move || {
        guarded("control read", || client.run());
        client.leave();
    });
    spawn("control write", move || {
        write_lines(&stream, &inbox);
        let _ = stream.shutdown(Shutdown::Both);
        drop(place);
    });
}

/// Writes what comes until all senders are gone or the client is.
fn write_lines(mut stream: &UnixStream, inbox: &Receiver<Arc<str>>) {
    for line in inbox {
        if let Err(error) = stream.write_all(line.as_bytes()) {
            tracing::debug!(%error, "a client of the control socket is gone");
            return;
        }
    }
}

struct Client {
    id: u64,
    stream: Arc<UnixStream>,
    outbox: super::events::Outbox,
    control: Arc<Control>,
    clients: Arc<Clients>,
}

impl Client {
    fn run(&self) {
        self.say(&json!({ "QMP": { "version": schema::version(), "capabilities": [] } }));
        let mut mode = Mode::Negotiation;
        let mut values = ValueReader::new(BufReader::new(&*self.stream));
        loop {
            let is_there = match values.next_value() {
                Ok(Next::Value(bytes)) => {
                    self.clients.begin(self.id);
                    let is_there = self.answer(&bytes, &mut mode);
                    self.clients.end(self.id);
                    is_there
                }
                Ok(Next::TooLong) => {
                    let error = format!("a command is longer than {VALUE_BYTES_MAX} bytes");
                    self.say(&failure(&QmpError::generic(error), None));
                    break;
                }
                Ok(Next::Closed) | Err(_) => break,
            };
            if !is_there {
                break;
            }
        }
    }

    /// Frees its place, for which the writer waits.
    fn leave(&self) {
        self.control.events().unsubscribe(self.id);
        if self.clients.is_leaving(self.id) {
            let error = "disconnected: another client needs the place";
            self.say(&failure(&QmpError::generic(error), None));
        }
    }

    /// Answers a value. Returns whether the client is still there.
    fn answer(&self, value: &[u8], mode: &mut Mode) -> bool {
        let before = *mode;
        let reply = match serde_json::from_slice(value) {
            Ok(object) => self.reply(object, mode),
            Err(error) => failure(&QmpError::generic(format!("JSON parse error: {error}")), None),
        };
        if before == *mode {
            return self.say(&reply);
        }
        let (outbox, stream) = (self.outbox.clone(), Arc::clone(&self.stream));
        self.control.events().subscribe(self.id, outbox, stream, to_line(&reply).into())
    }

    fn reply(&self, object: Value, mode: &mut Mode) -> Value {
        let (name, arguments, id) = match take_apart(object) {
            Ok(parts) => parts,
            Err((error, id)) => return failure(&error, id),
        };
        match execute(&self.control, mode, &name, arguments) {
            Ok(value) => with_id(json!({ "return": value }), id),
            Err(error) => failure(&error, id),
        }
    }

    /// Puts a line into the outbox, and waits if that is full: a client that does not read gets
    /// no more of its commands executed.
    fn say(&self, object: &Value) -> bool {
        self.outbox.send(to_line(object).into()).is_ok()
    }
}

/// Takes `{"execute": name, "arguments": {...}, "id": any}` apart.
#[expect(clippy::type_complexity, reason = "three parts, or an error with the id")]
fn take_apart(object: Value) -> Result<(String, Value, Option<Value>), (QmpError, Option<Value>)> {
    let Value::Object(mut fields) = object else {
        return Err((QmpError::generic("QMP input must be a JSON object"), None));
    };
    let id = fields.remove("id");
    let error = |desc: &str| QmpError::generic(desc);
    let name = match fields.remove("execute") {
        Some(Value::String(name)) => name,
        Some(_) => return Err((error("QMP input member 'execute' must be a string"), id)),
        None if fields.contains_key("exec-oob") => {
            return Err((error("QMP input member 'exec-oob' is unexpected"), id));
        }
        None => return Err((error("QMP input lacks member 'execute'"), id)),
    };
    let arguments = match fields.remove("arguments") {
        None => json!({}),
        Some(arguments @ Value::Object(_)) => arguments,
        Some(_) => return Err((error("QMP input member 'arguments' must be an object"), id)),
    };
    if !fields.is_empty() {
        return Err((error("QMP input has a member that is unexpected"), id));
    }
    Ok((name, arguments, id))
}

fn failure(error: &QmpError, id: Option<Value>) -> Value {
    with_id(json!({ "error": { "class": error.class, "desc": error.desc } }), id)
}

fn with_id(mut reply: Value, id: Option<Value>) -> Value {
    if let (Some(id), Some(fields)) = (id, reply.as_object_mut()) {
        fields.insert("id".to_owned(), id);
    }
    reply
}
