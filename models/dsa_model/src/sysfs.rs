//! What the device says of itself: the attributes that Linux shows below
//! `/sys/bus/dsa/devices` (`drivers/dma/idxd/sysfs.c`,
//! `Documentation/ABI/stable/sysfs-driver-dma-idxd`).

use crate::config::{BATCH_MAX, ENGINES_MAX, GROUPS_MAX, QUEUES_MAX, TRANSFER_BYTES_MAX};
use crate::state::{Life, Queue, State};
use crate::{DsaModel, Mode};
use martlet_dsa_abi::{DEVICE_ENTRIES, GeneralCapability, OperationCapability};
use std::fmt::Write as _;
use std::io;
use std::path::Path;

/// Read buffers of a device.
const READ_BUFFERS: u32 = 96;

/// One attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysfsFile {
    /// Its path below `/sys/bus/dsa/devices`.
    pub path: String,
    /// Its content.
    pub text: String,
}

impl DsaModel {
    /// All attributes as they are now. Those of a device that is gone are gone.
    pub fn sysfs(&self) -> Vec<SysfsFile> {
        let state = self.lock();
        if state.life == Life::Gone {
            return Vec::new();
        }
        let number = state.config.number;
        let mut tree = Tree { files: Vec::new(), root: format!("dsa{number}") };
        tree.device(&state);
        for (index, queue) in state.queues.iter().enumerate() {
            tree.queue(&state, index, queue);
        }
        for (index, group) in state.config.engines.iter().enumerate() {
            tree.put(&format!("engine{number}.{index}"), "group_id", group);
        }
        for group in 0..GROUPS_MAX {
            tree.group(&state, group);
        }
        tree.files
    }

    /// Writes the attributes below a directory, with the links that the bus has besides: `wq0.0` as
    /// well as `dsa0/wq0.0`. What was there before is replaced.
    pub fn write_sysfs(&self, devices: &Path) -> io::Result<()> {
        for SysfsFile { path, text } in self.sysfs() {
            let path = devices.join(path);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
                link_on_bus(devices, parent)?;
            }
            std::fs::write(path, text)?;
        }
        Ok(())
    }
}

/// The bus lists queues, groups and engines next to their device.
fn link_on_bus(devices: &Path, directory: &Path) -> io::Result<()> {
    let Ok(inner) = directory.strip_prefix(devices) else { return Ok(()) };
    let (Some(name), true) = (inner.file_name(), inner.components().count() == 2) else {
        return Ok(());
    };
    match std::os::unix::fs::symlink(inner, devices.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

struct Tree {
    files: Vec<SysfsFile>,
    root: String,
}

impl Tree {
    fn put(&mut self, directory: &str, name: &str, value: impl core::fmt::Display) {
        let root = &self.root;
        let path = match directory {
            "" => format!("{root}/{name}"),
            directory => format!("{root}/{directory}/{name}"),
        };
        self.files.push(SysfsFile { path, text: format!("{value}\n") });
    }

    fn device(&mut self, state: &State) {
        let config = &state.config;
        let general = GeneralCapability::new()
            .with_block_on_fault(true)
            .with_command_capability(true)
            .with_transfer_shift_max(31)
            .with_batch_shift_max(10)
            .with_configurable(true);
        let life = match state.life {
            Life::Running => "enabled",
            Life::Halted => "halted",
            Life::Gone => "disabled",
        };
        self.put("", "version", format_args!("{:#x}", config.version.0));
        self.put("", "max_work_queues", QUEUES_MAX);
        self.put("", "max_work_queues_size", DEVICE_ENTRIES);
        self.put("", "max_groups", GROUPS_MAX);
        self.put("", "max_engines", ENGINES_MAX);
        self.put("", "max_batch_size", BATCH_MAX);
        self.put("", "max_transfer_size", TRANSFER_BYTES_MAX);
        self.put("", "max_read_buffers", READ_BUFFERS);
        self.put("", "read_buffer_limit", 0);
        self.put("", "numa_node", config.numa_node);
        self.put("", "gen_cap", format_args!("{:#x}", general.into_bits()));
        self.put("", "op_cap", bitmap(config.operations));
        self.put("", "pasid_enabled", u8::from(config.pasid));
        self.put("", "state", life);
        self.put("", "clients", 0);
        self.put("", "configurable", 1);
        self.put("", "cmd_status", "0");
        self.put("", "event_log_size", 0);
        self.put("", "errors", ["0x0000000000000000"; 4].join(" "));
        self.put("", "cdev_major", 235);
    }

    fn queue(&mut self, state: &State, index: usize, queue: &Queue) {
        let config = &queue.config;
        let directory = format!("wq{}.{index}", state.config.number);
        let mode = match config.mode {
            Mode::Shared => "shared",
            Mode::Dedicated => "dedicated",
        };
        let mut put = |name: &str, value: &dyn core::fmt::Display| {
            self.put(&directory, name, value);
        };
        put("mode", &mode);
        put("type", &"user");
        put("name", &"martlet");
        put("driver_name", &"user");
        put("state", &"enabled");
        put("size", &config.size);
        put("threshold", &config.threshold);
        put("priority", &config.priority);
        put("group_id", &config.group);
        put("block_on_fault", &u8::from(config.block_on_fault));
        put("ats_disable", &0);
        put("prs_disable", &0);
        put("max_batch_size", &config.batch_max);
        put("max_transfer_size", &config.transfer_bytes_max);
        put("op_config", &bitmap(state.config.operations));
        put("occupancy", &queue.waiting.len());
        put("enqcmds_retries", &64);
        put("clients", &0);
        put("cdev_minor", &index);
    }

    fn group(&mut self, state: &State, group: usize) {
        let number = state.config.number;
        let is_here = |of: u8| usize::from(of) == group;
        let engines = state.config.engines.iter().enumerate().filter(|(_, of)| is_here(**of));
        let engines: Vec<String> =
            engines.map(|(index, _)| format!("engine{number}.{index}")).collect();
        let queues = state.queues.iter().enumerate();
        let queues = queues.filter(|(_, queue)| is_here(queue.config.group));
        let queues: Vec<String> = queues.map(|(index, _)| format!("wq{number}.{index}")).collect();
        let directory = format!("group{number}.{group}");
        self.put(&directory, "engines", engines.join(" "));
        self.put(&directory, "work_queues", queues.join(" "));
        self.put(&directory, "use_read_buffer_limit", 0);
        self.put(&directory, "read_buffers_reserved", 0);
        self.put(&directory, "read_buffers_allowed", READ_BUFFERS);
        self.put(&directory, "desc_progress_limit", 0);
        self.put(&directory, "batch_progress_limit", 0);
    }
}

/// As the kernel's `%*pb` prints 256 bits: words of 32, the most significant first.
fn bitmap(operations: OperationCapability) -> String {
    let mut text = String::new();
    for word in operations.words().iter().rev() {
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a string does not fail.
        let _ = write!(text, "{comma}{:08x},{:08x}", word >> 32, word & 0xffff_ffff);
    }
    text
}
