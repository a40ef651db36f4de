//! The mutations: a fault, and the test that must fail for it. The text is as the file has it, and
//! is there once.

use super::{Mutation, Test};

const DESTINATION: &str = "migration/protocol/src/destination/state.rs";
const SOURCE: &str = "migration/protocol/src/source/state.rs";
const PERMIT: &str = "migration/protocol/src/permit.rs";
const SCANNER: &str = "migration/ram/src/scanner.rs";
const KVM_VM: &str = "vmm/machine/src/kvm/vm.rs";

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
    // Every page is sent after its last write.
    Mutation {
        name: "rearm-skipped",
        file: SCANNER,
        from: "if let Err(error) = source.rearm(self.window.region, first_page, words) {",
        to: "if let Err(error) = source.rearm(self.window.region, first_page, &words[..1]) {",
        test: Test::Lib(
            "martlet-ram",
            "scanner::tests::a_round_hands_out_every_page_once_after_its_rearm",
        ),
    },
    Mutation {
        name: "rearm-after-the-first-chunk-was-read",
        file: SCANNER,
        from: "            let (first_page, words) = self.window.dirty_part();\n",
        to: "            if let Some(chunk) = self.window.take_chunk() {\n                \
             return Ok(Some(self.hand_out(chunk)));\n            }\n            \
             let (first_page, words) = self.window.dirty_part();\n",
        test: Test::Lib(
            "martlet-ram",
            "scanner::tests::a_round_hands_out_every_page_once_after_its_rearm",
        ),
    },
    Mutation {
        name: "failed-rearm-loses-pages",
        file: SCANNER,
        from: "                self.put_back();\n                return Err(error);",
        to: "                return Err(error);",
        test: Test::Lib("martlet-ram", "scanner::tests::a_failed_rearm_keeps_the_pages_dirty"),
    },
    Mutation {
        name: "abandoned-round-loses-pages",
        file: SCANNER,
        from: "        self.put_back();\n        self.end_round();",
        to: "        self.end_round();",
        test: Test::Lib("martlet-ram", "scanner::tests::a_round_that_is_abandoned_loses_nothing"),
    },
    // What comes from a peer, or from safe code, stays within its limits.
    Mutation {
        name: "damaged-state-is-loaded",
        file: "abi/wire/src/control_check.rs",
        from: "Some(told) if told != checksum(&self.bytes) => {",
        to: "Some(told) if told.len() != checksum(&self.bytes).len() => {",
        test: Test::Of("martlet-wire", "hostile", "a_state_that_was_damaged_on_the_way_is_refused"),
    },
    Mutation {
        name: "items-without-a-limit",
        file: "abi/wire/src/cbor.rs",
        from: "if items > ITEMS_MAX {",
        to: "if items > ITEMS_MAX * 1000 {",
        test: Test::Lib("martlet-wire", "cbor::tests::items_have_a_limit"),
    },
    Mutation {
        name: "quantum-without-a-bound",
        file: "migration/transport/src/control.rs",
        from: "for _ in 0..READS_MAX {",
        to: "for _ in 0..READS_MAX * 1000 {",
        test: Test::Lib(
            "martlet-transport",
            "control::tests::a_long_message_is_read_in_several_looks",
        ),
    },
    Mutation {
        name: "chunk-behind-the-end-of-memory",
        file: "migration/ram/src/chunk.rs",
        from: "(chunk.end_page()? <= pages).then_some(chunk)",
        to: "(chunk.first_page <= pages).then_some(chunk)",
        test: Test::Lib(
            "martlet-ram",
            "chunk::tests::a_chunk_outside_of_the_memory_cannot_be_made",
        ),
    },
    Mutation {
        name: "chunk-of-other-memory-is-sent",
        file: "migration/ram/src/batch.rs",
        from: "        assert!(chunk.is_of(self.ram), \"{chunk:?} is of other memory\");\n",
        to: "",
        test: Test::Lib("martlet-ram", "batch::tests::a_chunk_of_other_memory_is_refused_whole"),
    },
    Mutation {
        name: "round-ahead-of-its-answer",
        file: "migration/core/src/destination/rounds.rs",
        from: "if round > self.told.load(Ordering::Relaxed) {",
        to: "if round > self.told.load(Ordering::Relaxed) + 1 {",
        test: Test::Lib(
            "martlet-core",
            "destination::rounds::tests::barriers_come_in_order_and_one_at_a_time",
        ),
    },
    // What KVM does by itself begins with the guest, and writes into no page that arrived.
    Mutation {
        name: "pit-runs-from-its-rehearsal-on",
        file: KVM_VM,
        from: "            *lock(&self.held) = Some(saved.pit.clone());\n        }\n",
        to: "        }\n        if before.is_none() {\n            self.set_pit(&saved.pit)?;\n        }\n",
        test: Test::Lib(
            "martlet-machine",
            "tests::timers::the_interval_timer_keeps_its_time_across_moves",
        ),
    },
    Mutation {
        name: "ticks-of-a-pause-come-later",
        file: KVM_VM,
        from: "None => self.drop_ticks(),",
        to: "None => Ok(()),",
        test: Test::Lib("martlet-machine", "tests::timers::ticks_of_a_pause_do_not_come_later"),
    },
    Mutation {
        name: "kvmclock-stands-with-the-guest",
        file: KVM_VM,
        from: "let clock = saved.clock_ns.wrapping_add(u64::try_from(stood.as_nanos()).unwrap_or(0));",
        to: "let clock = saved.clock_ns.wrapping_add(u64::from(stood.is_zero()));",
        test: Test::Lib(
            "martlet-machine",
            "kvm::tests::a_guests_clocks_go_on_by_the_time_it_stood",
        ),
    },
    Mutation {
        name: "wall-clock-is-written-again",
        file: "vmm/machine/src/kvm/msrs.rs",
        from: "MSR_KVM_WALL_CLOCK | MSR_KVM_WALL_CLOCK_NEW => Kind::WallClock,",
        to: "MSR_KVM_WALL_CLOCK | MSR_KVM_WALL_CLOCK_NEW => Kind::Plain,",
        test: Test::Lib(
            "martlet-machine",
            "tests::hypervisor_pages::what_kvm_writes_arrives_as_it_was",
        ),
    },
    // Owners, and the host.
    Mutation {
        name: "serial-file-behind-a-link",
        file: "vmm/machine/src/devices/endpoint.rs",
        from: "OFlags::NOCTTY | OFlags::NOFOLLOW;",
        to: "OFlags::NOCTTY;",
        test: Test::Lib(
            "martlet-machine",
            "devices::endpoint::tests::a_file_is_private_and_no_link_is_followed",
        ),
    },
    Mutation {
        name: "socket-of-another-is-removed",
        file: "migration/transport/src/socket_file.rs",
        from: "if current.is_ok_and(|m| (m.dev(), m.ino()) == self.identity) {",
        to: "if current.is_ok_and(|m| m.dev() == self.identity.0) {",
        test: Test::Lib("martlet-transport", "socket_file::tests::only_its_own_inode_is_removed"),
    },
    Mutation {
        name: "busy-clients-lock-the-owner-out",
        file: "apps/martlet/src/qmp/clients.rs",
        from: "filter(|seat| !seat.is_leaving);\n    let Some(seat)",
        to: "filter(|seat| !seat.is_leaving && !seat.is_busy);\n    let Some(seat)",
        test: Test::Bin(
            "martlet",
            "qmp::server_tests::one_client_more_is_taken_in_though_all_are_busy",
        ),
    },
    Mutation {
        name: "refused-command-changes-options",
        file: "apps/martlet/src/control/outgoing.rs",
        from: "        state.refuse_to_migrate()?;\n        let running = runs_or_is_paused(&stands)?;\n        \
               let mut options = state.options.clone();\n        change(&mut options);\n",
        to: "        change(&mut state.options);\n        state.refuse_to_migrate()?;\n        \
             let running = runs_or_is_paused(&stands)?;\n        let options = state.options.clone();\n",
        test: Test::Bin("martlet", "qmp::server_tests::a_refused_command_changes_nothing"),
    },
    Mutation {
        name: "quit-throws-an-undecided-guest-away",
        file: "apps/martlet/src/control/quit.rs",
        from: "if undecided && !force {",
        to: "if undecided && !force && cause == QuitCause::Signal {",
        test: Test::Bin(
            "martlet",
            "control::quit::tests::an_undecided_guest_is_thrown_away_by_force_only",
        ),
    },
    Mutation {
        name: "undecided-is-a-plain-failure",
        file: "apps/martlet/src/failure.rs",
        from: "OutcomeJson::Undecided | OutcomeJson::GivenUp => ExitStatus::Undecided,",
        to: "OutcomeJson::Undecided | OutcomeJson::GivenUp => ExitStatus::Failed,",
        test: Test::Bin("martlet", "failure::tests::each_end_has_its_exit_status"),
    },
    Mutation {
        name: "client-waits-for-a-full-server",
        file: "apps/qmp/src/client.rs",
        from: "    stream.set_write_timeout(Some(limit)).map_err(no_server)?;\n    loop {\n",
        to: "    stream.set_write_timeout(Some(limit * 100_000)).map_err(no_server)?;\n    loop {\n",
        test: Test::Lib(
            "martlet-qmp",
            "client::tests::a_server_that_takes_no_client_is_not_waited_for",
        ),
    },
];
