//! Peers, owners and the host.

use super::{Mutation, Test};

pub(super) const MUTATIONS: &[Mutation] = &[
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
    Mutation {
        name: "source-takes-a-flood-whole",
        file: "migration/core/src/source/look.rs",
        from: "for _ in 0..MESSAGES_A_LOOK {",
        to: "for _ in 0..MESSAGES_A_LOOK * 1000 {",
        test: Test::Lib(
            "martlet-core",
            "source::tests::a_flood_is_taken_in_small_parts_and_ends_the_attempt",
        ),
    },
    Mutation {
        name: "destination-takes-a-flood-whole",
        file: "migration/core/src/destination/attempt.rs",
        from: "for taken in 0..MESSAGES_AT_ONCE {",
        to: "for taken in 0..MESSAGES_AT_ONCE * 1000 {",
        test: Test::Lib(
            "martlet-core",
            "destination::tests::a_peer_that_never_stops_talking_keeps_nobody_from_the_clock",
        ),
    },
    Mutation {
        name: "guest-of-any-size-is-built",
        file: "migration/core/src/destination/attempt.rs",
        from: "        if bytes > most {",
        to: "        if bytes > most && most.0 == 0 {",
        test: Test::Lib(
            "martlet-core",
            "destination::tests::a_guest_that_is_too_large_costs_nothing",
        ),
    },
    Mutation {
        name: "long-message-is-let-in-anywhere",
        file: "migration/protocol/src/destination/mod.rs",
        from: "        is_small\n            || matches!",
        to: "        is_small\n            || self.channels > 0\n            || matches!",
        test: Test::Lib(
            "martlet-protocol",
            "destination::tests::a_long_message_is_let_in_only_where_it_has_a_place",
        ),
    },
    Mutation {
        name: "closed-connection-names-a-user",
        file: "migration/transport/src/same_host.rs",
        from: "(is_open && ends == (from, to))",
        to: "((is_open || user == 0) && ends == (from, to))",
        test: Test::Lib(
            "martlet-transport",
            "same_host::tests::a_connection_is_found_by_both_its_ends",
        ),
    },
    Mutation {
        name: "guest-on-threads-from-the-network",
        file: "vmm/machine/src/threads/mod.rs",
        from: "(peer == Peer::SameUserByTcp && by_tcp)",
        to: "(peer == Peer::SameUserByTcp || by_tcp)",
        test: Test::Of(
            "martlet",
            "hostile",
            "threads::a_guest_on_threads_is_not_taken_from_the_network",
        ),
    },
    Mutation {
        name: "channels-greet-one-behind-the-other",
        file: "migration/transport/src/greeting.rs",
        from: "const GREETINGS_AT_ONCE: usize = 16;",
        to: "const GREETINGS_AT_ONCE: usize = 1;",
        test: Test::Lib(
            "martlet-transport",
            "greeting::tests::slow_greetings_of_many_channels_are_awaited_together",
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
    Mutation {
        name: "log-without-a-bound",
        file: "apps/martlet/src/log.rs",
        from: "let fits = self.dropped == 0 && self.bytes.len() + line.len() <= QUEUE_BYTES_MAX;",
        to: "let fits = self.dropped == 0 && line.len() <= QUEUE_BYTES_MAX;",
        test: Test::Bin(
            "martlet",
            "log::tests::lines_that_nobody_reads_are_dropped_and_counted_in_their_place",
        ),
    },
];
