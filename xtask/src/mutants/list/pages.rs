//! Every page is sent after its last write, and what KVM does by itself is not lost.

use super::{Mutation, Test};

const SCANNER: &str = "migration/ram/src/scanner.rs";
const KVM_VM: &str = "vmm/machine/src/kvm/vm.rs";

pub(super) const MUTATIONS: &[Mutation] = &[
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
             return Ok(Some(chunk));\n            }\n            \
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
    Mutation {
        name: "last-run-without-its-sync",
        file: "migration/core/src/source/last_run.rs",
        from: "        if let Err(error) = self.precopy.sync() {\n            return self.host_failed(error);\n        }\n        let synced",
        to: "        let synced",
        test: Test::Of("martlet-world", "world", "clean_runs_move_the_guest"),
    },
    Mutation {
        name: "pages-of-a-called-off-stop-are-not-dirty",
        file: "migration/core/src/source/last_run.rs",
        from: "chunk.runs().for_each(|run| bitmap.set_range(run));",
        to: "chunk.runs().for_each(|run| bitmap.set_range(run.start..run.start));",
        test: Test::Of("martlet-world", "world", "random_faults"),
    },
    Mutation {
        name: "lost-page-goes-as-zero",
        file: "migration/ram/src/zero.rs",
        from: "unsafe { self.test.run(page) }.unwrap_or(false)",
        to: "unsafe { self.test.run(page) }.unwrap_or(true)",
        test: Test::Lib(
            "martlet-ram",
            "lost::tests::the_zero_check_passes_a_lost_page_on_and_finds_all_others",
        ),
    },
    Mutation {
        name: "rdma-round-ends-with-writes-in-flight",
        file: "migration/rdma/src/source.rs",
        from: "if !(written && zeroed) {",
        to: "if !((written || !last) && zeroed) {",
        test: Test::Of(
            "martlet-sim-rdma",
            "scenario",
            "without_faults_every_guest_arrives_by_rdma",
        ),
    },
    Mutation {
        name: "rdma-round-ends-with-zeros-on-their-way",
        file: "migration/rdma/src/source.rs",
        from: "if !(written && zeroed) {",
        to: "if !(written && (zeroed || !last)) {",
        test: Test::Of(
            "martlet-sim-rdma",
            "scenario",
            "without_faults_every_guest_arrives_by_rdma",
        ),
    },
    Mutation {
        name: "rdma-last-round-without-its-markers",
        file: "migration/rdma/src/source.rs",
        from: "self.queues.iter_mut().for_each(|queue| queue.markers.push_back(round));",
        to: "self.queues.iter_mut().filter(|_| !last).for_each(|it| it.markers.push_back(round));",
        test: Test::Of(
            "martlet-sim-rdma",
            "scenario",
            "without_faults_every_guest_arrives_by_rdma",
        ),
    },
    // What KVM does by itself begins with the guest, and writes into no page that arrived.
    // One that is loaded too early is mended at the start, where its ticks are dropped: no test
    // could tell.
    Mutation {
        name: "timer-of-a-guest-that-came-is-not-set",
        file: KVM_VM,
        from: "Some(pit) => self.set_pit(&pit),",
        to: "Some(_) => Ok(()),",
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
];
