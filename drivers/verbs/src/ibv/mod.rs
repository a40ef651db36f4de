//! Verbs of the kernel: libibverbs and librdmacm, opened at run time, so that martlet builds and
//! starts without them.

mod completions;
mod device;
mod id;
mod layout;
mod library;
mod pair;

pub use device::{IbvRegion, Select};
pub use pair::IbvPair;

use crate::error::VerbsError;
use crate::fabric::{
    ACCEPT_DATA_BYTES_MAX, CONNECT_DATA_BYTES_MAX, ConnectRequest, Endpoint, Fabric, Limits,
    Listener, REJECT_DATA_BYTES_MAX, Setup, check_private_data,
};
use crate::work::Access;
use device::Device;
use id::Id;
use layout::CM_CONNECT_REQUEST;
use martlet_device_io::HostMemory;
use pair::ReadsAsked;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connection requests that may wait to be accepted.
const BACKLOG: i32 = 64;

/// An RDMA device of this host. Clones share it.
#[derive(Clone)]
pub struct Ibv {
    device: Arc<Device>,
}

impl Ibv {
    /// Opens a device. The error says which package or device is missing.
    pub fn open(select: &Select) -> Result<Ibv, VerbsError> {
        Ok(Ibv { device: Device::open(select)? })
    }
}

fn ip(endpoint: &Endpoint) -> Result<SocketAddr, VerbsError> {
    match endpoint {
        Endpoint::Ip(address) => Ok(*address),
        Endpoint::Unix(_) => {
            Err(VerbsError::Address { provider: "ibv", address: endpoint.to_string() })
        }
    }
}

impl Fabric for Ibv {
    type Region = IbvRegion;
    type Pair = IbvPair;
    type Listener = IbvListener;

    fn name(&self) -> String {
        format!("ibv {}", self.device.name)
    }

    fn limits(&self) -> Limits {
        self.device.limits
    }

    fn register(&self, memory: &HostMemory, access: Access) -> Result<IbvRegion, VerbsError> {
        self.device.register(memory, access)
    }

    fn connect(
        &self,
        to: &Endpoint,
        setup: &Setup,
        data: &[u8],
        limit: Duration,
    ) -> Result<(IbvPair, Vec<u8>), VerbsError> {
        check_private_data(data, CONNECT_DATA_BYTES_MAX)?;
        let deadline = Instant::now() + limit;
        let mut id = Id::new(self.device.library)?;
        id.resolve(&ip(to)?, limit)?;
        check_device(&self.device, &id, to)?;
        let mut pair = IbvPair::new(&self.device, id, setup)?;
        let answer = pair.connect(setup, data, deadline)?;
        Ok((pair, answer))
    }

    fn listen(&self, at: &Endpoint) -> Result<IbvListener, VerbsError> {
        let mut at = ip(at)?;
        let mut id = Id::new(self.device.library)?;
        id.bind(&at)?;
        at.set_port(id.listen(BACKLOG)?);
        Ok(IbvListener { device: Arc::clone(&self.device), id, local: Endpoint::Ip(at) })
    }
}

/// Fails if the connection goes by another device than the one whose regions it is to use.
fn check_device(device: &Device, id: &Id, at: &Endpoint) -> Result<(), VerbsError> {
    if id.context() == device.context {
        return Ok(());
    }
    let address = format!("{at}: it goes by another device than {}", device.name);
    Err(VerbsError::Address { provider: "ibv", address })
}

/// Waits for connections by the connection manager.
pub struct IbvListener {
    device: Arc<Device>,
    id: Id,
    local: Endpoint,
}

impl Listener for IbvListener {
    type Pair = IbvPair;
    type Request = IbvRequest;

    fn local(&self) -> Endpoint {
        self.local.clone()
    }

    fn accept(&mut self, limit: Duration) -> Result<Option<IbvRequest>, VerbsError> {
        let deadline = Instant::now() + limit;
        loop {
            let Some(event) = self.id.channel.event_before(deadline)? else { return Ok(None) };
            // Others concern the listener's address, which a listener can't do anything about.
            if event.kind != CM_CONNECT_REQUEST {
                continue;
            }
            let id = Id::adopt(self.device.library, event.id)?;
            let asked = ReadsAsked {
                responder_resources: event.responder_resources,
                initiator_depth: event.initiator_depth,
            };
            let request = IbvRequest {
                device: Arc::clone(&self.device),
                id: Some(id),
                data: event.data,
                asked,
            };
            // Rejected by its drop if it fails.
            request.check(&self.local)?;
            return Ok(Some(request));
        }
    }
}

/// A connection request.
pub struct IbvRequest {
    device: Arc<Device>,
    /// `None` once it is answered.
    id: Option<Id>,
    data: Vec<u8>,
    asked: ReadsAsked,
}

impl IbvRequest {
    fn check(&self, at: &Endpoint) -> Result<(), VerbsError> {
        self.id.as_ref().map_or(Ok(()), |id| check_device(&self.device, id, at))
    }
}

impl ConnectRequest for IbvRequest {
    type Pair = IbvPair;

    fn private_data(&self) -> &[u8] {
        &self.data
    }

    fn accept(
        mut self,
        setup: &Setup,
        data: &[u8],
        limit: Duration,
    ) -> Result<IbvPair, VerbsError> {
        check_private_data(data, ACCEPT_DATA_BYTES_MAX)?;
        self.device.limits.check(setup)?;
        let deadline = Instant::now() + limit;
        let answered = VerbsError::Peer { what: "the request was answered before" };
        let id = self.id.take().ok_or(answered)?;
        let mut pair = IbvPair::new(&self.device, id, setup)?;
        pair.accept(setup, data, &self.asked, deadline)?;
        Ok(pair)
    }

    fn reject(mut self, data: &[u8]) -> Result<(), VerbsError> {
        check_private_data(data, REJECT_DATA_BYTES_MAX)?;
        self.id.take().map_or(Ok(()), |mut id| id.reject(data))
    }
}

impl Drop for IbvRequest {
    fn drop(&mut self) {
        if let Some(id) = &mut self.id {
            let _ = id.reject(&[]);
        }
    }
}

/// As a system call takes it; saturates.
fn timespec(limit: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there is no device, the error must help.
    #[test]
    fn a_missing_device_is_told_with_the_packages() {
        let selects = [Select::Any, Select::Named("martlet-none".to_owned())];
        for error in selects.iter().filter_map(|select| Ibv::open(select).err()) {
            let text = error.to_string();
            let helps = text.contains("ibverbs-providers") || text.contains("too old");
            assert!(helps, "{text}");
            println!("{text}");
        }
    }
}
