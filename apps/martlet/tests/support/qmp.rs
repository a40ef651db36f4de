//! A client of a control socket, as far as these tests need one.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long any command may take. `x-resolve` asks another host.
const ANSWER_MAX: Duration = Duration::from_secs(90);

/// Why there is no result.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The process has closed the connection, most likely by its death.
    Gone,
    /// The process says no, and why.
    Refused(String),
    /// What must not be: no answer in time, or none that makes sense.
    Broken(String),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Gone => f.write_str("the process is gone"),
            Trouble::Refused(why) => write!(f, "refused: {why}"),
            Trouble::Broken(why) => f.write_str(why),
        }
    }
}

/// A connection that has negotiated.
pub(crate) struct Qmp(BufReader<UnixStream>);

impl Qmp {
    pub(crate) fn connect(path: &Path) -> Result<Qmp, Trouble> {
        let stream = UnixStream::connect(path).map_err(|_| Trouble::Gone)?;
        stream.set_read_timeout(Some(ANSWER_MAX)).map_err(|e| Trouble::Broken(e.to_string()))?;
        let mut qmp = Qmp(BufReader::new(stream));
        qmp.read()?;
        qmp.ask("qmp_capabilities")?;
        Ok(qmp)
    }

    pub(crate) fn ask(&mut self, command: &str) -> Result<Value, Trouble> {
        self.execute(command, &json!({}))
    }

    /// Runs a command. Events are passed over.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, Trouble> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.0.get_mut().write_all(line.as_bytes()).map_err(|_| Trouble::Gone)?;
        loop {
            let mut object = self.read()?;
            if let Some(result) = object.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(desc) = object["error"]["desc"].as_str() {
                return Err(Trouble::Refused(desc.to_owned()));
            }
        }
    }

    fn read(&mut self) -> Result<Value, Trouble> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => Err(Trouble::Gone),
            Ok(_) => {
                serde_json::from_str(&line).map_err(|e| Trouble::Broken(format!("{e}: {line}")))
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(Trouble::Broken(format!("no answer within {ANSWER_MAX:?}")))
            }
            Err(_) => Err(Trouble::Gone),
        }
    }
}
