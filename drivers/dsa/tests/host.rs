//! What the driver does on a host, as far as a host without the device shows it.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Guest, OpenGate, PAGE, PlainCheck};
use martlet_dsa::{
    EngineConfig, Instructions, ProcessMemory, SharedMemory, Submitter, ZeroEngine, open,
};
use martlet_dsa_abi::{Descriptor, Flags, Opcode};
use martlet_test_host::Want;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

fn put(root: &Path, name: &str, attributes: &[(&str, &str)]) {
    std::fs::create_dir_all(root.join(name)).unwrap();
    for (attribute, value) in attributes {
        std::fs::write(root.join(name).join(attribute), value).unwrap();
    }
}

/// Without ENQCMD, or where the kernel refuses to map the portal, descriptors are written to the
/// device file. A plain file stands for it here: it takes them whole and completes nothing, so the
/// engine gives it up, once, and the CPU answers.
#[test]
fn descriptors_are_written_to_a_device_file() {
    let lacks_it = !Instructions::detect().enqcmd;
    let looked = lacks_it.then_some(()).ok_or("a plain file is no portal for it");
    if !Want::NoEnqcmd.found(&looked) {
        return;
    }
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("dsa-host");
    let _ = std::fs::remove_dir_all(&root);
    let device = [("version", "0x200"), ("pasid_enabled", "1"), ("state", "enabled")];
    put(&root, "dsa0", &device);
    let queue = [("mode", "shared"), ("type", "user"), ("state", "enabled"), ("size", "16")];
    put(&root, "wq0.0", &queue);
    let file = root.join("nodes");
    std::fs::create_dir_all(&file).unwrap();
    let file = file.join("wq0.0");
    std::fs::write(&file, "").unwrap();

    let opened = open(&root, &file).unwrap();
    assert_eq!(opened.submitter, Submitter::Write);
    assert_eq!(opened.queue.limits().batch_max, 32, "version 2 takes batches by write");
    let guest = Guest::new(64);
    guest.write(33, 5, 1);
    let memory = SharedMemory::pin(&ProcessMemory, &[guest.host_memory()]).unwrap();
    let config = EngineConfig { deadline: Duration::from_millis(3), ..EngineConfig::default() };
    let gate = Arc::new(OpenGate::new(1, 1));
    let queues = vec![opened.queue.clone()];
    let mut engine =
        ZeroEngine::new(config, queues, gate, memory, &ProcessMemory, PlainCheck).unwrap();
    for _ in 0..4 {
        let zero = engine.check(&[guest.run(0, 64)]);
        assert!((0..64).all(|page| zero.is_zero(page) == (page != 33)));
    }
    assert!(opened.queue.is_given_up());
    assert_eq!((engine.stats().cpu_pages, engine.stats().device_pages), (4 * 64, 0));

    let written = std::fs::read(&file).unwrap();
    let (descriptors, rest) = written.as_chunks::<64>();
    assert!(rest.is_empty());
    let first = Descriptor::from_bytes(&descriptors[0]);
    assert_eq!((first.opcode(), first.size()), (Opcode::BATCH, 32));
    assert_eq!(first.flags(), Flags::COMPLETION_VALID | Flags::REQUEST_COMPLETION);
    assert!(first.completion().is_multiple_of(32) && first.source().is_multiple_of(64));
    let list = usize::try_from(first.source()).unwrap();
    // The list is at the process's own address, as the device would read it.
    let second = compare_of_list(list, 1);
    assert_eq!((second.opcode(), second.size()), (Opcode::COMPVAL, 4096));
    assert_eq!(second.source(), guest.address(0) + PAGE as u64);
    assert_eq!(second.pattern(), 0);
}

#[allow(unsafe_code, reason = "reads what a device would read")]
fn compare_of_list(list: usize, index: usize) -> Descriptor {
    let at = std::ptr::with_exposed_provenance::<[u8; 64]>(list);
    // SAFETY: the engine's descriptors, which live as long as the engine.
    Descriptor::from_bytes(&unsafe { at.add(index).read_volatile() })
}
