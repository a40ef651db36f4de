//! The right to run the guest, and what must be before it changes hands.

use super::{Mutation, Test};

const DESTINATION: &str = "migration/protocol/src/destination/state.rs";
const SOURCE: &str = "migration/protocol/src/source/state.rs";
const PERMIT: &str = "migration/protocol/src/permit.rs";

pub(super) const MUTATIONS: &[Mutation] = &[
    // The right to run the guest.
    Mutation {
        name: "permit-can-be-copied",
        file: PERMIT,
        from: "#[derive(Debug)]\n#[must_use = \"a guest whose permit is dropped",
        to: "#[derive(Clone, Debug)]\n#[must_use = \"a guest whose permit is dropped",
        test: Test::Doc("martlet-protocol", "permit::RunPermit"),
    },
    Mutation {
        name: "permit-back-by-anybodys-word",
        file: PERMIT,
        from: "Fate::Abandoned | Fate::Unknown => answer.instance == asked,",
        to: "Fate::Abandoned | Fate::Unknown => true,",
        test: Test::Lib(
            "martlet-protocol",
            "permit::tests::only_the_word_of_the_same_process_is_a_proof",
        ),
    },
    Mutation {
        name: "permit-back-while-pending",
        file: PERMIT,
        from: "Fate::Committed | Fate::Pending => false,",
        to: "Fate::Committed => false,\n            Fate::Pending => answer.instance == asked,",
        test: Test::Lib(
            "martlet-protocol",
            "permit::tests::only_the_word_of_the_same_process_is_a_proof",
        ),
    },
    Mutation {
        name: "promise-forgotten",
        file: "migration/protocol/src/ledger.rs",
        from: "let (list, most) = if saw_commit {",
        to: "let (list, most) = if saw_commit && migration.0 == [0; 16] {",
        test: Test::Lib(
            "martlet-protocol",
            "ledger::tests::attempts_without_a_commit_push_out_no_refused_one",
        ),
    },
    Mutation {
        name: "arrival-forgotten",
        file: "migration/protocol/src/ledger.rs",
        from: "if self.arrived.contains(&migration) {",
        to: "if self.arrived.contains(&migration) && migration.0 == [0; 16] {",
        test: Test::Lib("martlet-protocol", "ledger::tests::forgets_old_failures_and_no_arrival"),
    },
    Mutation {
        name: "pending-told-as-unknown",
        file: "migration/core/src/destination/desk.rs",
        from: "Place::Taken(current) if current.migration == migration => {",
        to: "Place::Taken(current)\n                if current.migration == migration && current.fate != Fate::Pending =>\n            {",
        test: Test::Lib(
            "martlet-core",
            "destination::desk::tests::one_attempt_at_a_time_and_one_guest",
        ),
    },
    Mutation {
        name: "panic-loses-the-permit",
        file: "migration/core/src/destination/attempt.rs",
        from: "        if is_here {\n",
        to: "        if is_here && self.has_panicked {\n",
        test: Test::Lib(
            "martlet-core",
            "destination::tests::a_panic_does_not_lose_the_right_to_run_the_guest",
        ),
    },
    Mutation {
        name: "operator-against-the-destination",
        file: "migration/protocol/src/source/state.rs",
        from: "answer.filter(|answer| answer.instance == asked)",
        to: "answer.filter(|it| it.instance == asked && it.fate != Fate::Committed)",
        test: Test::Lib(
            "martlet-protocol",
            "source::tests::the_destination_knows_better_than_an_operator",
        ),
    },
    // What must be there before the guest starts at the destination.
    Mutation {
        name: "start-before-the-last-barrier",
        file: DESTINATION,
        from: "if self.rounds > last_round =>",
        to: "if self.rounds >= last_round =>",
        test: Test::Lib(
            "martlet-protocol",
            "destination::tests::a_commit_waits_for_pages_and_state",
        ),
    },
    Mutation {
        name: "start-before-the-state",
        file: DESTINATION,
        from: "State::Committing { last_round, load: Load::Loaded, arrival, commit_at }\n                if",
        to: "State::Committing { last_round, arrival, commit_at, .. }\n                if",
        test: Test::Lib(
            "martlet-protocol",
            "destination::tests::a_commit_waits_for_pages_and_state",
        ),
    },
    Mutation {
        name: "commit-of-another-migration",
        file: DESTINATION,
        from: "if Some(commit.migration) != self.migration {",
        to: "if self.migration.is_none() {",
        test: Test::Lib(
            "martlet-protocol",
            "destination::tests::a_commit_that_contradicts_what_came_before_is_refused",
        ),
    },
    Mutation {
        name: "migration-tried-twice",
        file: DESTINATION,
        from: "if self.ledger.fate(setup.migration) != Fate::Unknown {",
        to: "if self.ledger.fate(setup.migration) == Fate::Committed {",
        test: Test::Lib("martlet-protocol", "destination::tests::a_migration_is_tried_once"),
    },
    Mutation {
        name: "barrier-of-one-channel-counts",
        file: "migration/core/src/destination/rounds.rs",
        from: "Ok(passed == (u64::from(round) + 1) * self.channels)",
        to: "Ok(passed > u64::from(round) * self.channels)",
        test: Test::Lib(
            "martlet-core",
            "destination::rounds::tests::a_round_is_in_with_its_last_barrier",
        ),
    },
    Mutation {
        name: "commit-taken-twice",
        file: "migration/protocol/src/destination/table.rs",
        from: "(Armed, Kind::GotCommit) => Act(&[Committing, Starting])",
        to: "(Armed | Committing, Kind::GotCommit) => Act(&[Committing, Starting])",
        test: Test::Lib("martlet-protocol", "destination::tests::every_cell_of_the_table_holds"),
    },
    Mutation {
        name: "pages-land-in-a-guest-that-runs",
        file: "migration/core/src/destination/attempt.rs",
        from: "        self.receiving.close();\n",
        to: "",
        test: Test::Lib("martlet-core", "destination::tests::a_guest_arrives"),
    },
    // What must be before the source commits, and how long that may take.
    Mutation {
        name: "commit-before-the-last-pages",
        file: SOURCE,
        from: "if !(pages_sent && state_sent) {",
        to: "if !state_sent {",
        test: Test::Lib("martlet-protocol", "source::tests::every_cell_of_the_table_holds"),
    },
    Mutation {
        name: "commit-to-nobody",
        file: SOURCE,
        from: "if !self.is_heard(now) {",
        to: "if !self.is_heard(now) && self.config.verify {",
        test: Test::Lib(
            "martlet-protocol",
            "source::tests::a_destination_that_was_not_heard_lately_gets_no_commit",
        ),
    },
    Mutation {
        name: "commit-of-memory-that-differs",
        file: SOURCE,
        from: "(Some(here), Some(there)) if here == there =>",
        to: "(Some(here), Some(there)) if here.len() == there.len() =>",
        test: Test::Lib(
            "martlet-protocol",
            "source::tests::memory_that_differs_is_not_handed_over",
        ),
    },
    Mutation {
        name: "blackout-without-a-bound",
        file: "migration/protocol/src/limits.rs",
        from: "downtime_limit.saturating_mul(BLACKOUT_LIMITS).max(BLACKOUT_MIN)",
        to: "downtime_limit.saturating_mul(BLACKOUT_LIMITS * 100).max(BLACKOUT_MIN)",
        test: Test::Lib("martlet-protocol", "source::tests::the_whole_blackout_has_one_bound"),
    },
    Mutation {
        name: "stop-without-a-deadline",
        file: "migration/core/src/source/stop.rs",
        from: "        if now < self.switchover.deadline {",
        to: "        if now >= Instant::default() {",
        test: Test::Lib(
            "martlet-core",
            "source::tests::a_silent_device_ends_the_attempt_and_its_late_answer_harms_nobody",
        ),
    },
    Mutation {
        name: "cancel-unheard-in-a-stop",
        file: "migration/core/src/source/look.rs",
        from: "if io.is_cancelled() && !std",
        to: "if io.is_cancelled() && !self.switchover.is_stopping() && !std",
        test: Test::Lib(
            "martlet-core",
            "source::tests::a_cancel_is_heard_at_once_whoever_is_silent",
        ),
    },
    Mutation {
        name: "stop-never-called-off",
        file: "migration/core/src/source/last_run.rs",
        from: "&& self.may_call_off(io) {",
        to: "&& self.may_call_off(io) && limit.is_zero() {",
        test: Test::Lib(
            "martlet-core",
            "source::tests::a_stop_is_called_off_only_where_that_is_understood",
        ),
    },
    Mutation {
        name: "bound-of-the-owner-unheeded",
        file: "migration/core/src/source/decide.rs",
        from: "        if self.due().is_none_or(|at| at > io.now()) {",
        to: "        if self.due().is_none_or(|at| at > io.now()) || self.precopy.rounds > 0 {",
        test: Test::Lib(
            "martlet-core",
            "source::tests::a_guest_that_takes_too_long_is_throttled_if_its_owner_wants_that",
        ),
    },
    Mutation {
        name: "equal-names-are-one-clock",
        file: "migration/protocol/src/source/mod.rs",
        from: "if self.keys_agree() && agrees {",
        to: "if self.keys_agree() || agrees {",
        test: Test::Lib(
            "martlet-protocol",
            "source::tests::equal_names_are_not_one_clock_if_the_pings_say_otherwise",
        ),
    },
    Mutation {
        name: "remaining-is-what-was-not-handed-out",
        file: "migration/core/src/source/precopy.rs",
        from: "progress.remaining = PageCount(round.pages.saturating_sub(done));",
        to: "progress.remaining = PageCount(self.precopy.dirty.count().max(done / u64::MAX));",
        test: Test::Of("martlet-engine", "migrate", "what_remains_is_what_was_not_sent"),
    },
];
