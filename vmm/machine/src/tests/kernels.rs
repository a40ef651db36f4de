use super::elf::{Scratch, boots, pvh};
use super::*;
use crate::{GuestStatus, KernelConfig, MachineError};

/// Says "ok" on the serial port if the magic number of the start information is right, then pulls
/// the reset line.
const GREETER: &[u8] = &[
    0x81, 0x3b, 0x78, 0xc5, 0x6e, 0x33, // cmp dword [ebx], 0x336ec578
    0x75, 0x0a, // jne reset
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'o', // mov al, 'o'
    0xee, // out dx, al
    0xb0, b'k', // mov al, 'k'
    0xee, // out dx, al
    0xb0, 0xfe, // reset: mov al, 0xfe
    0xe6, 0x64, // out 0x64, al
    0xf4, // hlt
];

#[test]
fn a_pvh_kernel_speaks_and_resets() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("greeter", &pvh(GREETER));
    let serial = Scratch::new("greeting", b"");
    let config =
        MachineConfig { serial: SerialOut::File(serial.path().into()), ..boots(kernel.path(), 16) };
    let machine = running(&config);
    wait_for("two resets", || machine.resets().0 >= 2);
    assert!(std::fs::read(serial.path()).unwrap().starts_with(b"okok"));
    assert_eq!((machine.status(), machine.resets().1), (GuestStatus::Running, 0));
    assert!(machine.last_heartbeat().is_some());
    assert_eq!(machine.guest_counters(), None);
}

#[test]
fn what_is_no_kernel_is_named() {
    if !has_kvm() {
        return;
    }
    let no_note = {
        let mut elf = pvh(GREETER);
        // Another type of note.
        elf[64 + 2 * 56 + 8] = 19;
        elf
    };
    let elsewhere = {
        let mut elf = pvh(GREETER);
        // Loaded at the end of the address space.
        elf[64 + 24..64 + 32].fill(0xff);
        elf
    };
    let cut = pvh(GREETER)[..100].to_vec();
    let files: [(&str, Vec<u8>); 6] = [
        ("empty", Vec::new()),
        ("text", b"#!/bin/sh\n".to_vec()),
        ("zeros", vec![0; 100_000]),
        ("note", no_note),
        ("elsewhere", elsewhere),
        ("cut", cut),
    ];
    for (name, bytes) in files {
        let kernel = Scratch::new(name, &bytes);
        let Err(error) = Machine::new(&boots(kernel.path(), 16)) else {
            panic!("{name} was taken for a kernel");
        };
        let text = error.to_string();
        assert!(text.contains(name) && !text.contains('\n'), "{text}");
    }
    let Err(error) = Machine::new(&boots("/nonexistent/kernel".as_ref(), 16)) else {
        panic!("there is no such file");
    };
    assert!(matches!(error, MachineError::File { what: "kernel", .. }), "{error}");
    let text = error.to_string();
    assert_eq!(text, "kernel /nonexistent/kernel: No such file or directory (os error 2)");
}

#[test]
fn an_initrd_is_found_by_the_kernel() {
    if !has_kvm() {
        return;
    }
    // Follows the module list to the RAM disk and sends its first byte.
    let code = [
        0x8b, 0x4b, 0x10, // mov ecx, [ebx+16]
        0x8b, 0x09, // mov ecx, [ecx]
        0x8a, 0x01, // mov al, [ecx]
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xb0, 0xfe, 0xe6, 0x64, 0xf4,
    ];
    let kernel = Scratch::new("initrd-reader", &pvh(&code));
    let initrd = Scratch::new("initrd", b"disk");
    let serial = Scratch::new("initrd-serial", b"");
    let mut config =
        MachineConfig { serial: SerialOut::File(serial.path().into()), ..boots(kernel.path(), 16) };
    let with = |path: &std::path::Path| {
        Boot::Kernel(KernelConfig {
            kernel: kernel.path().into(),
            initrd: Some(path.into()),
            cmdline: String::new(),
        })
    };
    config.boot = with(initrd.path());
    let machine = running(&config);
    wait_for("the reset", || machine.resets().0 >= 1);
    assert_eq!(std::fs::read(serial.path()).unwrap()[0], b'd');
    machine.quit();

    let big = Scratch::new("initrd-big", &vec![1; 17 << 20]);
    config.boot = with(big.path());
    let error = Machine::new(&config).err().expect("it does not fit").to_string();
    assert!(error.contains("do not fit"), "{error}");
}
