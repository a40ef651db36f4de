//! Following a migration through its control socket.

use crate::cli::MigrateArgs;
use crate::failure::Failure;
use crate::parameters::Parameters;
use crate::report_json::{OutcomeJson, ReportJson};
use crate::snapshot::Snapshot;
use crate::view::progress::MigrationProgress;
use martlet_qmp::{Client, ClientError};
use martlet_transport::{Address, UNIX_PATH_MAX};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How often progress is asked for. The end and each round are events and come at once; asking
/// more often would take time from a switchover that goes on meanwhile.
const ASK_INTERVAL: Duration = Duration::from_millis(100);
/// How long after its end a migration's report may take: the destination says a last word.
const REPORT_MAX: Duration = Duration::from_secs(10);
/// Between two looks for a report that is not there yet.
const REPORT_INTERVAL: Duration = Duration::from_millis(2);

/// How a migration is to be done.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    /// Where to.
    pub(crate) to: &'a Address,
    /// How; by default where it says nothing.
    pub(crate) parameters: Parameters,
    /// The control socket where it is asked again what has become of a command without an answer.
    pub(crate) ask_again_at: Option<&'a Path>,
}

impl<'a> Request<'a> {
    /// What `martlet migrate` asks for.
    pub(crate) fn of(args: &'a MigrateArgs) -> Request<'a> {
        let ask_again_at = Some(args.control.path.as_path());
        Request { to: &args.to, parameters: Parameters::from(args), ask_again_at }
    }
}

/// Starts a migration and follows it to its end. Each signal that `interrupts` counts asks for a
/// cancel.
pub(crate) fn migrate(
    client: &mut Client,
    request: &Request<'_>,
    progress: &mut MigrationProgress,
    interrupts: &AtomicU32,
) -> Result<ReportJson, Failure> {
    let to = request.to.absolute().map_err(|e| Failure::because(request.to, &e))?;
    if let Address::Unix(path) = &to
        && path.as_os_str().len() > UNIX_PATH_MAX
    {
        let text = format!("{to}: the path of a socket has at most {UNIX_PATH_MAX} bytes");
        return Err(Failure::Usage(text));
    }
    // In one command, so that a migration that runs already keeps its own.
    let arguments = json!({ "uri": to.to_string(), "x-parameters": request.parameters });
    let before = query(client)?;
    let result = match client.execute("migrate", &arguments) {
        Ok(_) => follow(client, progress, interrupts),
        Err(refused @ ClientError::Refused { .. }) => return Err(refused.into()),
        // It may have begun all the same. Only of a first migration it can be told that it has.
        Err(unanswered) => match request.ask_again_at.and_then(begun) {
            Some(mut again) if !before.is_of_source() => follow(&mut again, progress, interrupts),
            _ => Err(unanswered.into()),
        },
    };
    progress.clear();
    // It goes on without us, or has died with the guest: from here that can't be told.
    result.map_err(|failure| unknown(&failure))
}

/// A second connection, if what is asked there has a migration.
fn begun(control: &Path) -> Option<Client> {
    let mut client = Client::connect(control).ok()?;
    query(&mut client).ok()?.is_of_source().then_some(client)
}

/// What a command ends with that does not know what became of a migration.
pub(crate) fn unknown(failure: &Failure) -> Failure {
    Failure::Undecided(format!(
        "{failure}; what became of the migration is not known here: `martlet status` tells, of this \
         process or of the destination's"
    ))
}

fn follow(
    client: &mut Client,
    progress: &mut MigrationProgress,
    interrupts: &AtomicU32,
) -> Result<ReportJson, Failure> {
    let mut cancelled = false;
    loop {
        let event = client.next_event(ASK_INTERVAL)?;
        // Relaxed: a number that only grows; nothing else hangs on it.
        if interrupts.load(Ordering::Relaxed) > 0 && !cancelled {
            cancelled = true;
            client.ask("migrate_cancel")?;
        }
        // The guest is stopped: every question now would make that longer.
        if event.is_some_and(|event| event.begins_switchover()) {
            continue;
        }
        let snapshot = query(client)?;
        progress.update(&snapshot);
        if snapshot.is_final() {
            return report(client, snapshot);
        }
    }
}

fn report(client: &mut Client, mut snapshot: Snapshot) -> Result<ReportJson, Failure> {
    let deadline = Instant::now() + REPORT_MAX;
    loop {
        if let Some(report) = snapshot.x_martlet {
            return Ok(report);
        }
        if Instant::now() >= deadline {
            let outcome = match snapshot.status.as_str() {
                "completed" => OutcomeJson::Completed,
                "cancelled" => OutcomeJson::Cancelled,
                "failed" => OutcomeJson::Failed,
                _ => OutcomeJson::Undecided,
            };
            return Ok(ReportJson::without_figures(outcome, snapshot.error_desc));
        }
        std::thread::sleep(REPORT_INTERVAL);
        snapshot = query(client)?;
    }
}

/// `query-migrate`.
pub(crate) fn query(client: &mut Client) -> Result<Snapshot, Failure> {
    read(client.ask("query-migrate")?, "query-migrate")
}

/// A result as a type of ours; another version of martlet may answer.
pub(crate) fn read<T: serde::de::DeserializeOwned>(
    value: Value,
    command: &str,
) -> Result<T, Failure> {
    serde_json::from_value(value)
        .map_err(|e| Failure::because(format_args!("the answer to {command}"), &e))
}
