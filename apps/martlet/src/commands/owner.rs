//! `stop`, `cont`, `cancel`, `quit` and `resolve`: one command each to the control socket.

use super::follow::{query, read, unknown};
use crate::cli::{ControlArgs, QuitArgs, ResolveArgs};
use crate::control::Verdict;
use crate::failure::{Failure, one_line};
use crate::log::note;
use crate::output::show;
use crate::snapshot::Snapshot;
use martlet_qmp::{Client, ClientError};
use serde_json::{Value, json};
use std::io::IsTerminal;
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

/// `martlet powerdown`: returns when the button was pressed.
pub(crate) fn powerdown(args: &ControlArgs) -> Result<(), Failure> {
    Client::connect(&args.path)?.ask("system_powerdown")?;
    Ok(())
}

/// `martlet cancel`: returns when the migration has ended, and fails if it ended otherwise.
pub(crate) fn cancel(args: &ControlArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.path)?;
    let before = query(&mut client)?;
    if before.status.is_empty() || before.is_final() {
        return Err(Failure::Failed("no migration is running".to_owned()));
    }
    // From here on it may end in any way.
    let end = match client.ask("migrate_cancel") {
        Err(refused @ ClientError::Refused { .. }) => return Err(refused.into()),
        asked => asked.map_err(Failure::from).and_then(|_| wait_for_end(&mut client)),
    };
    cancelled(&end.map_err(|failure| unknown(&failure))?)
}

/// The first look that shows the migration's end, or the last one that is waited for.
fn wait_for_end(client: &mut Client) -> Result<Snapshot, Failure> {
    let deadline = Instant::now() + CANCEL_MAX;
    loop {
        let snapshot = query(client)?;
        if snapshot.is_final() || Instant::now() >= deadline {
            return Ok(snapshot);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// What came of a cancel.
fn cancelled(end: &Snapshot) -> Result<(), Failure> {
    let reason = one_line(end.error_desc.as_deref().unwrap_or("no reason given"));
    match end.status.as_str() {
        "cancelled" => Ok(()),
        "completed" => Err(Failure::Failed("too late: the guest has moved".to_owned())),
        "failed" => Err(Failure::Failed(format!("the migration failed: {reason}"))),
        "x-undecided" => Err(Failure::Undecided(format!(
            "it is undecided where the guest runs, see `martlet resolve --help`: {reason}"
        ))),
        "x-given-up" => Err(Failure::Undecided(format!("the guest was given up: {reason}"))),
        _ => Err(Failure::Undecided("the migration does not end; ask again".to_owned())),
    }
}

/// `martlet quit`: returns when the process has closed its control socket.
pub(crate) fn quit(args: &QuitArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.control.path)?;
    let before = query(&mut client)?;
    let answer = client.execute("quit", &json!({ "x-force": args.force }));
    answer.map_err(|error| match error {
        ClientError::Refused { desc } if before.status == "x-undecided" => Failure::Undecided(desc),
        error => error.into(),
    })?;
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
            answer => read::<Snapshot>(answer?, "query-migrate")?,
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

/// `martlet resolve`: says what became of the guest; if nobody knows, an operator may decide.
pub(crate) fn resolve(args: &ResolveArgs) -> Result<(), Failure> {
    let verdict = args.verdict();
    let mut client = Client::connect(&args.control.path)?;
    let answer = match verdict {
        None => client.ask("x-resolve"),
        Some(verdict) => {
            confirm(verdict, args.confirmed)?;
            match verdict {
                Verdict::RunHere => {
                    let arguments = json!({ "destination-never-runs-it": true });
                    client.execute("x-resolve-run-here", &arguments)
                }
                Verdict::GiveUp => {
                    let arguments = json!({ "never-runs-here-again": true });
                    client.execute("x-resolve-give-up", &arguments)
                }
            }
        }
    };
    let answer = answer.map_err(|error| match error {
        ClientError::Refused { .. } => error.into(),
        // It may have been settled all the same.
        _ => Failure::Undecided(format!("{error}; what became of the guest is not known here")),
    })?;
    show(format_args!("{}\n", settled(verdict, &answer)?));
    Ok(())
}

/// Tells what has to be true, and has it confirmed.
fn confirm(verdict: Verdict, confirmed: bool) -> Result<(), Failure> {
    note(format_args!("if the destination does not answer: {}", verdict.meaning()));
    if confirmed {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        let how = "say --confirmed if that is so (there is no terminal to ask at)";
        return Err(Failure::Usage(how.to_owned()));
    }
    note(format_args!("type `yes` if that is so:"));
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(|e| Failure::because("no answer", &e))?;
    if answer.trim() == "yes" {
        Ok(())
    } else {
        Err(Failure::Cancelled("nothing was done".to_owned()))
    }
}

/// What came of `x-resolve`, in words; as a failure if that is no success.
fn settled(verdict: Option<Verdict>, answer: &Value) -> Result<String, Failure> {
    let status = answer["status"].as_str().unwrap_or("unknown");
    let unsaid = if status == "cancelled" { "cancelled by its owner" } else { "no reason given" };
    let reason = one_line(answer["error-desc"].as_str().unwrap_or(unsaid));
    match (verdict, status) {
        (None, "completed") => Ok("the guest moved: it is at the destination".to_owned()),
        (Some(_), "completed") => {
            let words = "nothing to decide: the destination answered, and the guest is there";
            Err(Failure::Failed(words.to_owned()))
        }
        (Some(Verdict::RunHere), "failed") => Ok(format!("the guest runs here again: {reason}")),
        (Some(Verdict::GiveUp), "x-given-up") => Ok(reason),
        (_, "x-given-up") => Err(Failure::Undecided(reason)),
        (_, "x-undecided") => Err(Failure::Undecided(format!(
            "still undecided, so the guest stays stopped here: {reason}"
        ))),
        (_, _) => {
            Err(Failure::Failed(format!("the guest did not move, it is here as before: {reason}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words and the exit status's kind.
    fn end(verdict: Option<Verdict>, status: &str) -> (String, String) {
        let answer = json!({"status": status, "error-desc": "the link broke"});
        match settled(verdict, &answer) {
            Ok(words) => (words, "0".to_owned()),
            Err(failure) => (failure.to_string(), (failure.exit_status() as u8).to_string()),
        }
    }

    #[test]
    fn each_end_has_its_words_and_its_exit_status() {
        let (run_here, give_up) = (Some(Verdict::RunHere), Some(Verdict::GiveUp));
        let here = "the guest did not move, it is here as before: ";
        let answered = "nothing to decide: the destination answered, and the guest is there";
        let open = "still undecided, so the guest stays stopped here: the link broke";
        for (verdict, status, words, exit) in [
            (None, "completed", "the guest moved: it is at the destination", "0"),
            (None, "failed", &format!("{here}the link broke"), "1"),
            (None, "cancelled", &format!("{here}the link broke"), "1"),
            (None, "x-undecided", open, "4"),
            (None, "x-given-up", "the link broke", "4"),
            (run_here, "failed", "the guest runs here again: the link broke", "0"),
            (run_here, "completed", answered, "1"),
            (run_here, "x-undecided", open, "4"),
            (give_up, "x-given-up", "the link broke", "0"),
            (give_up, "completed", answered, "1"),
            (give_up, "failed", &format!("{here}the link broke"), "1"),
            (give_up, "x-undecided", open, "4"),
        ] {
            assert_eq!(end(verdict, status), (words.to_owned(), exit.to_owned()), "{status}");
        }
    }

    #[test]
    fn a_cancel_tells_what_is_known() {
        for (status, exit) in [
            ("cancelled", 0),
            ("completed", 1),
            ("failed", 1),
            ("x-undecided", 4),
            ("x-given-up", 4),
            ("cancelling", 4),
            ("device", 4),
        ] {
            let end = Snapshot { status: status.to_owned(), ..Snapshot::default() };
            let got = cancelled(&end).map_or_else(|failure| failure.exit_status() as u8, |()| 0);
            assert_eq!(got, exit, "{status}");
        }
    }
}
