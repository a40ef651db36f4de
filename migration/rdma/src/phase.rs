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
    #[cfg(test)]
    pub(super) const ALL: [SourcePhase; 7] = [
        SourcePhase::Offered,
        SourcePhase::Connecting,
        SourcePhase::Open,
        SourcePhase::Draining,
        SourcePhase::Closing,
        SourcePhase::Closed,
        SourcePhase::Finished,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            SourcePhase::Offered => "Offered",
            SourcePhase::Connecting => "Connecting",
            SourcePhase::Open => "Open",
            SourcePhase::Draining => "Draining",
            SourcePhase::Closing => "Closing",
            SourcePhase::Closed => "Closed",
            SourcePhase::Finished => "Finished",
        }
    }

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
    #[cfg(test)]
    pub(super) const ALL: [DestinationPhase; 4] = [
        DestinationPhase::Waiting,
        DestinationPhase::Open,
        DestinationPhase::Closing,
        DestinationPhase::Revoked,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            DestinationPhase::Waiting => "Waiting",
            DestinationPhase::Open => "Open",
            DestinationPhase::Closing => "Closing",
            DestinationPhase::Revoked => "Revoked",
        }
    }

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

    fn row<P: Copy>(all: &[P], name: fn(P) -> &'static str, next: impl Fn(P) -> bool) -> String {
        let list: Vec<_> = all.iter().filter(|to| next(**to)).map(|to| name(*to)).collect();
        if list.is_empty() { "the end".to_owned() } else { list.join(", ") }
    }

    #[test]
    fn the_tables_are_as_reviewed() {
        let all = SourcePhase::ALL;
        let source = all.map(|from| {
            format!("{} > {}", from.name(), row(&all, SourcePhase::name, |to| from.may_become(to)))
        });
        assert_eq!(
            source,
            [
                "Offered > Connecting, Closing",
                "Connecting > Open, Closing",
                "Open > Draining, Closing",
                "Draining > Open, Closing, Finished",
                "Closing > Closed, Finished",
                "Closed > the end",
                "Finished > the end",
            ]
        );
        let all = DestinationPhase::ALL;
        let destination = all.map(|from| {
            format!(
                "{} > {}",
                from.name(),
                row(&all, DestinationPhase::name, |to| from.may_become(to))
            )
        });
        assert_eq!(
            destination,
            ["Waiting > Open, Closing", "Open > Closing", "Closing > Revoked", "Revoked > the end",]
        );
    }
}
