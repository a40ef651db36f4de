//! `stop`, `cont`, `cancel`, `quit` and `resolve`: one command each to the control socket.

use crate::cli::{ControlArgs, QuitArgs};
use crate::failure::{Failure, one_line};
use crate::out;
use crate::qmp::client::{Client, ClientError};
use crate::snapshot::Snapshot;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long `quit` waits for the process to have closed its socket.
const QUIT_MAX: Duration = Duration::from_secs(10);
/// How long `cancel` waits for the migration to have ended.
const CANCEL_MAX: Duration = Duration::from_secs(30);
/// Between two looks at a process that is to end; its end is noticed at once.
const QUIT_LOOK_INTERVAL: Duration = Duration::from_millis(500);
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
pub(crate) fn quit(args: &QuitArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.control.path)?;
    let before = super::follow::query(&mut client)?;
    client.execute("quit", &json!({ "x-force": args.force }))?;
    let mut deadline = Instant::now() + QUIT_MAX;
    loop {
        match client.next_event(QUIT_LOOK_INTERVAL) {
            Ok(Some(_)) => continue,
            Ok(None) => {}
            Err(ClientError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let snapshot = match client.ask("query-migrate") {
            Err(ClientError::Gone { .. }) => return Ok(()),
            answer => super::follow::read::<Snapshot>(answer?, "query-migrate")?,
        };
        if snapshot.status == "x-undecided" {
            let text = "the process does not end: it is undecided where its guest runs, see \
                        `martlet resolve --help`";
            return Err(Failure::Undecided(text.to_owned()));
        }
        let is_destination = !snapshot.socket_address.is_empty();
        if is_destination && snapshot.status == "completed" && before.status != "completed" {
            let text = "the process does not end: a guest has just arrived there";
            return Err(Failure::Failed(text.to_owned()));
        }
        // A migration that is in its switchover is waited for.
        if !snapshot.status.is_empty() && !snapshot.is_final() {
            deadline = Instant::now() + QUIT_MAX;
        }
        if Instant::now() >= deadline {
            return Err(Failure::Failed("the process does not end".to_owned()));
        }
    }
}

/// `martlet resolve`: says what became of the guest.
pub(crate) fn resolve(args: &ControlArgs) -> Result<(), Failure> {
    settled(&Client::connect(&args.path)?.ask("x-resolve")?)
}

/// What `x-resolve` answered, in words and as an exit status.
fn settled(answer: &Value) -> Result<(), Failure> {
    let reason = one_line(answer["error-desc"].as_str().unwrap_or("no reason given"));
    match answer["status"].as_str() {
        Some("completed") => out(format_args!("the guest moved: it is at the destination\n")),
        Some("x-undecided") => Err(Failure::Undecided(format!(
            "still undecided, so the guest stays stopped here: {reason}"
        ))),
        Some("cancelled") => Err(Failure::Failed(
            "the guest did not move, it is here as before: cancelled by its owner".to_owned(),
        )),
        Some(_) | None => {
            Err(Failure::Failed(format!("the guest did not move, it is here as before: {reason}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_words_and_its_exit_status() {
        let end =
            |status: &str| settled(&json!({"status": status, "error-desc": "the link broke"}));
        assert!(matches!(end("completed"), Ok(())));
        for (status, words) in [
            ("failed", "the guest did not move, it is here as before: the link broke"),
            ("cancelled", "the guest did not move, it is here as before: cancelled by its owner"),
        ] {
            assert!(matches!(end(status), Err(Failure::Failed(said)) if said == words), "{status}");
        }
        let open = "still undecided, so the guest stays stopped here: the link broke";
        assert!(matches!(end("x-undecided"), Err(Failure::Undecided(said)) if said == open));
    }
}
