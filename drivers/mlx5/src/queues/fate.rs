//! What went wrong with which queue, and how a VMM is told.

use crate::command::{CommandError, SubmitError};
use martlet_vdpa::VdpaError;

/// What went wrong with a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueFault {
    /// Which; `None` for what is about all of them.
    pub queue: Option<u16>,
    /// What.
    pub error: CommandError,
}

/// What went wrong during an operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    list: Vec<QueueFault>,
    /// What the host lacked.
    host: Option<String>,
}

impl Faults {
    pub(crate) fn add(&mut self, queue: usize, error: CommandError) {
        self.list.push(QueueFault { queue: Some(number(queue)), error });
    }

    pub(crate) fn add_general(&mut self, error: CommandError) {
        self.list.push(QueueFault { queue: None, error });
    }

    pub(crate) fn add_host(&mut self, reason: String) {
        self.host.get_or_insert(reason);
    }

    pub(crate) fn extend(&mut self, other: Faults) {
        self.list.extend(other.list);
        self.host = self.host.take().or(other.host);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.host.is_none()
    }

    /// All in one error.
    pub(crate) fn into_error(self, action: &'static str) -> VdpaError {
        if let Some(reason) = self.host {
            return VdpaError::Host { action, reason };
        }
        let is_gone = |fault: &QueueFault| matches!(fault.error, CommandError::Gone { .. });
        if self.list.iter().any(is_gone) {
            return VdpaError::Gone { action };
        }
        let about = |fault: &QueueFault| match fault.queue {
            Some(queue) => format!("queue {queue}: {}", full(&fault.error)),
            None => full(&fault.error),
        };
        let mut parts: Vec<String> = self.list.iter().take(LISTED_MAX).map(about).collect();
        if self.list.len() > LISTED_MAX {
            parts.push(format!("and {} more", self.list.len() - LISTED_MAX));
        }
        match self.list.iter().find(|f| matches!(f.error, CommandError::Timeout { .. })) {
            Some(silent) => vdpa_error(action, &silent.error),
            None => VdpaError::Device { action, reason: parts.join("; ") },
        }
    }
}

/// Queues that an error names one by one.
const LISTED_MAX: usize = 4;

/// A queue's number, as a VMM counts.
pub(crate) fn number(queue: usize) -> u16 {
    u16::try_from(queue).expect("a device has fewer queues")
}

/// An error with what is behind it.
fn full(error: &CommandError) -> String {
    match error {
        CommandError::NotIssued { because, .. } => format!("{error}: {because}"),
        other => other.to_string(),
    }
}

/// One failed command as a VMM sees it.
pub(crate) fn vdpa_error(action: &'static str, error: &CommandError) -> VdpaError {
    match error {
        CommandError::Gone { .. } | CommandError::NotIssued { because: SubmitError::Gone, .. } => {
            VdpaError::Gone { action }
        }
        CommandError::NotIssued { because: SubmitError::Tainted, .. } => {
            VdpaError::Device { action, reason: full(error) }
        }
        CommandError::NotIssued { .. } => VdpaError::Host { action, reason: full(error) },
        CommandError::Timeout { waited, .. } => {
            let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            VdpaError::Timeout { action, waited_ms }
        }
        other => VdpaError::Device { action, reason: full(other) },
    }
}
