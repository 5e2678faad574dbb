//! What all sandboxes of a node, and its pool, work with.

use std::{path::PathBuf, sync::Arc};

use space_node_manager::{ObjectName, Privileges};
use space_vmm::Vmm;
use tokio::sync::{Semaphore, broadcast, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::NodeConfig,
    host_room::HostRoom,
    journal::Journal,
    link::Owner,
    network_pool::NetworkPool,
    pool::Pool,
    registry::Registry,
    remains::Remains,
    seam::SandboxEvent,
    start_up::{DISKS, Locks, MACHINES},
    templates::Templates,
    uids::UidSlots,
};

/// What all sandboxes of a node share.
pub(crate) struct Shared {
    pub(crate) config: NodeConfig,
    pub(crate) privileges: Arc<dyn Privileges>,
    pub(crate) vmm: Arc<dyn Vmm>,
    pub(crate) templates: Arc<dyn Templates>,
    pub(crate) journal: Journal,
    pub(crate) networks: NetworkPool,
    pub(crate) pool: Pool,
    pub(crate) uids: Arc<UidSlots>,
    pub(crate) registry: Registry,
    pub(crate) starts: Semaphore,
    pub(crate) room: HostRoom,
    pub(super) tracker: TaskTracker,
    pub(super) stop: CancellationToken,
    pub(super) events: broadcast::Sender<SandboxEvent>,
    pub(super) left: mpsc::UnboundedSender<Remains>,
    pub(super) _locks: Locks,
}

impl Shared {
    /// Where a machine has its sockets and logs.
    pub(crate) fn machine_directory(&self, worker: &ObjectName) -> PathBuf {
        self.config.run_directory.join(MACHINES).join(worker.as_str())
    }

    /// Where a machine has its disk layers.
    pub(crate) fn disk_directory(&self, worker: &ObjectName) -> PathBuf {
        self.config.data_directory.join(DISKS).join(worker.as_str())
    }

    /// For the tasks of something that ends before the node does.
    pub(crate) fn owner(&self, stop: CancellationToken) -> Owner {
        Owner {
            tracker: self.tracker.clone(),
            stop,
        }
    }

    pub(crate) fn announce(&self, event: SandboxEvent) {
        // An error only says that nobody listens.
        drop(self.events.send(event));
    }

    pub(crate) fn leave_to_janitor(&self, remains: Remains) {
        if self.left.send(remains).is_err() {
            tracing::debug!("the janitor has gone home; the sweep takes the rest");
        }
    }
}
