//! `stop`, `cont`, `cancel`, `quit` and `resolve`: one command each to the control socket.

use crate::cli::ControlArgs;
use crate::failure::Failure;
use crate::out;
use crate::qmp::client::{Client, ClientError};
use std::time::{Duration, Instant};

/// How long `quit` waits for the process to have closed its socket.
const QUIT_MAX: Duration = Duration::from_secs(10);
/// How long `cancel` waits for the migration to have ended.
const CANCEL_MAX: Duration = Duration::from_secs(30);
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// `martlet stop`.
pub(crate) fn stop(args: &ControlArgs) -> Result<(), Failure> {
    Client::connect(&args.path)?.ask("stop")?;
    Ok(())
}

/// `martlet cont`.
pub(crate) fn cont(args: &ControlArgs) -> Result<(), Failure> {
    Client::connect(&args.path)?.ask("cont")?;
    Ok(())
}

/// `martlet cancel`: returns when the migration has ended, and fails if it ended otherwise.
pub(crate) fn cancel(args: &ControlArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.path)?;
    let before = super::follow::query(&mut client)?;
    if before.status.is_empty() || before.is_final() {
        return Err(Failure::Failed("no migration is running".to_owned()));
    }
    client.ask("migrate_cancel")?;
    let deadline = Instant::now() + CANCEL_MAX;
    loop {
        let snapshot = super::follow::query(&mut client)?;
        match snapshot.status.as_str() {
            "cancelled" => return Ok(()),
            "completed" => {
                return Err(Failure::Failed("too late: the guest has moved".to_owned()));
            }
            status if snapshot.is_final() => {
                let reason = snapshot.error_desc.unwrap_or_default();
                return Err(Failure::Failed(format!("the migration {status}: {reason}")));
            }
            _ if Instant::now() >= deadline => {
                return Err(Failure::Failed("the migration does not end".to_owned()));
            }
            _ => std::thread::sleep(LOOK_INTERVAL),
        }
    }
}

/// `martlet quit`: returns when the process has closed its control socket.
pub(crate) fn quit(args: &ControlArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.path)?;
    client.ask("quit")?;
    let deadline = Instant::now() + QUIT_MAX;
    while Instant::now() < deadline {
        match client.next_event(LOOK_INTERVAL) {
            Ok(_) => {}
            Err(ClientError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::Failed("the process does not end".to_owned()))
}

/// `martlet resolve`: says how the migration was settled.
pub(crate) fn resolve(args: &ControlArgs) -> Result<(), Failure> {
    let answer = Client::connect(&args.path)?.ask("x-resolve")?;
    match answer["status"].as_str() {
        Some("completed") => out(format_args!("the guest runs at the destination\n"))?,
        Some(_) | None => out(format_args!("the guest goes on here\n"))?,
    }
    Ok(())
}
