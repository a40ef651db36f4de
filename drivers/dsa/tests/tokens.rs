//! Tokens between processes: counted, and given back by those who die.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_dsa::{TokenError, Tokens};
use martlet_units::Instant;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const NOW: Instant = Instant(1_000_000_000);
/// Long after everything here.
const LATER: Instant = Instant(60_000_000_000);
/// Tells a copy of this program that it is a process which takes tokens and is killed.
const VICTIM: &str = "MARTLET_TEST_DSA_TOKENS";

fn path(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("dsa-tokens-{name}"));
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn processes_see_each_others_pages() {
    let path = path("sum");
    let (one, two, three) =
        (Tokens::open(&path).unwrap(), Tokens::open(&path).unwrap(), Tokens::open(&path).unwrap());
    one.publish(0, 128, LATER);
    two.publish(0, 32, LATER);
    two.publish(5, 1, LATER);
    assert_eq!([one.others(NOW, 0), two.others(NOW, 0), three.others(NOW, 0)], [32, 128, 160]);
    assert_eq!([one.others(NOW, 5), two.others(NOW, 5)], [1, 0]);
    one.publish(0, 0, LATER);
    assert_eq!(two.others(NOW, 0), 0);
    // What the file has no place for is not counted.
    one.publish(64, 7, LATER);
    assert_eq!(two.others(NOW, 64), 0);
    drop(two);
    assert_eq!(three.others(NOW, 5), 0);
}

/// What nobody has collected keeps no device busy.
#[test]
fn pages_count_until_the_device_is_expected_to_be_done() {
    let path = path("until");
    let (one, two) = (Tokens::open(&path).unwrap(), Tokens::open(&path).unwrap());
    // Around the end of 32 bits of microseconds as well.
    for start in [NOW.0, (1 << 32) * 1000 - 10_000, 3 << 45] {
        let at = |after_ns| Instant(start + after_ns);
        one.publish(0, 128, at(17_500));
        assert_eq!(two.others(at(0), 0), 128);
        assert_eq!(two.others(at(17_000), 0), 128);
        assert_eq!(two.others(at(20_000), 0), 0);
        assert_eq!(two.others(at(1_000_000_000), 0), 0);
        one.publish(0, 256, at(40_000));
        assert_eq!(two.others(at(20_000), 0), 256);
        one.publish(0, 0, at(40_000));
        assert_eq!(two.others(at(20_000), 0), 0);
    }
}

#[test]
fn a_lane_is_taken_again() {
    let path = path("lanes");
    let one = Tokens::open(&path).unwrap();
    let two = Tokens::open(&path).unwrap();
    assert_eq!([one.lane(), two.lane()], [0, 1]);
    drop(one);
    let three = Tokens::open(&path).unwrap();
    assert_eq!(three.lane(), 0);
    let more: Vec<Tokens> = (2..256).map(|_| Tokens::open(&path).unwrap()).collect();
    let error = Tokens::open(&path).unwrap_err();
    assert!(error.to_string().ends_with("all lanes are taken"), "{error}");
    drop(more);
    assert_eq!(Tokens::open(&path).unwrap().lane(), 2);
}

fn victim(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_that_dies_gives_its_tokens_back", "--nocapture"])
        .env(VICTIM, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("took its tokens")));
    child
}

#[test]
fn a_process_that_dies_gives_its_tokens_back() {
    if let Some(path) = std::env::var_os(VICTIM) {
        let tokens = Tokens::open(Path::new(&path)).unwrap();
        tokens.publish(3, 1000, LATER);
        println!("took its tokens");
        std::thread::sleep(std::time::Duration::from_secs(60));
        drop(tokens);
        return;
    }
    let path = path("death");
    let tokens = Tokens::open(&path).unwrap();
    let mut children = [victim(&path), victim(&path)];
    assert_eq!(tokens.others(NOW, 3), 2000);
    children[0].kill().unwrap();
    children[0].wait().unwrap();
    // Who asks again a while later sees the living only; nobody has to ask for a sweep.
    let later = Instant(NOW.0 + 200_000_000);
    assert_eq!(tokens.others(later, 3), 1000);
    children[1].kill().unwrap();
    children[1].wait().unwrap();
    // A new process takes the lane over, and its count starts at nothing.
    let heir = Tokens::open(&path).unwrap();
    assert_eq!(heir.lane(), 1);
    assert_eq!(tokens.others(Instant(later.0 + 200_000_000), 3), 0);
}

#[test]
fn a_file_that_is_something_else_is_left_alone() {
    let path = path("foreign");
    std::fs::write(&path, "this is somebody's file").unwrap();
    assert!(matches!(Tokens::open(&path), Err(TokenError::Foreign { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"this is somebody's file");
    // The right size, and another header.
    std::fs::remove_file(&path).unwrap();
    drop(Tokens::open(&path).unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[7] = 2;
    std::fs::write(&path, bytes).unwrap();
    let error = Tokens::open(&path).unwrap_err();
    assert!(error.to_string().contains("another version"), "{error}");
    assert!(matches!(Tokens::open(Path::new("/dev/null")), Err(TokenError::Foreign { .. })));
    assert!(matches!(Tokens::open(&path.join("x")), Err(TokenError::Host { .. })));
}

#[test]
fn a_file_that_everybody_may_write_is_not_trusted() {
    use std::os::unix::fs::PermissionsExt;
    let path = path("world");
    drop(Tokens::open(&path).unwrap());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    let error = Tokens::open(&path).unwrap_err();
    assert!(error.to_string().ends_with("others may write to it"), "{error}");
}

/// A process died while it made the file: the next one makes it.
#[test]
fn a_file_that_was_left_half_made_is_finished() {
    let path = path("half");
    drop(Tokens::open(&path).unwrap());
    let bytes = std::fs::metadata(&path).unwrap().len();
    std::fs::write(&path, vec![0; usize::try_from(bytes).unwrap()]).unwrap();
    assert_eq!(Tokens::open(&path).unwrap().lane(), 0);
}
