//! Why a command ends without success, and with which exit status.

use crate::report_json::OutcomeJson;
use martlet_qmp::ClientError;
pub(crate) use martlet_qmp::one_line;
use std::error::Error;
use std::io;
use std::process::ExitCode;

/// With which status the command ends. Numbers are an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// It was done; of a migration, the guest moved.
    Done = 0,
    /// It was not done, the guest is where it was; or a guest that moved was damaged.
    Failed = 1,
    /// The command line can't be meant, and nothing was begun.
    Usage = 2,
    /// Its owner called it off: the guest is where it was.
    Cancelled = 3,
    /// It is not known which side has the guest, or it was given up here.
    Undecided = 4,
}

/// The same for people, under `--help`.
pub(crate) const EXIT_STATUS_HELP: &str = "\
Exit status: 0 it was done, 1 it was not, 2 the command line can't be meant, 3 called off by its
owner, 4 undecided which side has the guest.";

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> ExitCode {
        ExitCode::from(status as u8)
    }
}

/// Why a command ends without success.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The command line can't be meant.
    #[error("{0}")]
    Usage(String),
    /// It did not work.
    #[error("{0}")]
    Failed(String),
    /// Its owner called it off.
    #[error("{0}")]
    Cancelled(String),
    /// It is not known which side has the guest.
    #[error("{0}")]
    Undecided(String),
    /// A migration ended so, or a guest was damaged, and the output already says it.
    #[error("the migration ended as {}", .0.word())]
    Reported(OutcomeJson),
    /// Standard output can't be written to. A closed pipe is no error: the reader had enough.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// With which status the command ends.
    pub(crate) fn exit_status(&self) -> ExitStatus {
        match self {
            Failure::Usage(_) => ExitStatus::Usage,
            Failure::Output(_) if self.is_said() => ExitStatus::Done,
            Failure::Failed(_) | Failure::Output(_) => ExitStatus::Failed,
            Failure::Cancelled(_) => ExitStatus::Cancelled,
            Failure::Undecided(_) => ExitStatus::Undecided,
            Failure::Reported(outcome) => match outcome {
                // It moved, and what moved is not what it was.
                OutcomeJson::Completed | OutcomeJson::Failed => ExitStatus::Failed,
                OutcomeJson::Cancelled => ExitStatus::Cancelled,
                OutcomeJson::Undecided | OutcomeJson::GivenUp => ExitStatus::Undecided,
            },
        }
    }

    /// Whether there is nothing left to say.
    pub(crate) fn is_said(&self) -> bool {
        match self {
            Failure::Reported(_) => true,
            Failure::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            Failure::Usage(_)
            | Failure::Failed(_)
            | Failure::Cancelled(_)
            | Failure::Undecided(_) => false,
        }
    }

    /// How a migration ended that ended so.
    pub(crate) fn outcome(&self) -> OutcomeJson {
        match self {
            Failure::Reported(outcome) => *outcome,
            Failure::Cancelled(_) => OutcomeJson::Cancelled,
            Failure::Undecided(_) => OutcomeJson::Undecided,
            Failure::Usage(_) | Failure::Failed(_) | Failure::Output(_) => OutcomeJson::Failed,
        }
    }

    /// A failure with what was done and the whole chain of reasons behind it, in one line.
    pub(crate) fn because(what: impl std::fmt::Display, reason: &dyn Error) -> Failure {
        Failure::Failed(format!("{what}: {}", chain(reason)))
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        Failure::Failed(error.to_string())
    }
}

/// An error and its sources, in one line. A source that the error's own text already contains is
/// not said twice.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = source.source();
    }
    one_line(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open the kernel")]
    struct Outer(#[source] io::Error);

    #[test]
    fn each_end_has_its_exit_status() {
        let text = String::new;
        let output = |kind: io::ErrorKind| Failure::Output(kind.into());
        for (failure, status) in [
            (output(io::ErrorKind::BrokenPipe), 0),
            (output(io::ErrorKind::StorageFull), 1),
            (Failure::Failed(text()), 1),
            (Failure::Reported(OutcomeJson::Completed), 1),
            (Failure::Reported(OutcomeJson::Failed), 1),
            (Failure::Usage(text()), 2),
            (Failure::Cancelled(text()), 3),
            (Failure::Reported(OutcomeJson::Cancelled), 3),
            (Failure::Undecided(text()), 4),
            (Failure::Reported(OutcomeJson::Undecided), 4),
            (Failure::Reported(OutcomeJson::GivenUp), 4),
        ] {
            assert_eq!(failure.exit_status() as u8, status, "{failure:?}");
        }
        for status in 0..=4 {
            assert!(EXIT_STATUS_HELP.contains(&format!(" {status} ")), "{status} is explained");
        }
    }

    #[test]
    fn a_chain_is_one_line_without_repetition() {
        let error = Outer(io::Error::other("no\nsuch file"));
        assert_eq!(chain(&error), "open the kernel: no such file");
    }
}
