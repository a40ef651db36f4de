//! The error of everything that a migration asks of somebody, and of the migration itself.

use martlet_protocol::Failure;
use martlet_ram::{RamError, TrackError};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Whose fault an [`Error`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The other side's, or of what is between the two.
    Peer,
    /// This host's: its kernel did not give or do what was asked of it, or a page of guest memory
    /// is lost.
    Host,
    /// The VMM's, or of the guest in it.
    Vmm,
    /// A device's.
    Device,
    /// Of whoever asked: it can't be done as it was asked for.
    Request,
    /// Nobody's: the owner did not want it any more.
    Cancelled,
}

/// Why something could not be done: whose fault that is, what was being done, why it failed, and
/// with what it began. Displays as one line without its source, which [`Error::to_line`] adds.
#[derive(Clone, Debug)]
pub struct Error {
    fault: Fault,
    doing: Cow<'static, str>,
    reason: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error with its reason, one line with the values concerned. `doing` is what was being
    /// done, e.g. `load the state of vCPU 3`.
    pub fn new(
        fault: Fault,
        doing: impl Into<Cow<'static, str>>,
        reason: impl Into<String>,
    ) -> Error {
        Error { fault, doing: doing.into(), reason: reason.into(), source: None }
    }

    /// An error that began with another one, which tells the reason.
    pub fn caused(
        fault: Fault,
        doing: impl Into<Cow<'static, str>>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Error {
        let source: Arc<dyn std::error::Error + Send + Sync> = Arc::new(source);
        Error { fault, doing: doing.into(), reason: String::new(), source: Some(source) }
    }

    /// An error of the VMM; see [`Error::new`].
    pub fn vmm(doing: impl Into<Cow<'static, str>>, reason: impl Into<String>) -> Error {
        Error::new(Fault::Vmm, doing, reason)
    }

    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        self.fault
    }

    /// What was being done.
    pub fn doing(&self) -> &str {
        &self.doing
    }

    /// Why it failed; empty if its source says that.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Whether the same may succeed when it is tried again, with nobody changing anything here: the
    /// peer, the way to it or a device may have got better, and an owner may have changed his mind.
    pub fn is_retryable(&self) -> bool {
        match self.fault {
            Fault::Peer | Fault::Device | Fault::Cancelled => true,
            Fault::Host | Fault::Vmm | Fault::Request => false,
        }
    }

    /// All of it in one line: this error, then what it began with.
    pub fn to_line(&self) -> String {
        let mut line = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            line += &format!(": {error}");
            source = error.source();
        }
        line
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.doing.as_ref(), self.reason.as_str()) {
            ("", reason) => f.write_str(reason),
            (doing, "") => write!(f, "cannot {doing}"),
            (doing, reason) => write!(f, "cannot {doing}: {reason}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| {
            let source: &(dyn std::error::Error + 'static) = source.as_ref();
            source
        })
    }
}

impl From<TrackError> for Error {
    fn from(error: TrackError) -> Error {
        let fault = match error {
            TrackError::AlreadyTracked => Fault::Request,
            _ => Fault::Host,
        };
        Error::caused(fault, "track dirty pages", error)
    }
}

impl From<RamError> for Error {
    fn from(error: RamError) -> Error {
        let fault = match error {
            RamError::Layout | RamError::Unusable { .. } => Fault::Vmm,
            // What the host refuses.
            _ => Fault::Host,
        };
        Error::caused(fault, "make guest memory", error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        use martlet_protocol::Fault as Whose;
        let fault = match failure.fault() {
            Whose::Peer | Whose::Connection => Fault::Peer,
            Whose::Host => Fault::Host,
            Whose::Owner => Fault::Cancelled,
        };
        Error::new(fault, "", failure.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn an_error_is_one_line_that_says_everything_once() {
        let plain = Error::vmm("load the state of vCPU 3", "an MSR of no meaning");
        assert_eq!(plain.to_string(), "cannot load the state of vCPU 3: an MSR of no meaning");
        assert_eq!(plain.to_line(), plain.to_string());
        let caused = Error::caused(Fault::Host, "digest memory", io::Error::other("no page"));
        assert_eq!(caused.to_string(), "cannot digest memory");
        assert_eq!(caused.to_line(), "cannot digest memory: no page");
    }

    #[test]
    fn what_others_may_mend_is_tried_again() {
        let is_retryable = |fault| Error::new(fault, "", "").is_retryable();
        assert!([Fault::Peer, Fault::Device, Fault::Cancelled].into_iter().all(is_retryable));
        assert!(![Fault::Host, Fault::Vmm, Fault::Request].into_iter().any(is_retryable));
    }

    #[test]
    fn a_failure_keeps_its_fault() {
        let lost = Failure::ControlLost { reason: "reset".to_owned() };
        assert_eq!(Error::from(lost).fault(), Fault::Peer);
        assert_eq!(Error::from(Failure::MemoryDiffers).fault(), Fault::Host);
    }
}
