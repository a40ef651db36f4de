//! Shares things of which there are only a few among users, without waiting.
//!
//! Linux has a semaphore here that asynchronous commands only try: whoever comes at the right
//! moment gets the permit, and who issues in a loop takes them all. Here a user who is refused
//! leaves a claim. While there is a claim by a user who has less than an equal share, users with
//! their share or more are refused in turn, so the next thing that becomes free is for the claim.

use super::UserId;
use martlet_units::Instant;
use std::time::Duration;

/// How long a claim counts without being repeated: its user may have given up. Longer than
/// commands of a batch take one after the other.
const CLAIM_LIFE: Duration = Duration::from_millis(10);

/// Slots or permits, and who has them.
#[derive(Debug)]
pub(crate) struct Shares {
    total: usize,
    users: Vec<User>,
}

#[derive(Debug)]
struct User {
    id: UserId,
    held: usize,
    claimed: Option<Instant>,
}

impl Shares {
    /// `total` things, all free.
    pub(crate) fn new(total: usize) -> Shares {
        Shares { total, users: Vec::new() }
    }

    /// How many are in use.
    pub(crate) fn held(&self) -> usize {
        self.users.iter().map(|user| user.held).sum()
    }

    /// Whether `id` may take one now; if not, its claim is noted. `true` changes nothing: call
    /// [`Self::take`] when everything else that is needed is there as well.
    pub(crate) fn may_take(&mut self, now: Instant, id: UserId) -> bool {
        let me = self.index_of(id);
        let free = self.held() < self.total;
        let allowed = free && (self.users[me].held < self.share(now) || !self.is_claimed(now, me));
        self.users[me].claimed = if allowed { None } else { Some(now) };
        allowed
    }

    /// Takes one.
    ///
    /// # Panics
    /// If none is free.
    pub(crate) fn take(&mut self, id: UserId) {
        assert!(self.held() < self.total, "one is free");
        let me = self.index_of(id);
        self.users[me].held += 1;
    }

    /// Gives one back.
    ///
    /// # Panics
    /// If the user has none.
    pub(crate) fn give(&mut self, id: UserId) {
        let me = self.index_of(id);
        let held = self.users[me].held.checked_sub(1).expect("who gives back has taken");
        self.users[me].held = held;
    }

    fn index_of(&mut self, id: UserId) -> usize {
        if let Some(index) = self.users.iter().position(|user| user.id == id) {
            return index;
        }
        self.users.push(User { id, held: 0, claimed: None });
        self.users.len() - 1
    }

    /// An equal share of all who have or want something, at least one.
    fn share(&self, now: Instant) -> usize {
        let wants = |user: &User| user.held > 0 || user.has_claim(now);
        let users = self.users.iter().filter(|user| wants(user)).count().max(1);
        self.total.div_ceil(users)
    }

    /// Whether somebody else, with less than a share, was refused lately.
    fn is_claimed(&self, now: Instant, me: usize) -> bool {
        let share = self.share(now);
        let others = self.users.iter().enumerate().filter(|(index, _)| *index != me);
        others.map(|(_, user)| user).any(|user| user.has_claim(now) && user.held < share)
    }
}

impl User {
    fn has_claim(&self, now: Instant) -> bool {
        self.claimed.is_some_and(|at| now.since(at) < CLAIM_LIFE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: UserId = UserId(1);
    const TWO: UserId = UserId(2);

    fn take_all(shares: &mut Shares, id: UserId) -> usize {
        let mut taken = 0;
        while shares.may_take(Instant(0), id) {
            shares.take(id);
            taken += 1;
        }
        taken
    }

    #[test]
    fn one_user_may_have_all() {
        let mut shares = Shares::new(16);
        assert_eq!(take_all(&mut shares, ONE), 16);
    }

    #[test]
    fn what_becomes_free_goes_to_who_was_refused() {
        let mut shares = Shares::new(4);
        assert_eq!(take_all(&mut shares, ONE), 4);
        assert!(!shares.may_take(Instant(0), TWO));
        shares.give(ONE);
        assert!(!shares.may_take(Instant(0), ONE), "it is the other's turn");
        assert!(shares.may_take(Instant(0), TWO));
        shares.take(TWO);
        // The other has nothing more to ask for.
        shares.give(ONE);
        assert!(shares.may_take(Instant(0), ONE));
    }

    #[test]
    fn a_claim_that_is_not_repeated_is_forgotten() {
        let mut shares = Shares::new(2);
        assert_eq!(take_all(&mut shares, ONE), 2);
        assert!(!shares.may_take(Instant(0), TWO));
        shares.give(ONE);
        shares.give(ONE);
        let later = Instant(0).after(CLAIM_LIFE);
        shares.may_take(later, ONE);
        shares.take(ONE);
        assert!(shares.may_take(later, ONE));
    }

    proptest! {
        /// Whatever the others do, a user who keeps asking gets one before long.
        #[test]
        fn nobody_starves(total in 1_usize..20, others in 1_u8..6, order in prop::collection::vec(any::<u8>(), 400)) {
            let mut shares = Shares::new(total);
            let mut waited = 0;
            for step in order {
                let id = UserId(step % others);
                if step % 3 == 0 && shares.users.iter().any(|user| user.id == id && user.held > 0) {
                    shares.give(id);
                } else if shares.may_take(Instant(0), id) {
                    shares.take(id);
                }
                prop_assert!(shares.held() <= total);
                let me = UserId(200);
                let free = shares.held() < total;
                if shares.may_take(Instant(0), me) {
                    prop_assert!(free);
                    waited = 0;
                    shares.take(me);
                    shares.give(me);
                } else {
                    waited += 1;
                }
                // Refused only while all are taken: what is given back is not taken by others.
                prop_assert!(!free || waited == 0);
            }
        }
    }
}
