//! Where the two sides stand. A phase changes in one function, by these tables.

/// Where a source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourcePhase {
    /// The offer is sent.
    Offered,
    /// Terms are agreed; queue pairs are being connected.
    Connecting,
    /// Runs are taken.
    Open,
    /// An epoch is ending.
    Draining,
    /// Something failed, or the end was asked for: queue pairs close on both sides.
    Closing,
    /// Nothing posted can land any more, or nobody is left to say so.
    Closed,
    /// The last round arrived in full.
    Finished,
}

/// Where a destination stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DestinationPhase {
    /// No offer came yet.
    Waiting,
    /// Keys are given out.
    Open,
    /// The queue pairs are being closed.
    Closing,
    /// No queue pair is left, so no key is of use; registrations are being taken back.
    Revoked,
}

impl SourcePhase {
    /// Whether `next` may follow.
    pub(super) fn may_become(self, next: SourcePhase) -> bool {
        use SourcePhase as P;
        match self {
            P::Offered => matches!(next, P::Connecting | P::Closing),
            P::Connecting => matches!(next, P::Open | P::Closing),
            P::Open => matches!(next, P::Draining | P::Closing),
            P::Draining => matches!(next, P::Open | P::Closing | P::Finished),
            P::Closing => matches!(next, P::Closed | P::Finished),
            P::Closed | P::Finished => false,
        }
    }
}

impl DestinationPhase {
    /// Whether `next` may follow.
    pub(super) fn may_become(self, next: DestinationPhase) -> bool {
        use DestinationPhase as P;
        match self {
            P::Waiting => matches!(next, P::Open | P::Closing),
            P::Open => matches!(next, P::Closing),
            P::Closing => matches!(next, P::Revoked),
            P::Revoked => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt::Debug;

    fn rows<P: Copy + Debug>(all: &[P], may: impl Fn(P, P) -> bool) -> Vec<String> {
        let row = |from: &P| {
            let next: Vec<_> = all.iter().filter(|to| may(*from, **to)).collect();
            format!("{from:?} > {next:?}")
        };
        all.iter().map(row).collect()
    }

    #[test]
    fn the_tables_are_as_reviewed() {
        use SourcePhase as P;
        let all =
            [P::Offered, P::Connecting, P::Open, P::Draining, P::Closing, P::Closed, P::Finished];
        assert_eq!(
            rows(&all, P::may_become),
            [
                "Offered > [Connecting, Closing]",
                "Connecting > [Open, Closing]",
                "Open > [Draining, Closing]",
                "Draining > [Open, Closing, Finished]",
                "Closing > [Closed, Finished]",
                "Closed > []",
                "Finished > []",
            ]
        );
        use DestinationPhase as D;
        let all = [D::Waiting, D::Open, D::Closing, D::Revoked];
        assert_eq!(
            rows(&all, D::may_become),
            [
                "Waiting > [Open, Closing]",
                "Open > [Closing]",
                "Closing > [Revoked]",
                "Revoked > []"
            ]
        );
    }
}
