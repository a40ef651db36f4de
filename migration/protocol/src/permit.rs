//! The right to run a guest.
//!
//! The right's whole life is in this file: made at a guest's boot, given away with a commit, made
//! anew at the destination from that same commit, and revived at the source only by a proof that
//! the destination made nothing of it, or by a person who answers for that.

use martlet_wire::control::{Abandon, Answer, Commit, Fate, InstanceId};

/// The right to run one guest. There is one for each guest that was ever booted; whoever starts
/// a vCPU must hold it. It can't be copied or made outside this crate, except at the boot of a
/// new guest. It moves from the source to the destination with the commit, in the two machines of
/// this crate and nowhere else.
///
/// Dropping it is allowed and means that the guest will never run again.
///
/// ```compile_fail
/// use martlet_protocol::RunPermit;
/// fn copy(permit: &RunPermit) -> RunPermit {
///     permit.clone()
/// }
/// ```
#[derive(Debug)]
#[must_use = "a guest whose permit is dropped can never run again"]
pub struct RunPermit {
    _private: (),
}

impl RunPermit {
    /// The permit of a guest that did not exist before. Call it once for each guest booted from
    /// nothing, never for one that arrives by migration. `cargo xtask tidy` says who may.
    pub fn for_new_guest() -> RunPermit {
        RunPermit { _private: () }
    }

    /// The source's half of the commit: from here on the right is inert.
    pub(crate) fn give_away(self) -> CommittedPermit {
        CommittedPermit { permit: self }
    }
}

/// A permit that was sent away. It runs nothing; only a proof of its refusal revives it.
#[derive(Debug)]
pub(crate) struct CommittedPermit {
    permit: RunPermit,
}

impl CommittedPermit {
    /// The right again, after the destination proved that it never used it and never will.
    pub(crate) fn revive(self, _proof: Refusal) -> RunPermit {
        self.permit
    }

    /// The right again, by the word of an operator, who answers for it.
    pub(crate) fn revive_by_override(self, _word: OperatorsWord) -> RunPermit {
        self.permit
    }
}

/// A proof that the destination never ran the guest of this attempt and never will.
#[derive(Debug)]
pub(crate) struct Refusal {
    _private: (),
}

impl Refusal {
    /// The destination's own word on the attempt's control connection. It sends neither message
    /// after it has started a guest, and starts none after it has sent one.
    pub(crate) fn from_message(_message: &Abandon) -> Refusal {
        Refusal { _private: () }
    }

    /// The answer to a query, if it proves a refusal: it has to come from the very process that
    /// the commit was sent to.
    ///
    /// `Unknown` from that process is a proof too. It took this attempt's `Setup`, or no commit
    /// would have been sent to it, and since then the attempt is pending there until it is put down
    /// as arrived or abandoned, in the step that decides it. It forgets abandoned attempts when
    /// they become many, and never one that arrived: what it does not know, it has abandoned. A
    /// commit that still lies in a socket belongs to a connection whose attempt is over.
    pub(crate) fn from_answer(answer: &Answer, asked: InstanceId) -> Option<Refusal> {
        let proves = match answer.fate {
            Fate::Abandoned | Fate::Unknown => answer.instance == asked,
            Fate::Committed | Fate::Pending => false,
        };
        proves.then_some(Refusal { _private: () })
    }
}

/// What an operator makes of an undecided attempt when the destination is gone for good, so that no
/// proof will ever come.
#[derive(Debug)]
pub enum OperatorOverride {
    /// The guest runs here again. The word is that the destination does not run it and never will:
    /// its host is off, or cut off from everything that the guest could reach.
    RunHere(OperatorsWord),
    /// The guest never runs here again. The word is that it runs at the destination, or that nobody
    /// needs it any more.
    GiveUp(OperatorsWord),
}

/// That a person knows what an [`OperatorOverride`] says. Nothing can check it: if it is wrong, two
/// hosts run one guest, or none does.
#[derive(Debug)]
pub struct OperatorsWord {
    _private: (),
}

impl OperatorsWord {
    /// Call it only where a person has said so, for this attempt, and was told what it means;
    /// `cargo xtask check` knows the one place.
    pub fn given_by_a_person() -> OperatorsWord {
        OperatorsWord { _private: () }
    }
}

/// A commit that the destination has accepted but not yet acted on. Not a right yet: if something
/// is missing it is dropped and the commit refused.
#[derive(Debug)]
pub(crate) struct Arrival {
    commit: Commit,
}

impl Arrival {
    /// The destination's half of the commit.
    pub(crate) fn of(commit: Commit) -> Arrival {
        Arrival { commit }
    }

    /// Whether the guest is to run, or to stay paused.
    pub(crate) fn running(&self) -> bool {
        self.commit.running
    }

    /// Makes the right. From here on the commit can't be refused.
    pub(crate) fn into_permit(self) -> RunPermit {
        RunPermit { _private: () }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_word_of_the_same_process_is_a_proof() {
        let (same, other) = (InstanceId([1; 16]), InstanceId([2; 16]));
        let proof = |instance, fate| Refusal::from_answer(&Answer { instance, fate }, same);
        for fate in [Fate::Abandoned, Fate::Unknown] {
            assert!(proof(same, fate).is_some());
            assert!(proof(other, fate).is_none());
        }
        for fate in [Fate::Committed, Fate::Pending] {
            assert!(proof(same, fate).is_none() && proof(other, fate).is_none());
        }
    }
}
