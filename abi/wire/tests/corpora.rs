//! The fuzz targets' corpora, played by every test run on a stable compiler. A file that a fuzzer
//! found goes there and stays.

use martlet_wire::fuzz;
use std::path::Path;

type Decoder = fn(&[u8]);

#[test]
fn corpora_are_played() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let targets: [(&str, Decoder); 5] = [
        ("hello", fuzz::hello),
        ("hello_reply", fuzz::hello_reply),
        ("control", fuzz::control),
        ("pages", fuzz::pages),
        ("rdma", fuzz::rdma),
    ];
    for (target, decode) in targets {
        let mut files = 0;
        for entry in std::fs::read_dir(root.join(target)).unwrap() {
            decode(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files > 0, "no corpus for {target}");
    }
}
