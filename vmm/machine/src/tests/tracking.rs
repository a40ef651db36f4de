use super::*;
use martlet_ram::{DirtySource, RamBitmap, RegionIndex, TrackError};
use std::collections::BTreeSet;

/// Waits for a command in the mailbox, writes to that many addresses that far apart, says so. Runs
/// at level 3, where a nested KVM executes it natively.
const WRITER: &[u8] = &[
    0xbd, 0x00, 0x00, 0x20, 0x00, // mov ebp, 0x200000
    0xf3, 0x90, // wait: pause
    0x8b, 0x45, 0x00, // mov eax, [rbp]
    0x85, 0xc0, // test eax, eax
    0x74, 0xf7, // jz wait
    0x8b, 0x7d, 0x04, // mov edi, [rbp+4]
    0x8b, 0x4d, 0x08, // mov ecx, [rbp+8]
    0x8b, 0x75, 0x0c, // mov esi, [rbp+12]
    0xff, 0x07, // next: inc dword [rdi]
    0x01, 0xf7, // add edi, esi
    0xff, 0xc9, // dec ecx
    0x75, 0xf8, // jnz next
    0x31, 0xc0, // xor eax, eax
    0x89, 0x45, 0x00, // mov [rbp], eax
    0xff, 0x45, 0x10, // inc dword [rbp+16]
    0xeb, 0xdc, // jmp wait
];
const MAILBOX: Gpa = Gpa(0x20_0000);
const MAILBOX_PAGE: u64 = 0x200;

struct Writer {
    machine: Arc<Machine>,
    commands: u32,
}

impl Writer {
    /// The built-in program's machine with other code where that program begins.
    fn new(tracking: Tracking) -> Writer {
        let load = "fill=1M,ws=1M,rate=1/ms";
        // Neither chunks nor words are whole at the end of this memory.
        let memory = ByteCount((192 << 20) + 5 * PAGE_SIZE);
        let config = MachineConfig { tracking, memory, ..program(load, 192, 1) };
        let machine = Machine::new(&config).unwrap();
        let plan = martlet_guest_program::Plan::new(
            &machine.memory.ram().layout(),
            1,
            &load.parse().unwrap(),
            machine.vm.tsc_khz(),
        );
        let entry = plan.unwrap().start(0, 0).rip;
        assert!(machine.memory.write(Gpa(entry), WRITER));
        machine.continue_by_owner().unwrap();
        Writer { machine, commands: 0 }
    }

    /// Lets the guest write to `count` pages from `first` on, `stride` apart; returns when it has,
    /// with the vCPU out of the guest.
    fn write(&mut self, first: u64, count: u64, stride: u64) -> BTreeSet<u64> {
        let words = [1, first * PAGE_SIZE, count, stride * PAGE_SIZE];
        let bytes: Vec<u8> =
            words.iter().flat_map(|word| u32::try_from(*word).unwrap().to_le_bytes()).collect();
        assert!(self.machine.memory.write(MAILBOX, &bytes));
        self.commands += 1;
        self.machine.continue_by_owner().unwrap();
        wait_for("the guest to write", || {
            let mut done = [0; 4];
            assert!(self.machine.memory.read(Gpa(MAILBOX.0 + 16), &mut done));
            u32::from_le_bytes(done) == self.commands
        });
        self.machine.pause_by_owner().unwrap();
        let mut pages: BTreeSet<u64> = (0..count).map(|i| first + i * stride).collect();
        pages.insert(MAILBOX_PAGE);
        pages
    }
}

fn sync(source: &mut dyn DirtySource, machine: &Machine) -> BTreeSet<u64> {
    let dirty = RamBitmap::new(machine.memory.ram());
    source.sync(&dirty).unwrap();
    dirty.region(RegionIndex(0)).runs().flatten().collect()
}

/// Compares without printing thousands of pages.
fn assert_pages(reported: &BTreeSet<u64>, written: &BTreeSet<u64>, what: &str) {
    let some = |pages: &mut dyn Iterator<Item = &u64>| pages.take(8).copied().collect::<Vec<_>>();
    let missing = written.difference(reported).count();
    let extra = reported.difference(written).count();
    assert!(
        missing == 0 && extra == 0,
        "{what}: {missing} lost {:?}, {extra} too many {:?}",
        some(&mut written.difference(reported)),
        some(&mut reported.difference(written)),
    );
}

fn rearm(source: &mut dyn DirtySource, pages: &BTreeSet<u64>) {
    for chunk in 0..97 {
        let mut words = [0; 8];
        for page in pages.range(chunk * 512..(chunk + 1) * 512) {
            let place = page % 512;
            words[usize::try_from(place / 64).unwrap()] |= 1 << (place % 64);
        }
        if words != [0; 8] {
            source.rearm(RegionIndex(0), chunk * 512, &words).unwrap();
        }
    }
}

fn exact(tracking: Tracking) {
    let mut writer = Writer::new(tracking);
    let machine = Arc::clone(&writer.machine);
    writer.write(0x1000, 100, 3);
    for _ in 0..2 {
        let mut source = machine.track().unwrap();
        let mut seed = 88_172_645_463_325_252u64;
        for _ in 0..15 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let (first, count, stride) =
                (0x1000 + seed % 1000, 1 + seed / 7 % 300, 1 + seed / 3 % 50);
            let written = writer.write(first, count, stride);
            let reported = sync(&mut source, &machine);
            let what = format!("{tracking:?}: {count} pages from {first} by {stride}");
            assert_pages(&reported, &written, &what);
            rearm(&mut source, &reported);
            assert_eq!(sync(&mut source, &machine), BTreeSet::new());
        }
    }
}

#[test]
fn the_log_is_exact() {
    if has_kvm() {
        exact(Tracking::Log);
    }
}

#[test]
fn the_ring_is_exact() {
    if has_kvm() {
        exact(Tracking::Ring);
    }
}

#[test]
fn a_full_ring_loses_nothing() {
    if !has_kvm() {
        return;
    }
    let mut writer = Writer::new(Tracking::Ring);
    let machine = Arc::clone(&writer.machine);
    writer.write(0x1000, 1, 1);
    let mut source = machine.track().unwrap();
    // Twice what a ring holds.
    for first in [0x1000, 0x1001] {
        let written = writer.write(first, 20_000, 2);
        assert_pages(&sync(&mut source, &machine), &written, "two rings full");
    }
    assert_eq!(sync(&mut source, &machine), BTreeSet::new());
}

#[test]
fn the_log_clears_only_what_it_was_asked_and_had_read() {
    if !has_kvm() {
        return;
    }
    let mut writer = Writer::new(Tracking::Log);
    let machine = Arc::clone(&writer.machine);
    // KVM may report a page that is mapped by a first read as written; so the code runs before.
    writer.write(0x1000, 1, 1);
    let mut source = machine.track().unwrap();
    let written = writer.write(0x1000, 4, 1);
    // Not read yet: naming them clears nothing.
    rearm(&mut source, &written);
    assert_eq!(sync(&mut source, &machine), written);
    // Two of them are rearmed, the others reported again.
    rearm(&mut source, &BTreeSet::from([0x1000, 0x1002]));
    let rest = BTreeSet::from([MAILBOX_PAGE, 0x1001, 0x1003]);
    assert_eq!(sync(&mut source, &machine), rest);
    // A rearmed page's next write is caught.
    let again = writer.write(0x1002, 1, 1);
    assert_eq!(sync(&mut source, &machine), &rest | &again);
    // The last words of a region are fewer than a chunk's.
    let last = machine.memory.ram().regions()[0].pages() - 1;
    let written = writer.write(last, 1, 1);
    let reported = sync(&mut source, &machine);
    assert!(reported.is_superset(&written));
    rearm(&mut source, &reported);
    assert_eq!(sync(&mut source, &machine), BTreeSet::new());
}

#[test]
fn there_is_one_tracker_of_a_guest_at_a_time() {
    if !has_kvm() {
        return;
    }
    for tracking in [Tracking::Log, Tracking::Ring] {
        let mut writer = Writer::new(tracking);
        let machine = Arc::clone(&writer.machine);
        writer.write(0x1000, 1, 1);
        let mut source = machine.track().unwrap();
        assert!(matches!(machine.track(), Err(TrackError::AlreadyTracked)));
        // The one that is there has lost nothing by that.
        let written = writer.write(0x1000, 3, 1);
        assert_pages(&sync(&mut source, &machine), &written, "behind a refused tracker");
        drop(source);
        assert!(machine.track().is_ok());
    }
}
