//! Why a command ends without success, and with which exit status.

use crate::report_json::OutcomeJson;
use std::error::Error;
use std::io;

/// Exit status for a migration that failed, and for everything else that went wrong.
const EXIT_FAILURE: u8 = 1;
/// Exit status for a command line that can't be meant.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit status for what its owner called off: the guest is where it was.
const EXIT_CANCELLED: u8 = 3;
/// Exit status where it is not known which side has the guest.
const EXIT_UNDECIDED: u8 = 4;

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
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Failure::Usage(_) => EXIT_USAGE,
            Failure::Output(_) if self.is_said() => 0,
            Failure::Failed(_) | Failure::Output(_) => EXIT_FAILURE,
            Failure::Cancelled(_) => EXIT_CANCELLED,
            Failure::Undecided(_) => EXIT_UNDECIDED,
            Failure::Reported(outcome) => match outcome {
                // It moved, and what moved is not what it was.
                OutcomeJson::Completed | OutcomeJson::Failed => EXIT_FAILURE,
                OutcomeJson::Cancelled => EXIT_CANCELLED,
                OutcomeJson::Undecided | OutcomeJson::GivenUp => EXIT_UNDECIDED,
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

/// The text without line breaks and control characters, which a peer may have put there.
pub(crate) fn one_line(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.trim().chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open the kernel")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_chain_is_one_line_without_repetition() {
        let error = Outer(io::Error::other("no\nsuch file"));
        assert_eq!(chain(&error), "open the kernel: no such file");
    }
}
