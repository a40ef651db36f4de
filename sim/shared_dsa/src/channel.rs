//! What a channel's thread does, one thing after the other.
//!
//! martlet's channel walks, asks the policy, submits, and has up to two batches with devices while
//! it sends; it waits only if there is nothing else to do. The series' channel does one packet
//! after the other, and its process has a thread that polls.

use crate::clock::{Ps, times};
use crate::clock::{float, ps};
use crate::constants::{
    CPU_DATA_PAGE, CPU_ZERO_PAGE, DESCRIPTOR_PAGE, ENQCMD, MARTLET_WALK_PAGE, NIC_BYTES_PER_SEC,
    PACKET_PAGES, PAGE_BYTES, RUN_PAGES, SEND_PAGE, SLEEP_CPU, SLEEP_LATE, SPIN,
};
use crate::host::{Event, Host, pack};
use martlet_policy::admission::{Decision, Grant, Latency, OffloadPolicy, Outcome, Part, Request};
use std::collections::VecDeque;
use std::time::Duration;

/// A device is not asked for fewer pages than this: a descriptor list and a submission cost the
/// same for any number.
const PART_MIN: u32 = 16;

/// 512 KiB of a guest on their way through a channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    number: u32,
    zero: u32,
    pub(crate) begin: Ps,
    /// What a device does of it.
    grant: Option<Grant>,
    submitted: Ps,
    /// Its completion record is written; the series sees it later.
    landed: bool,
    device_done: Option<Ps>,
    rest_done: bool,
    counted: bool,
}

impl Packet {
    fn is_done(&self) -> bool {
        self.device_done.is_some() && self.rest_done
    }

    fn device_pages(&self) -> u32 {
        self.grant.map_or(0, |grant| grant.pages)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Phase {
    Begin,
    Walk,
    Fill(Grant),
    Submit(Grant, u32),
    /// Tries a full device without end: the series.
    Spin,
    CheckAll(Ps),
    CheckRest(Ps),
    Collect,
    Send,
    Drain,
    /// Waits for its oldest batch, since then.
    Wait(Ps),
    Wake,
}

pub(crate) struct Channel {
    vm: usize,
    /// The series binds a channel to a device by number. Its operators are assumed to name the
    /// devices in another order for each guest, or all first channels would share one.
    bound: u16,
    depth: usize,
    pub(crate) phase: Phase,
    packet: Packet,
    /// Its packet was refused, and is asked for again once an older one is done.
    stashed: bool,
    /// It has slept before it asked for its packet again.
    has_paused: bool,
    pending: VecDeque<Packet>,
    packets: u32,
    /// Pages of the packet that is sent.
    sending: u32,
    /// When the network has taken everything that was sent.
    drained_at: Ps,
}

impl Channel {
    pub(crate) fn new(vm: usize, number: u32, policy: OffloadPolicy) -> Channel {
        let packet = Packet {
            number: 0,
            zero: 0,
            begin: 0,
            grant: None,
            submitted: 0,
            landed: false,
            device_done: None,
            rest_done: true,
            counted: false,
        };
        Channel {
            vm,
            bound: u16::try_from(vm).unwrap_or(0).wrapping_add(u16::try_from(number).unwrap_or(0)),
            depth: if policy == OffloadPolicy::Block { 1 } else { 2 },
            phase: Phase::Begin,
            packet,
            stashed: false,
            has_paused: false,
            pending: VecDeque::with_capacity(2),
            packets: 0,
            sending: 0,
            drained_at: 0,
        }
    }
}

impl Host {
    fn is_series(&self) -> bool {
        self.cell.policy == OffloadPolicy::Block
    }

    /// The thread is free to choose.
    fn step(&mut self, at: usize) {
        let channel = &mut self.channels[at];
        let oldest_done = channel.pending.front().is_some_and(Packet::is_done);
        if oldest_done {
            self.collect(at);
        } else if channel.stashed {
            self.decide(at);
        } else if channel.pending.len() >= channel.depth {
            channel.phase = Phase::Wait(self.now);
        } else {
            let work = times(MARTLET_WALK_PAGE, PACKET_PAGES);
            self.compute(at, work, false, Phase::Walk);
        }
    }

    pub(crate) fn awake(&mut self, at: usize) {
        if matches!(self.channels[at].phase, Phase::Begin | Phase::Wake) {
            self.step(at);
        }
    }

    /// A computation of the thread is over.
    pub(crate) fn computed(&mut self, at: usize) {
        match self.channels[at].phase {
            Phase::Walk => {
                self.draw_packet(at);
                self.decide(at);
            }
            Phase::Fill(grant) => self.compute(at, ps(ENQCMD), true, Phase::Submit(grant, 1)),
            Phase::Submit(grant, tries) => self.submitted(at, grant, tries),
            Phase::Collect => {
                let packet = self.channels[at].pending.pop_front();
                let packet = packet.expect("collected what was pending");
                self.send(at, PACKET_PAGES - packet.zero);
            }
            Phase::Send => self.sent(at),
            phase => unreachable!("a thread in {phase:?} computes nothing"),
        }
    }

    fn draw_packet(&mut self, at: usize) {
        let zero_percent = u64::from(self.cell.zero_percent);
        let runs = PACKET_PAGES / RUN_PAGES;
        let zero = (0..runs).filter(|_| self.chance.below(100) < zero_percent).count();
        let channel = &mut self.channels[at];
        channel.packets = channel.packets.wrapping_add(1);
        channel.has_paused = false;
        channel.packet = Packet {
            number: channel.packets,
            zero: u32::try_from(zero).unwrap_or(0) * RUN_PAGES,
            begin: self.now,
            grant: None,
            submitted: 0,
            landed: false,
            device_done: None,
            rest_done: true,
            counted: false,
        };
    }

    fn decide(&mut self, at: usize) {
        let now = self.instant();
        let vm = self.channels[at].vm;
        if !matches!(self.cell.policy, OffloadPolicy::CpuOnly | OffloadPolicy::Block) {
            self.look_at_others(vm);
        }
        let asks_again =
            matches!(self.cell.policy, OffloadPolicy::Adaptive | OffloadPolicy::AdaptiveSaving);
        let channel = &mut self.channels[at];
        channel.stashed = false;
        channel.packet.begin = self.now;
        let request = Request { pages: PACKET_PAGES, channel: channel.bound };
        let admission = &mut self.vms[vm].admission;
        let asks_again = asks_again && !admission.cpu_is_due();
        let part = Part { pages_min: PART_MIN, has_pending: !channel.pending.is_empty() };
        match admission.decide_part(now, request, part, &self.others) {
            Decision::Offload(grant) => {
                channel.packet.grant = Some(grant);
                let work = times(DESCRIPTOR_PAGE, grant.pages) / 2;
                self.compute(at, work, true, Phase::Fill(grant));
            }
            Decision::Cpu if asks_again && !channel.pending.is_empty() => {
                self.wait_to_ask_again(at);
            }
            Decision::Cpu => {
                let pause = if asks_again { admission.pause(PACKET_PAGES) } else { Duration::ZERO };
                if pause.is_zero() || channel.has_paused {
                    return self.check_all(at);
                }
                (channel.has_paused, channel.stashed) = (true, true);
                channel.phase = Phase::Wake;
                self.tally.cpu_ps += float(ps(SLEEP_CPU));
                self.events.put(self.now + ps(pause), Event::Awake(at));
            }
        }
    }

    /// A channel waits for its own batch before it lets the CPU do another one: the device it keeps
    /// busy itself is no reason to use the CPU.
    fn wait_to_ask_again(&mut self, at: usize) {
        let channel = &mut self.channels[at];
        channel.stashed = true;
        if channel.pending.front().is_some_and(Packet::is_done) {
            self.collect(at);
        } else {
            channel.phase = Phase::Wait(self.now);
        }
    }

    /// What other processes have with each device, as they say in the file they share.
    fn look_at_others(&mut self, vm: usize) {
        let now = self.instant();
        for (device, pages) in self.others.iter_mut().enumerate() {
            let others = self.vms.iter().enumerate().filter(|(other, _)| *other != vm);
            *pages = others.map(|(_, other)| other.admission.backlog(now, device)).sum();
        }
    }

    fn submitted(&mut self, at: usize, grant: Grant, tries: u32) {
        let device = grant.device;
        if !self.spinning[device].is_empty() || !self.offer(at, grant) {
            self.tally.rejects += 1.0;
            if self.is_series() {
                self.channels[at].phase = Phase::Spin;
                self.spinning[device].push(at);
            } else if tries < grant.tries {
                self.compute(at, ps(ENQCMD), true, Phase::Submit(grant, tries + 1));
            } else {
                let now = self.instant();
                let vm = self.channels[at].vm;
                self.vms[vm].admission.finish(now, grant, Outcome::Rejected);
                self.channels[at].packet.grant = None;
                self.check_all(at);
            }
            return;
        }
        self.accepted(at, grant);
    }

    /// Whether the device takes the channel's packet.
    fn offer(&mut self, at: usize, grant: Grant) -> bool {
        let batch = pack(at, self.channels[at].packet.number);
        self.devices[grant.device].submit(self.now, batch, self.times.work(grant.pages))
    }

    pub(crate) fn accepted_after_spin(&mut self, at: usize, device: usize) {
        let grant = self.channels[at].packet.grant.expect("who spins has a grant");
        assert!(grant.device == device && self.offer(at, grant), "a place was free");
        self.accepted(at, grant);
    }

    fn accepted(&mut self, at: usize, grant: Grant) {
        let rest = PACKET_PAGES - grant.pages;
        let channel = &mut self.channels[at];
        channel.packet.submitted = self.now;
        channel.packet.rest_done = rest == 0;
        channel.pending.push_back(channel.packet);
        let (vm, number) = (channel.vm, channel.packet.number);
        if self.is_series() {
            // It blocks on a semaphore until the polling thread posts it.
            self.tally.cpu_ps += float(ps(SLEEP_CPU));
            self.pollers += usize::from(self.vms[vm].polled.is_empty());
            self.vms[vm].polled.push_back((at, number));
        }
        if rest == 0 {
            self.step(at);
        } else {
            let work = self.check_time(at, rest);
            self.channels[at].phase = Phase::CheckRest(self.now);
            self.scan.add(self.now, work, u64::try_from(at).unwrap_or(u64::MAX));
        }
    }

    fn check_all(&mut self, at: usize) {
        let work = self.check_time(at, PACKET_PAGES);
        self.channels[at].phase = Phase::CheckAll(self.now);
        self.scan.add(self.now, work, u64::try_from(at).unwrap_or(u64::MAX));
    }

    /// How long so many pages of the channel's packet take the CPU alone.
    fn check_time(&self, at: usize, pages: u32) -> Ps {
        let zero = u64::from(self.channels[at].packet.zero);
        let data = u64::from(PACKET_PAGES) - zero;
        let all = zero * ps(CPU_ZERO_PAGE) + data * ps(CPU_DATA_PAGE);
        all * u64::from(pages) / u64::from(PACKET_PAGES)
    }

    /// The thread's check is over.
    pub(crate) fn scanned(&mut self, at: usize) {
        let vm = self.channels[at].vm;
        let took = |since: Ps| Duration::from_nanos((self.now - since) / 1000);
        match self.channels[at].phase {
            Phase::CheckAll(since) => {
                self.vms[vm].admission.on_cpu(PACKET_PAGES, took(since));
                let packet = self.channels[at].packet;
                self.count(&packet);
                self.send(at, PACKET_PAGES - packet.zero);
            }
            Phase::CheckRest(since) => {
                let newest = self.channels[at].pending.back_mut().expect("it is pending");
                newest.rest_done = true;
                let rest = PACKET_PAGES - newest.device_pages();
                self.vms[vm].admission.on_cpu(rest, took(since));
                self.count_if_done(at, self.channels[at].pending.len() - 1);
                self.step(at);
            }
            phase => unreachable!("a thread in {phase:?} checks nothing"),
        }
    }

    fn count_if_done(&mut self, at: usize, place: usize) {
        let Some(packet) = self.channels[at].pending.get_mut(place) else { return };
        if packet.is_done() && !packet.counted {
            packet.counted = true;
            let packet = *packet;
            self.count(&packet);
        }
    }

    /// A completion record is written.
    pub(crate) fn landed(&mut self, at: usize, number: u32) {
        if self.is_series() {
            return self.landed_in_series(at, number);
        }
        self.answered(at, number);
        let channel = &mut self.channels[at];
        let oldest_done = channel.pending.front().is_some_and(Packet::is_done);
        if let (Phase::Wait(since), true) = (channel.phase, oldest_done) {
            let waited = self.now - since;
            self.tally.cpu_ps += float(waited.min(ps(SPIN)));
            if waited <= ps(SPIN) {
                return self.step(at);
            }
            self.tally.cpu_ps += float(ps(SLEEP_CPU));
            channel.phase = Phase::Wake;
            self.events.put(self.now + ps(SLEEP_LATE), Event::Awake(at));
        }
    }

    fn answered(&mut self, at: usize, number: u32) {
        let pending = &mut self.channels[at].pending;
        let place = pending.iter().position(|packet| packet.number == number);
        let place = place.expect("a batch ends once");
        pending[place].device_done = Some(self.now);
        self.count_if_done(at, place);
    }

    /// The polling thread sees only the head of its list: a batch that is done waits for those
    /// before it.
    fn landed_in_series(&mut self, at: usize, number: u32) {
        let pending = &mut self.channels[at].pending;
        let packet = pending.iter_mut().find(|packet| packet.number == number);
        packet.expect("a batch ends once").landed = true;
        let vm = self.channels[at].vm;
        while let Some((head, number)) = self.vms[vm].polled.front().copied() {
            let is_head = |packet: &Packet| packet.number == number && packet.landed;
            if !self.channels[head].pending.iter().any(is_head) {
                break;
            }
            self.vms[vm].polled.pop_front();
            self.pollers -= usize::from(self.vms[vm].polled.is_empty());
            self.answered(head, number);
            self.channels[head].phase = Phase::Wake;
            self.events.put(self.now + ps(SLEEP_LATE), Event::Awake(head));
        }
    }

    /// Reads the records of the oldest batch.
    fn collect(&mut self, at: usize) {
        let now = self.instant();
        let channel = &self.channels[at];
        let packet = channel.pending.front().expect("something is pending");
        let grant = packet.grant.expect("it was granted");
        let done = packet.device_done.expect("it is done");
        let took = |until: Ps| Duration::from_nanos(until.saturating_sub(packet.submitted) / 1000);
        let waited = matches!(channel.phase, Phase::Wake | Phase::Wait(_));
        let latency =
            if waited { Latency::Measured(took(done)) } else { Latency::AtMost(took(self.now)) };
        let vm = channel.vm;
        let outcome = Outcome::Completed { latency, faulted: 0 };
        self.vms[vm].admission.finish(now, grant, outcome);
        let work = times(DESCRIPTOR_PAGE, grant.pages) / 2;
        self.compute(at, work, true, Phase::Collect);
    }

    /// Sends the pages of a packet that are not zero, as soon as the socket has room: the network
    /// has taken the packet before.
    fn send(&mut self, at: usize, data: u32) {
        let channel = &mut self.channels[at];
        channel.sending = data;
        if data == 0 {
            self.step(at);
        } else if channel.drained_at > self.now {
            channel.phase = Phase::Drain;
            self.events.put(channel.drained_at, Event::Drained(at));
        } else {
            self.compute(at, times(SEND_PAGE, data), false, Phase::Send);
        }
    }

    pub(crate) fn drained(&mut self, at: usize) {
        let work = times(SEND_PAGE, self.channels[at].sending);
        self.compute(at, work, false, Phase::Send);
    }

    /// The thread has copied its pages into the socket.
    fn sent(&mut self, at: usize) {
        let bytes = u64::from(self.channels[at].sending) * PAGE_BYTES;
        let takes = bytes * 1_000_000 / (NIC_BYTES_PER_SEC / 1_000_000);
        self.nic_free = self.nic_free.max(self.now) + takes;
        self.channels[at].drained_at = self.nic_free;
        self.step(at);
    }
}
