//! A vDPA device for tests: it sends every frame back on the pair that it came from. It knows
//! virtqueues and nothing of any hardware, and does what the trait promises, to the letter; it can
//! be told to fail.

use crate::clock;
use crate::vcpu::lock;
use martlet_units::Instant;
use martlet_vdpa::virtio::{DEVICE_NET, feature, net_config};
use martlet_vdpa::{
    Access, Capabilities, Counters, HostMemory, Identity, MapRun, Notify, QueueConfig, QueueIndex,
    QueueState, VdpaDevice, VdpaError,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

/// What a loopback is to do wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) begin_suspend: bool,
    pub(crate) suspend: bool,
    /// It does not answer that it is to suspend.
    pub(crate) silent: bool,
    pub(crate) resume: bool,
    pub(crate) prepare: bool,
    pub(crate) start: bool,
    /// It looks at no queue.
    pub(crate) inert: bool,
    /// It asks for no kicks, and looks at its queues now and then.
    pub(crate) quiet: bool,
    /// What happens to the next frame.
    pub(crate) mishap: Option<Mishap>,
}

/// What may happen to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mishap {
    Lost,
    Repeated,
    Flipped,
}

pub(crate) struct Loopback {
    identity: Identity,
    mac: [u8; 6],
    inner: Mutex<Inner>,
    changed: Condvar,
    ended: AtomicBool,
    services: AtomicU64,
}

#[derive(Default)]
struct Inner {
    features: Option<u64>,
    map: Vec<MapRun>,
    queues: BTreeMap<u16, Queue>,
    pairs: u16,
    /// Frames flow.
    runs: bool,
    prepared: bool,
    suspending: Option<Instant>,
    resuming: Option<Instant>,
    logs: bool,
    log: BTreeSet<u64>,
    kicked: bool,
    counters: Counters,
    trouble: Trouble,
    link_down: bool,
    on_config: Option<Notify>,
    /// Every call that changes something, for those who look at the order.
    calls: Vec<&'static str>,
}

struct Queue {
    config: QueueConfig,
    state: QueueState,
    notify: Option<Notify>,
}

/// How long suspend and resume take.
const DELAY: Duration = Duration::from_micros(300);

fn failed(action: &'static str) -> VdpaError {
    VdpaError::Device { action, reason: "told to fail".into() }
}

impl Loopback {
    pub(crate) fn new(number: u8, pairs: u16) -> Arc<Loopback> {
        let all = Capabilities { suspend: true, resume: true, dirty_log: true };
        Loopback::with(number, pairs, all)
    }

    pub(crate) fn with(number: u8, pairs: u16, capabilities: Capabilities) -> Arc<Loopback> {
        let features = feature::VERSION_1
            | feature::ACCESS_PLATFORM
            | feature::NET_MAC
            | feature::NET_STATUS
            | feature::NET_MQ
            | feature::NET_CTRL_VQ
            | feature::NET_MRG_RXBUF;
        let identity = Identity {
            device_id: DEVICE_NET,
            features,
            queues: pairs * 2,
            queue_size_max: 256,
            config_bytes: net_config::BYTES,
            capabilities,
        };
        let device = Arc::new(Loopback {
            identity,
            mac: [2, 0, 0, 0, 0, number],
            inner: Mutex::default(),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
            services: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&device);
        std::thread::spawn(move || work(&weak));
        device
    }

    pub(crate) fn set_trouble(&self, trouble: Trouble) {
        lock(&self.inner).trouble = trouble;
    }

    pub(crate) fn take_calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut lock(&self.inner).calls)
    }

    pub(crate) fn is_running(&self) -> bool {
        lock(&self.inner).runs
    }

    pub(crate) fn pairs(&self) -> u16 {
        lock(&self.inner).pairs
    }

    pub(crate) fn features(&self) -> Option<u64> {
        lock(&self.inner).features
    }

    pub(crate) fn services(&self) -> u64 {
        self.services.load(Ordering::Relaxed)
    }

    pub(crate) fn set_link(&self, up: bool) {
        let notify = {
            let mut inner = lock(&self.inner);
            inner.link_down = !up;
            inner.on_config.clone()
        };
        if let Some(notify) = notify {
            notify();
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }
}

/// The device's own thread: looks at all queues when kicked, and now and then.
fn work(device: &Weak<Loopback>) {
    while let Some(device) = device.upgrade() {
        let mut notify = Vec::new();
        {
            let mut inner = lock(&device.inner);
            if !inner.kicked {
                let waited = device.changed.wait_timeout(inner, Duration::from_millis(2));
                inner = waited.map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
            }
            inner.kicked = false;
            if inner.runs && !inner.trouble.inert {
                inner.loop_frames(&mut notify);
            }
        }
        notify.iter().for_each(|notify| notify());
    }
}

impl Inner {
    fn loop_frames(&mut self, notify: &mut Vec<Notify>) {
        for pair in 0..self.pairs.max(1) {
            let (receive, transmit) = (pair * 2, pair * 2 + 1);
            while self.loop_one(receive, transmit) {
                for queue in [receive, transmit] {
                    let queue = &self.queues[&queue];
                    let flags: u16 = self.word(queue.config.driver.0);
                    if flags & 1 == 0 {
                        notify.extend(queue.notify.clone());
                    }
                }
            }
        }
    }

    /// Moves one frame from a transmit queue to a receive queue, if there are both.
    fn loop_one(&mut self, receive: u16, transmit: u16) -> bool {
        let (Some(rx), Some(tx)) = (self.queues.get(&receive), self.queues.get(&transmit)) else {
            return false;
        };
        let (rx, tx) = ((rx.config, rx.state), (tx.config, tx.state));
        let is_empty = |(config, state): &(QueueConfig, QueueState)| {
            self.word(config.driver.0 + 2) == state.avail_index
        };
        if is_empty(&tx) || is_empty(&rx) {
            return false;
        }
        fence(Ordering::Acquire);
        let (tx_id, from, length) = self.head(&tx);
        let (rx_id, to, _) = self.head(&rx);
        let mut frame = vec![0; usize::try_from(length).unwrap()];
        self.read(from, &mut frame);
        let mishap = self.trouble.mishap.take();
        if mishap == Some(Mishap::Flipped) {
            frame[70] ^= 4;
        }
        if mishap != Some(Mishap::Lost) {
            self.write(to, &frame);
            self.give_back(receive, rx_id, length);
        }
        if mishap != Some(Mishap::Repeated) {
            self.give_back(transmit, tx_id, 0);
        }
        let now = clock::now().0;
        self.counters.frames_sent += 1;
        self.counters.frames_received += 1;
        self.counters.first_frame_ns.get_or_insert(now);
        self.counters.last_frame_ns = Some(now);
        true
    }

    /// Head, address and length of the next chain.
    fn head(&self, (config, state): &(QueueConfig, QueueState)) -> (u16, u64, u32) {
        let slot = u64::from(state.avail_index % config.size);
        let head = self.word(config.driver.0 + 4 + slot * 2);
        let mut descriptor = [0; 16];
        self.read(config.descriptors.0 + u64::from(head) * 16, &mut descriptor);
        let address = u64::from_le_bytes(descriptor[..8].try_into().unwrap());
        (head, address, u32::from_le_bytes(descriptor[8..12].try_into().unwrap()))
    }

    fn give_back(&mut self, number: u16, id: u16, length: u32) {
        let queue = self.queues.get_mut(&number).unwrap();
        let (config, before) = (queue.config, queue.state);
        queue.state.avail_index = before.avail_index.wrapping_add(1);
        queue.state.used_index = before.used_index.wrapping_add(1);
        let used = queue.state.used_index;
        let at = config.device.0 + 4 + u64::from(before.used_index % config.size) * 8;
        let entry = [u32::from(id).to_le_bytes(), length.to_le_bytes()];
        self.write(at, entry.as_flattened());
        fence(Ordering::Release);
        self.write(config.device.0 + 2, &used.to_le_bytes());
    }

    fn word(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    fn host(&self, at: u64, bytes: usize) -> HostMemory {
        let bytes = bytes as u64;
        let inside =
            |run: &&MapRun| run.iova.0 <= at && at + bytes <= run.iova.0 + run.memory.bytes();
        let run = self.map.iter().find(inside).expect("the guest's addresses are in the map");
        assert_eq!(run.access, Access::ReadWrite);
        run.memory.slice(at - run.iova.0, bytes).unwrap()
    }

    fn read(&self, at: u64, into: &mut [u8]) {
        crate::memory::copy_from(&self.host(at, into.len()), into);
    }

    fn write(&mut self, at: u64, from: &[u8]) {
        crate::memory::copy_to(&self.host(at, from.len()), from);
        if self.logs {
            self.log.extend(at / 4096..=(at + from.len() as u64 - 1) / 4096);
        }
    }

    fn go(&mut self) {
        if self.trouble.quiet {
            let rings: Vec<u64> = self.queues.values().map(|q| q.config.device.0).collect();
            rings.into_iter().for_each(|ring| self.write(ring, &[1, 0]));
        }
        self.runs = true;
        self.kicked = true;
        self.counters.first_frame_ns = None;
    }
}

impl VdpaDevice for Loopback {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        let inner = lock(&self.inner);
        let mut config = [0; net_config::BYTES as usize];
        config[..6].copy_from_slice(&self.mac);
        config[net_config::STATUS] = u8::from(!inner.link_down);
        config[net_config::MAX_PAIRS] = (self.identity.queues / 2).to_le_bytes()[0];
        for (place, byte) in (usize::try_from(offset).unwrap()..).zip(into) {
            *byte = config.get(place).copied().unwrap_or(0);
        }
    }

    fn write_config(&self, _: u32, _: &[u8]) {}

    fn on_config_change(&self, notify: Notify) {
        lock(&self.inner).on_config = Some(notify);
    }

    fn set_features(&self, features: u64) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("set_features");
        assert_eq!(features & !self.identity.features, 0);
        assert!(!inner.runs);
        inner.features = Some(features);
        Ok(())
    }

    fn set_map(&self, runs: &[MapRun]) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("set_map");
        inner.map = runs.to_vec();
        Ok(())
    }

    fn set_queue(&self, queue: QueueIndex, config: QueueConfig) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        assert!(queue.0 < self.identity.queues && !inner.runs && !inner.prepared);
        inner.queues.insert(queue.0, Queue { config, state: QueueState::default(), notify: None });
        Ok(())
    }

    fn on_queue_used(&self, queue: QueueIndex, notify: Notify) {
        if let Some(queue) = lock(&self.inner).queues.get_mut(&queue.0) {
            queue.notify = Some(notify);
        }
    }

    fn set_queue_state(&self, queue: QueueIndex, state: QueueState) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        assert!(!inner.runs, "indices are set before the resume");
        inner.queues.get_mut(&queue.0).unwrap().state = state;
        Ok(())
    }

    fn queue_state(&self, queue: QueueIndex) -> Result<QueueState, VdpaError> {
        let inner = lock(&self.inner);
        if inner.runs {
            return Err(failed("read a queue that runs"));
        }
        Ok(inner.queues[&queue.0].state)
    }

    fn set_queue_pairs(&self, pairs: u16) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("set_queue_pairs");
        assert!(pairs > 0 && pairs * 2 <= self.identity.queues);
        inner.pairs = pairs;
        inner.kicked = true;
        Ok(())
    }

    fn prepare(&self) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("prepare");
        assert!(inner.features.is_some() && !inner.map.is_empty() && !inner.runs);
        if inner.trouble.prepare {
            return Err(failed("prepare"));
        }
        inner.prepared = true;
        Ok(())
    }

    fn start(&self) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("start");
        if inner.trouble.start {
            return Err(failed("start"));
        }
        assert!(inner.features.is_some() && !inner.map.is_empty() && !inner.runs);
        inner.go();
        self.changed.notify_all();
        Ok(())
    }

    fn kick(&self, _: QueueIndex) {
        lock(&self.inner).kicked = true;
        self.changed.notify_all();
    }

    fn begin_suspend(&self) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("begin_suspend");
        assert!(inner.runs && inner.suspending.is_none());
        if inner.trouble.begin_suspend {
            return Err(failed("begin to suspend"));
        }
        inner.suspending = Some(clock::now());
        Ok(())
    }

    fn poll_suspend(&self) -> Option<Result<(), VdpaError>> {
        let mut inner = lock(&self.inner);
        let began = inner.suspending.expect("a suspend was begun");
        if clock::now().since(began) < DELAY || inner.trouble.silent {
            return None;
        }
        inner.suspending = None;
        if inner.trouble.suspend {
            return Some(Err(failed("suspend")));
        }
        inner.calls.push("suspended");
        inner.runs = false;
        Some(Ok(()))
    }

    fn begin_resume(&self) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("begin_resume");
        assert!(!inner.runs && inner.resuming.is_none());
        inner.resuming = Some(clock::now());
        Ok(())
    }

    fn poll_resume(&self) -> Option<Result<(), VdpaError>> {
        let mut inner = lock(&self.inner);
        let began = inner.resuming.expect("a resume was begun");
        if clock::now().since(began) < DELAY {
            return None;
        }
        inner.resuming = None;
        inner.calls.push("resumed");
        inner.go();
        let notify: Vec<_> = inner.queues.values().filter_map(|q| q.notify.clone()).collect();
        let failing = inner.trouble.resume;
        drop(inner);
        self.changed.notify_all();
        notify.iter().for_each(|notify| notify());
        Some(if failing { Err(failed("resume queue 3")) } else { Ok(()) })
    }

    fn set_dirty_log(&self, on: bool) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.logs = on;
        if !on {
            inner.log.clear();
        }
        Ok(())
    }

    fn take_dirty(&self, mark: &mut dyn FnMut(u64, u64)) {
        for page in std::mem::take(&mut lock(&self.inner).log) {
            mark(page / 64 * 64, 1 << (page % 64));
        }
    }

    fn reset(&self) -> Result<(), VdpaError> {
        let mut inner = lock(&self.inner);
        inner.calls.push("reset");
        let calls = std::mem::take(&mut inner.calls);
        *inner = Inner { calls, trouble: inner.trouble, ..Inner::default() };
        Ok(())
    }

    fn service(&self) -> Option<Instant> {
        self.services.fetch_add(1, Ordering::Relaxed);
        Some(clock::now().after(Duration::from_millis(1)))
    }

    fn counters(&self) -> Counters {
        lock(&self.inner).counters
    }
}
