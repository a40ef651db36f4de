//! A client of the control protocol that both VMMs speak.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a VMM may take to open its control socket.
const START_MAX: Duration = Duration::from_secs(20);

pub(super) struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects as soon as the socket is there.
    pub(super) fn connect(path: &Path) -> Result<Qmp, String> {
        let deadline = Instant::now() + START_MAX;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    return Err(format!("cannot connect to {}: {error}", path.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut qmp = Qmp { reader: BufReader::new(stream) };
        qmp.read()?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns what it returned.
    pub(super) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        let request = json!({"execute": command, "arguments": arguments});
        self.reader
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .map_err(|error| format!("{command}: {error}"))?;
        loop {
            let reply = self.read()?;
            if let Some(error) = reply.get("error") {
                return Err(format!("{command}: {error}"));
            }
            if let Some(value) = reply.get("return") {
                return Ok(value.clone());
            }
        }
    }

    fn read(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => Err("the VMM closed its control socket".to_owned()),
            Ok(_) => {
                serde_json::from_str(&line).map_err(|error| format!("control socket: {error}"))
            }
            Err(error) => Err(format!("control socket: {error}")),
        }
    }
}
