//! The manager on a pretended host.

mod adoption;
mod capacity;
mod ends;
mod faults;
mod guests;
mod idle;
mod lifecycle;
mod pause;
mod pool;
mod recovery;
mod sequences;
mod undo;

use std::{collections::BTreeMap, future::Future, path::Path, sync::Arc, time::Duration};

use jiff::{Timestamp, ToSpan as _};
use space_api::id::{ProjectId, SandboxId};

use crate::{
    CreateSandbox, Node as _, NodeConfig, NodeManager, OpenError,
    fakes::{Life, PretendedVmm, World},
};

/// Limit of every wait in these tests.
const SOON: Duration = Duration::from_secs(20);

/// A pretended host and a node on it.
struct Fixture {
    directory: Arc<tempfile::TempDir>,
    world: Arc<World>,
    node: Arc<NodeManager>,
}

fn directory() -> Arc<tempfile::TempDir> {
    let directory = tempfile::Builder::new()
        .prefix("s")
        .tempdir_in("/tmp")
        .expect("a directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    fs_err::set_permissions(directory.path(), open).expect("ours");
    Arc::new(directory)
}

fn config(directory: &Path) -> NodeConfig {
    let mut config = NodeConfig::new(directory.join("data"), directory.join("run"));
    config.memory_budget = Some(u64::MAX);
    config.memory_reserve = 0;
    config.disk_reserve = 0;
    config.networks_ahead = 2;
    // But for the tests that are about it.
    config.pool.max_machines = 0;
    config.limits.ask = Duration::from_secs(5);
    config
}

async fn open(config: NodeConfig, world: &Arc<World>) -> Result<Arc<NodeManager>, OpenError> {
    NodeManager::open(
        config,
        world.clone(),
        Arc::new(PretendedVmm(world.clone())),
        world.clone(),
    )
    .await
}

impl Fixture {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut NodeConfig)) -> Self {
        Self::on(World::new(), change).await
    }

    async fn on(world: Arc<World>, change: impl FnOnce(&mut NodeConfig)) -> Self {
        let directory = directory();
        let mut config = config(directory.path());
        change(&mut config);
        let node = open(config, &world).await.expect("opens");
        Self {
            directory,
            world,
            node,
        }
    }

    /// The pretended machine of a sandbox.
    fn life(&self, id: &SandboxId) -> Option<Arc<Life>> {
        let handle = self.node.shared.registry.find(id)?;
        let worker = handle.view.borrow().worker.clone();
        self.world.life(worker.as_str())
    }

    /// What there is of sandboxes, beside the networks made ahead.
    fn leftovers(&self) -> Vec<String> {
        let mut left: Vec<_> = self
            .world
            .objects()
            .into_iter()
            .filter(|object| !object.starts_with("network n"))
            .collect();
        for parent in ["run/s", "data/disks"] {
            for entry in fs_err::read_dir(self.directory.path().join(parent)).expect("is there") {
                left.push(format!("file {:?}", entry.expect("readable").path()));
            }
        }
        let (committed, creating, live) = self.node.shared.registry.counts();
        if (committed, creating, live) != (0, 0, 0) {
            left.push(format!("{committed} bytes, {creating} creating, {live} live"));
        }
        let uids = self.node.shared.uids.in_use();
        if uids != 0 {
            left.push(format!("{uids} user ids"));
        }
        left
    }

    /// Shuts down and checks that nothing at all is left.
    async fn close(self) {
        within(self.node.shutdown()).await;
        assert_eq!(self.leftovers(), Vec::<String>::new());
        assert_eq!(self.world.objects(), Vec::<String>::new());
    }
}

fn request() -> CreateSandbox {
    CreateSandbox {
        id: SandboxId::random(),
        project: ProjectId::random(),
        template: "base".to_owned(),
        size: None,
        generation: 1,
        environment: BTreeMap::new(),
        deadline: Timestamp::now() + 1.hour(),
        on_idle: None,
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future)
        .await
        .expect("it takes too long")
}

/// Waits until something holds.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON, "it never came to be that {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
