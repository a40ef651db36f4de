//! The soft provider between two processes: memory of a program that does nothing is written, and
//! its death is noticed.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code)]
// UNSAFETY: names a buffer of the test as memory that another process writes.

use martlet_device_io::HostMemory;
use martlet_verbs::{
    Access, Completion, ConnectRequest, Endpoint, Fabric, Flush, Link, Listener, Operation,
    QueuePair, Region, RemoteAddress, Rkey, SendWindow, Setup, Sge, Status, WorkRequest,
};
use martlet_verbs_soft::{Soft, SoftPair};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
const PAGES: u64 = 4096;
const PAGE_WORDS: u64 = 512;
/// Tells this program that it is the destination.
const ROLE: &str = "MARTLET_VERBS_DESTINATION";

/// Words, each an atomic, as another process writes them.
fn memory() -> (Arc<Vec<AtomicU64>>, HostMemory) {
    let words: Arc<Vec<AtomicU64>> =
        Arc::new((0..PAGES * PAGE_WORDS).map(|_| AtomicU64::new(0)).collect());
    let address = words.as_ptr().expose_provenance() as u64;
    // SAFETY: the vector's buffer stays where it is until its owner is dropped; atomics may be
    // written behind Rust's back.
    let memory = unsafe { HostMemory::new(address, PAGES * 4096, Arc::clone(&words) as _) };
    (words, memory)
}

/// What is written to page `page`.
fn word(page: u64, index: u64) -> u64 {
    page << 32 | index | 1 << 63
}

/// The place of a page at the destination: scattered.
fn place(page: u64) -> u64 {
    (page * 397 + 5) % PAGES
}

/// The destination's program; does nothing unless it is started as one.
#[test]
fn destination() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let (words, memory) = memory();
    let soft = Soft::new();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = soft.register(&memory, access).unwrap();
    let mut listener = soft.listen(&Endpoint::Ip("127.0.0.1:0".parse().unwrap())).unwrap();
    println!("\n@ {} {} {}", listener.local(), region.address().0, region.remote_key().0);
    let request = listener.accept(LIMIT).unwrap().unwrap();
    let _pair = request.accept(&Setup::default(), &[], LIMIT).unwrap();
    // From here on the program takes no part, until it is asked what it has.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let right = (0..PAGES).filter(|&page| {
        let at = usize::try_from(place(page) * PAGE_WORDS).unwrap();
        (0..).zip(&words[at..at + 512]).all(|(index, found)| {
            // Relaxed: the question came after the completions.
            found.load(Ordering::Relaxed) == word(page, index)
        })
    });
    println!("\n@ {}", right.count());
    std::io::stdin().read_line(&mut line).unwrap();
}

struct Destination {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Destination {
    fn start() -> Destination {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "destination", "--nocapture"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Destination { child, stdin, stdout }
    }

    /// The words of its next message.
    fn says(&mut self) -> Vec<String> {
        let mut line = String::new();
        while !line.starts_with("@ ") {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the destination has died");
        }
        line.split_whitespace().skip(1).map(str::to_owned).collect()
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn take(pair: &mut SoftPair, into: &mut Vec<Completion>) {
    let mut places = [Completion::default(); 32];
    for _ in 0..200 {
        pair.arm().unwrap();
        let got = pair.poll(&mut places).unwrap();
        into.extend_from_slice(&places[..got]);
        if got > 0 {
            return;
        }
        pair.wait(Duration::from_millis(100)).unwrap();
    }
    panic!("no completion came");
}

#[test]
fn a_program_that_does_nothing_is_written_and_its_death_is_noticed() {
    let mut destination = Destination::start();
    let told = destination.says();
    let [at, address, key] = told.as_slice() else { panic!("{told:?}") };
    let to = RemoteAddress(address.parse().unwrap());
    let key = Rkey(key.parse().unwrap());

    let (words, memory) = memory();
    for (at, found) in (0..).zip(words.iter()) {
        found.store(word(at / PAGE_WORDS, at % PAGE_WORDS), Ordering::Relaxed);
    }
    let soft = Soft::new();
    let region = soft.register(&memory, Access::empty()).unwrap();
    let setup = Setup::default();
    let at = Endpoint::Ip(at.parse().unwrap());
    let (mut pair, _) = soft.connect(&at, &setup, &[], LIMIT).unwrap();
    let write = |page: u64, window: &mut SendWindow| {
        let flush = if page + 1 == PAGES { Flush::Last } else { Flush::MoreComes };
        let (id, signal) = window.take(flush)?;
        let to = RemoteAddress(to.0 + place(page) * 4096);
        let local =
            Sge { address: region.address().0 + page * 4096, bytes: 4096, key: region.local_key() };
        Some(WorkRequest { id, operation: Operation::Write { to, key }, local, signal })
    };
    let mut window = SendWindow::new(pair.send_slots());
    let mut pages = (0..PAGES).peekable();
    let mut came = Vec::new();
    while pages.peek().is_some() || window.in_flight() > 0 {
        let mut list = Vec::new();
        while let Some(&page) = pages.peek()
            && let Some(request) = write(page, &mut window)
        {
            list.push(request);
            pages.next();
        }
        pair.post(&list).unwrap();
        take(&mut pair, &mut came);
        for completion in came.drain(..) {
            assert_eq!(completion.status, Status::SUCCESS);
            window.on_completion(&completion);
        }
    }
    writeln!(destination.stdin, "what have you got?").unwrap();
    assert_eq!(destination.says(), [PAGES.to_string()]);

    // It dies with writes in flight, or just before.
    let mut window = SendWindow::new(pair.send_slots());
    let list: Vec<WorkRequest> = (0..64).filter_map(|page| write(page, &mut window)).collect();
    pair.post(&list).unwrap();
    destination.child.kill().unwrap();
    while pair.link() == Link::Up {
        pair.arm().unwrap();
        pair.wait(Duration::from_millis(100)).unwrap();
    }
    assert_eq!(pair.link(), Link::Failed);
    pair.post(&list[..1]).unwrap();
    while came.last().is_none_or(|last| last.status != Status::FLUSHED) {
        take(&mut pair, &mut came);
    }
}
