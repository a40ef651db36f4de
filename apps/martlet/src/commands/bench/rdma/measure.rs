//! Writes between two processes: this executable again, as the side that is written and does
//! nothing.

use crate::failure::{Failure, chain};
use martlet_engine::Provider;
use martlet_ram::{GuestRam, RegionIndex};
use martlet_units::{Gfn, PAGE_SIZE, PageCount, PageRange};
use martlet_verbs::ibv::{Ibv, Select};
use martlet_verbs::{
    Access, Completion, ConnectRequest, Endpoint, Fabric, Flush, Link, Listener, Operation,
    QueuePair, Region, RemoteAddress, Rkey, SendWindow, Setup, Sge, Status, WorkRequest,
};
use martlet_verbs_soft::Soft;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is many.
pub(super) const MANY: u32 = 128;
/// Pages that are written, over and over, none next to the one before.
const PLACES: u64 = 4096;
/// How many are written for each figure. One at a time takes longer.
const PAGES: [(u32, u64); 2] = [(1, 20_000), (MANY, 100_000)];
/// A figure is the best of so many runs: a busy host only makes it worse.
const PASSES: u32 = 3;
/// How long the two may take to find each other.
const LIMIT: Duration = Duration::from_secs(20);
/// One wait for a completion, and how many without any are too many.
const WAIT: Duration = Duration::from_millis(100);
const WAITS_MAX: u32 = 100;

/// What came of it.
pub(super) struct Measured {
    pub(super) provider: String,
    pub(super) one_mib_s: f64,
    pub(super) many_mib_s: f64,
}

/// Measures as the side that writes.
pub(super) fn run(provider: Provider, at: IpAddr) -> Result<Measured, Failure> {
    match open_ibv(provider, at)? {
        Some(ibv) => write_to(&ibv, Provider::Ibv, at),
        None => write_to(&Soft::new(), Provider::Soft, at),
    }
}

/// Is the side that is written, until the other one is gone.
pub(super) fn serve(provider: Provider, at: IpAddr) -> Result<(), Failure> {
    match open_ibv(provider, at)? {
        Some(ibv) => be_written(&ibv, at),
        None => be_written(&Soft::new(), at),
    }
}

/// The device of `at`; `None` if there is to be none.
fn open_ibv(provider: Provider, at: IpAddr) -> Result<Option<Ibv>, Failure> {
    let open = || Ibv::open(&Select::Local(at));
    match provider {
        Provider::Soft => Ok(None),
        Provider::Ibv => open().map(Some).map_err(|error| Failure::Failed(chain(&error))),
        Provider::Auto => Ok(open().ok()),
    }
}

fn memory() -> Result<Arc<GuestRam>, Failure> {
    let range = PageRange::try_new(Gfn(0), PageCount(PLACES)).expect("a few pages from 0");
    let ram = GuestRam::create(&[range]).map_err(|e| Failure::because("memory", &e))?;
    // Neither side is to take page faults while it is measured.
    let _ = ram.regions()[0].populate(0..PLACES);
    Ok(Arc::new(ram))
}

fn failed(error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::Failed(chain(error))
}

fn be_written<F: Fabric>(fabric: &F, at: IpAddr) -> Result<(), Failure> {
    let ram = memory()?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = fabric.register(&ram.host_memory(RegionIndex(0)), access);
    let region = region.map_err(|e| failed(&e))?;
    let endpoint = Endpoint::Ip(SocketAddr::new(at, 0));
    let mut listener = fabric.listen(&endpoint).map_err(|e| failed(&e))?;
    let (address, key) = (region.address().0, region.remote_key().0);
    crate::out(format_args!("{} {address} {key}\n", listener.local()))?;
    let request = listener.accept(LIMIT).map_err(|e| failed(&e))?;
    let request = request.ok_or_else(|| Failure::Failed("nobody connects".to_owned()))?;
    let mut pair = request.accept(&setup(), &[], LIMIT).map_err(|e| failed(&e))?;
    while pair.link() == Link::Up {
        pair.arm().and_then(|()| pair.wait(WAIT)).map_err(|e| failed(&e))?;
    }
    Ok(())
}

fn setup() -> Setup {
    Setup { send_slots: MANY, completion_slots: MANY, ..Setup::default() }
}

/// The other process. It ends by itself when the connection does, or here.
struct Written {
    child: Child,
    at: SocketAddr,
    address: u64,
    key: Rkey,
}

impl Written {
    fn start(provider: Provider, at: IpAddr) -> Result<Written, Failure> {
        let program = std::env::current_exe().map_err(|e| Failure::because("own path", &e))?;
        let mut child = Command::new(program)
            .args(["bench", "rdma", "--serve", "--rdma-provider", &provider.to_string()])
            .args(["--address", &at.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::because("cannot start the other side", &e))?;
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        let _ = BufReader::new(stdout).read_line(&mut line);
        let words: Vec<&str> = line.split_whitespace().collect();
        let told = match words.as_slice() {
            [at, address, key] => at.parse().ok().zip(address.parse().ok()).zip(key.parse().ok()),
            _ => None,
        };
        let Some(((at, address), key)) = told else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Failure::Failed("the other side did not start".to_owned()));
        };
        Ok(Written { child, at, address, key: Rkey(key) })
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write_to<F: Fabric>(fabric: &F, provider: Provider, at: IpAddr) -> Result<Measured, Failure> {
    let written = Written::start(provider, at)?;
    let ram = memory()?;
    let region = fabric.register(&ram.host_memory(RegionIndex(0)), Access::empty());
    let region = region.map_err(|e| failed(&e))?;
    let connected = fabric.connect(&Endpoint::Ip(written.at), &setup(), &[], LIMIT);
    let (mut pair, _) = connected.map_err(|e| failed(&e))?;
    let [mut one_mib_s, mut many_mib_s] = [0.0_f64; 2];
    for _ in 0..PASSES {
        for ((depth, pages), best) in PAGES.into_iter().zip([&mut one_mib_s, &mut many_mib_s]) {
            let time = write_pages(&mut pair, &region, &written, depth, pages)?;
            *best = best.max(mib_s(pages, time));
        }
    }
    Ok(Measured { provider: fabric.name(), one_mib_s, many_mib_s })
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn mib_s(pages: u64, time: Duration) -> f64 {
    (pages * PAGE_SIZE) as f64 / f64::from(1 << 20) / time.as_secs_f64().max(1e-9)
}

/// Writes so many pages, with at most `depth` in flight; how long that took.
fn write_pages<P: QueuePair, R: Region>(
    pair: &mut P,
    region: &R,
    written: &Written,
    depth: u32,
    pages: u64,
) -> Result<Duration, Failure> {
    let mut window = SendWindow::new(depth);
    let mut list = Vec::with_capacity(depth as usize);
    let mut next = 0;
    let begin = Instant::now();
    while next < pages || window.in_flight() > 0 {
        list.clear();
        while next < pages && window.free() > 0 {
            next += 1;
            let flush = if next == pages { Flush::Last } else { Flush::MoreComes };
            let Some((id, signal)) = window.take(flush) else { break };
            let offset = next.wrapping_mul(397) % PLACES * PAGE_SIZE;
            let bytes = u32::try_from(PAGE_SIZE).expect("a page is small");
            let local =
                Sge { address: region.address().0 + offset, bytes, key: region.local_key() };
            let to = RemoteAddress(written.address + offset);
            let operation = Operation::Write { to, key: written.key };
            list.push(WorkRequest { id, operation, local, signal });
        }
        pair.post(&list).map_err(|e| failed(&e))?;
        take(pair, &mut window)?;
    }
    Ok(begin.elapsed())
}

/// Takes at least one completion.
fn take<P: QueuePair>(pair: &mut P, window: &mut SendWindow) -> Result<(), Failure> {
    let mut places = [Completion::default(); 32];
    for _ in 0..WAITS_MAX {
        pair.arm().map_err(|e| failed(&e))?;
        let got = pair.poll(&mut places).map_err(|e| failed(&e))?;
        for completion in &places[..got] {
            if completion.status != Status::SUCCESS {
                return Err(Failure::Failed(format!("a write failed: {}", completion.status)));
            }
            window.on_completion(completion);
        }
        if got > 0 {
            return Ok(());
        }
        pair.wait(WAIT).map_err(|e| failed(&e))?;
    }
    Err(Failure::Failed("writes do not complete".to_owned()))
}
