//! The devices of a host, as `/sys/bus/dsa/devices` tells them (Linux,
//! `Documentation/ABI/stable/sysfs-driver-dma-idxd`).

use crate::FindError;
use crate::queue::QueueLimits;
use martlet_dsa_abi::{Opcode, OperationCapability, Version};
use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;

/// Longest attribute that is read, in bytes: sysfs gives at most a page.
const ATTRIBUTE_BYTES_MAX: u64 = 4096;
/// Most entries of the bus that are looked at: 8 devices with 8 queues, 4 groups and 4 engines each
/// are 136.
const ENTRIES_MAX: usize = 4096;

/// A work queue's place: the 4 and the 0 of `wq4.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueName {
    /// Its device.
    pub device: u16,
    /// Its number there.
    pub queue: u16,
}

impl QueueName {
    /// The queue of a path like `/dev/dsa/wq4.0`, or of its last part alone.
    pub fn of_path(path: &Path) -> Option<QueueName> {
        path.file_name()?.to_str()?.parse().ok()
    }
}

impl FromStr for QueueName {
    type Err = ();

    fn from_str(text: &str) -> Result<QueueName, ()> {
        let (device, queue) = numbers_of(text).ok_or(())?;
        Ok(QueueName { device, queue })
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wq{}.{}", self.device, self.queue)
    }
}

/// The numbers of a name like `wq4.0`.
fn numbers_of(name: &str) -> Option<(u16, u16)> {
    let (one, two) = name.strip_prefix("wq")?.split_once('.')?;
    Some((number(one)?, number(two)?))
}

fn number(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// How descriptors come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// From anybody, by ENQCMD, which says when the queue is full.
    Shared,
    /// From one process, by MOVDIR64B, which doesn't.
    Dedicated,
}

/// What a host says of a work queue. Attributes that an older kernel does not have are `None`, and
/// so are those that are no numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its place.
    pub name: QueueName,
    /// How descriptors come in.
    pub mode: Option<Mode>,
    /// Whether it is for user processes: type and driver are `user`.
    pub for_users: bool,
    /// Whether it is enabled.
    pub enabled: bool,
    /// Its entries.
    pub size: u32,
    /// Most descriptors in a batch. The kernel's default is 32, whatever the device can.
    pub batch_max: Option<u32>,
    /// Most bytes of a transfer. The kernel's default is 2 MiB.
    pub transfer_bytes_max: Option<u64>,
    /// What it may do; `None` on kernels that don't limit it.
    pub operations: Option<OperationCapability>,
}

/// What a host says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The 4 of `dsa4`.
    pub number: u16,
    /// Its version.
    pub version: Option<Version>,
    /// Whether it has the process address spaces that ENQCMD and SVA need. Without them ENQCMD is a
    /// general protection fault.
    pub pasid: bool,
    /// Whether it is enabled.
    pub enabled: bool,
    /// Operations.
    pub operations: Option<OperationCapability>,
    /// Most descriptors in a batch of any queue.
    pub batch_max: Option<u32>,
    /// Most bytes of a transfer of any queue.
    pub transfer_bytes_max: Option<u64>,
    /// Its queues, by number.
    pub queues: Vec<Queue>,
}

/// Lists the devices below `devices`, which is `/sys/bus/dsa/devices`; none if that does not exist.
pub fn find(devices: &Path) -> Result<Vec<Device>, FindError> {
    let mut names = names(devices)?;
    names.sort_unstable();
    let numbers = names.iter().filter_map(|name| number(name.strip_prefix("dsa")?));
    let mut found: Vec<Device> = numbers.map(|number| device(devices, number)).collect();
    found.sort_unstable_by_key(|device| device.number);
    for device in &mut found {
        let own = names.iter().filter_map(|name| numbers_of(name));
        let mut own: Vec<u16> =
            own.filter(|(of, _)| *of == device.number).map(|(_, number)| number).collect();
        own.sort_unstable();
        device.queues = own
            .into_iter()
            .map(|number| queue(devices, QueueName { device: device.number, queue: number }))
            .collect();
    }
    Ok(found)
}

/// A work queue with its device; `None` if there is none of that name.
pub fn find_queue(devices: &Path, name: QueueName) -> Result<Option<(Device, Queue)>, FindError> {
    let mut all = find(devices)?;
    let Some(index) = all.iter().position(|device| device.number == name.device) else {
        return Ok(None);
    };
    let device = all.swap_remove(index);
    let queue = device.queues.iter().find(|queue| queue.name == name).cloned();
    Ok(queue.map(|queue| (device, queue)))
}

fn names(devices: &Path) -> Result<Vec<String>, FindError> {
    let error = |source| FindError { path: devices.to_owned(), source };
    let entries = match std::fs::read_dir(devices) {
        Ok(entries) => entries,
        Err(none) if none.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(error(source)),
    };
    let mut names = Vec::new();
    for entry in entries.take(ENTRIES_MAX) {
        names.extend(entry.map_err(error)?.file_name().into_string().ok());
    }
    Ok(names)
}

/// One directory of attributes.
struct Attributes<'a>(&'a Path, String);

impl Attributes<'_> {
    /// An attribute's text. What can't be read is not there: some attributes exist, and are refused
    /// by devices without the capability.
    fn text(&self, name: &str) -> Option<String> {
        use std::io::Read;
        let file = std::fs::File::open(self.0.join(&self.1).join(name)).ok()?;
        let mut text = String::new();
        file.take(ATTRIBUTE_BYTES_MAX).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned())
    }

    fn number<T: TryFrom<u64>>(&self, name: &str) -> Option<T> {
        let text = self.text(name)?;
        let value = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        T::try_from(value.ok()?).ok()
    }

    fn is(&self, name: &str, value: &str) -> bool {
        self.text(name).is_some_and(|text| text == value)
    }

    fn operations(&self, name: &str) -> Option<OperationCapability> {
        OperationCapability::parse(&self.text(name)?)
    }
}

fn device(devices: &Path, number: u16) -> Device {
    let read = Attributes(devices, format!("dsa{number}"));
    Device {
        number,
        version: read.number("version").map(Version),
        pasid: read.is("pasid_enabled", "1"),
        enabled: read.is("state", "enabled"),
        operations: read.operations("op_cap"),
        batch_max: read.number("max_batch_size"),
        transfer_bytes_max: read.number("max_transfer_size"),
        queues: Vec::new(),
    }
}

fn queue(devices: &Path, name: QueueName) -> Queue {
    let read = Attributes(devices, name.to_string());
    let mode = match read.text("mode").as_deref() {
        Some("shared") => Some(Mode::Shared),
        Some("dedicated") => Some(Mode::Dedicated),
        _ => None,
    };
    // Older kernels have no `driver_name`: there the type says it all.
    let driver = read.text("driver_name");
    Queue {
        name,
        mode,
        for_users: read.is("type", "user")
            && driver.is_none_or(|driver| driver.is_empty() || driver == "user"),
        enabled: read.is("state", "enabled"),
        size: read.number("size").unwrap_or(0),
        batch_max: read.number("max_batch_size"),
        transfer_bytes_max: read.number("max_transfer_size"),
        operations: read.operations("op_config"),
    }
}

/// Batches of a queue that says nothing: the kernel's default.
const BATCH_MAX_DEFAULT: u32 = 32;
/// Transfers of a queue that says nothing: the kernel's default.
const TRANSFER_BYTES_MAX_DEFAULT: u64 = 2 << 20;

impl Device {
    /// The limits of one of its queues, for [`WorkQueue`](crate::WorkQueue): the lower of the
    /// queue's and the device's. `through_file` for one that is written to, where version 1 devices
    /// take no batches. The kernel hands descriptors to a dedicated queue by MOVDIR64B as well, and
    /// counts no entries either.
    pub fn limits(&self, queue: &Queue, through_file: bool) -> QueueLimits {
        let batch_max = queue.batch_max.unwrap_or(BATCH_MAX_DEFAULT);
        let batch_max = batch_max.min(self.batch_max.unwrap_or(u32::MAX));
        let transfer = queue.transfer_bytes_max.unwrap_or(TRANSFER_BYTES_MAX_DEFAULT);
        let old = self.version.is_none_or(|version| version < Version::V2);
        let can = |operation| {
            let may = |set: &OperationCapability| set.has(operation);
            self.operations.as_ref().is_none_or(may) && queue.operations.as_ref().is_none_or(may)
        };
        let batches = can(Opcode::BATCH) && !(through_file && old);
        let counts = queue.mode == Some(Mode::Dedicated);
        QueueLimits {
            batch_max: if batches { batch_max } else { 1 },
            transfer_bytes_max: transfer.min(self.transfer_bytes_max.unwrap_or(u64::MAX)),
            credits: counts.then_some(queue.size),
        }
    }

    /// What stands in the way of checking pages with one of its queues; `None` for nothing.
    pub fn obstacle(&self, queue: &Queue) -> Option<&'static str> {
        let can = |set: &Option<OperationCapability>| {
            set.as_ref().is_none_or(|set| set.has(Opcode::COMPVAL))
        };
        let checks = [
            (self.enabled, "its device is not enabled"),
            (queue.enabled, "it is not enabled"),
            (queue.for_users, "it is not for user processes (type and driver_name must be user)"),
            (queue.mode.is_some(), "its mode is neither shared nor dedicated"),
            (queue.size > 0, "it has no entries"),
            (
                self.pasid,
                "its device has no process address spaces (pasid_enabled is 0; boot with \
                 intel_iommu=on,sm_on)",
            ),
            (can(&self.operations) && can(&queue.operations), "it may not compare patterns"),
        ];
        checks.into_iter().find(|(good, _)| !good).map(|(_, obstacle)| obstacle)
    }
}
