//! A whole node of its own for each test, and an account of what is left of it.

use std::{
    collections::BTreeMap,
    future::Future,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use jiff::{Timestamp, ToSpan as _};
use rustix::process::Pid;
use space_api::id::{ProjectId, SandboxId};
use space_node::{CreateSandbox, Node as _, NodeConfig, NodeManager, PoolConfig, VolumeTemplates};
use space_node_manager::{LocalPrivileges, Privileges};
use space_vmm::{QemuConfig, QemuDriver, Vmm};
use space_volume::{TemplateBuilder, VolumeConfig};

const VICTIM: &str = "SPACE_TEST_NODE_VICTIM";
/// Limit of every wait.
const SOON: Duration = Duration::from_secs(60);

pub(crate) struct Stack {
    pub(crate) node: Arc<NodeManager>,
    installation: String,
    directory: Directory,
    pooled: bool,
    _guard: Guard,
}

/// Ends the monitors of a test that failed, which would otherwise outlive it, as monitors do. What else is left, the next
/// node of the same name sweeps.
struct Guard {
    installation: String,
}

impl Guard {
    fn new(installation: &str) -> Self {
        Self {
            installation: installation.to_owned(),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let group = format!("/space-{}/", self.installation);
        for (pid, groups) in processes() {
            if groups.contains(&group)
                && let Some(pid) = Pid::from_raw(pid)
            {
                // One that is gone already is what is wanted.
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
            }
        }
    }
}

/// No machines but those that a test asks for.
fn no_pool() -> PoolConfig {
    PoolConfig {
        max_machines: 0,
        ..PoolConfig::default()
    }
}

/// Ours to remove, or the parent's.
enum Directory {
    Own(tempfile::TempDir),
    Given(PathBuf),
}

/// Says loudly why a test cannot run here, if it cannot.
fn lacking() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    let Some(store) = templates() else {
        return Some("SPACE_TEST_TEMPLATES names no template store".to_owned());
    };
    let base = store.join("names/base");
    (!base.is_dir()).then(|| format!("{} has no template \"base\"", store.display()))
}

fn templates() -> Option<PathBuf> {
    std::env::var_os("SPACE_TEST_TEMPLATES").map(PathBuf::from)
}

fn skipped() -> bool {
    let lacking = lacking();
    if let Some(reason) = &lacking {
        println!("SKIPPED: {reason}");
        eprintln!("SKIPPED: {reason}");
    }
    lacking.is_some()
}

fn directory() -> tempfile::TempDir {
    // Short, for the sake of socket addresses.
    let directory = tempfile::Builder::new()
        .prefix("s")
        .tempdir_in("/tmp")
        .expect("a directory");
    fs_err::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o711)).expect("ours");
    directory
}

async fn open(directory: &Path, installation: &str, pool: PoolConfig) -> Arc<NodeManager> {
    let mut config = NodeConfig::new(directory.join("data"), directory.join("run"));
    // Tests run beside each other, so each has user ids of its own.
    let offset = installation.bytes().map(u32::from).sum::<u32>() % 50;
    let first = 300_000 + offset * 100;
    config.uids = first..first + 99;
    config.disk_reserve = 64 << 20;
    config.pool = pool;
    let privileges: Arc<dyn Privileges> =
        Arc::new(LocalPrivileges::new(installation, &config.run_directory).expect("privileges"));
    let driver = QemuDriver::probe(QemuConfig::default(), privileges.clone())
        .await
        .expect("QEMU");
    let vmm: Arc<dyn Vmm> = Arc::new(driver);
    let builder = TemplateBuilder::new(VolumeConfig {
        directory: templates().expect("checked"),
        cache_directory: directory.join("cache"),
        daemon_program: PathBuf::new(),
    });
    let builder = Arc::new(builder.expect("a template store"));
    let templates = VolumeTemplates::new(builder, &config, first + 99, vmm.clone(), privileges.clone());
    NodeManager::open(config, privileges, vmm, Arc::new(templates))
        .await
        .expect("opens")
}

impl Stack {
    pub(crate) async fn open(name: &str) -> Option<Self> {
        Self::with_pool(name, no_pool()).await
    }

    pub(crate) async fn with_pool(name: &str, pool: PoolConfig) -> Option<Self> {
        if skipped() {
            return None;
        }
        let pooled = pool.max_machines > 0;
        // Left over from a run of the tests that was killed, or not there at all.
        let installation = format!("t{name}");
        let directory = directory();
        let node = open(directory.path(), &installation, pool).await;
        Some(Self {
            node,
            _guard: Guard::new(&installation),
            installation,
            directory: Directory::Own(directory),
            pooled,
        })
    }

    pub(crate) fn directory(&self) -> &Path {
        match &self.directory {
            Directory::Own(directory) => directory.path(),
            Directory::Given(directory) => directory,
        }
    }

    /// The stack of a process that a test has started in order to kill it.
    pub(crate) async fn victim() -> Option<Self> {
        let directory = PathBuf::from(std::env::var_os(VICTIM)?);
        let installation = "tvictim".to_owned();
        let node = open(&directory, &installation, no_pool()).await;
        Some(Self {
            node,
            _guard: Guard::new(&installation),
            installation,
            directory: Directory::Given(directory),
            pooled: false,
        })
    }

    pub(crate) fn spawn_victim(test: &str) -> Option<(tempfile::TempDir, Child)> {
        if skipped() {
            return None;
        }
        let directory = directory();
        let child = Command::new(std::env::current_exe().expect("known"))
            .args(["--exact", test, "--nocapture"])
            .env(VICTIM, directory.path())
            .stdin(Stdio::null())
            .spawn()
            .expect("starts");
        Some((directory, child))
    }

    pub(crate) async fn reopen(name: &str, directory: tempfile::TempDir) -> Self {
        let installation = format!("t{name}");
        let node = open(directory.path(), &installation, no_pool()).await;
        Self {
            node,
            _guard: Guard::new(&installation),
            installation,
            directory: Directory::Own(directory),
            pooled: false,
        }
    }

    /// Ends the node without its machines.
    pub(crate) async fn let_go(self) -> Option<tempfile::TempDir> {
        within(self.node.detach()).await;
        match self.directory {
            Directory::Own(directory) => Some(directory),
            Directory::Given(_) => None,
        }
    }

    /// The monitor of a sandbox, found as an administrator would.
    pub(crate) async fn monitor(&self, id: &SandboxId) -> Option<Pid> {
        let machine = self.node.status(id).await.ok()?.machine;
        let group = format!("/space-{}/{machine}", self.installation);
        processes()
            .into_iter()
            .find(|(_, groups)| groups.contains(&group))
            .and_then(|(pid, _)| Pid::from_raw(pid))
    }

    /// Monitors, groups and files of this node's sandboxes.
    fn machines(&self) -> Vec<String> {
        let group = format!("/space-{}/", self.installation);
        let mut left: Vec<_> = processes()
            .into_iter()
            .filter(|(_, groups)| groups.contains(&group))
            .map(|(pid, _)| format!("process {pid}"))
            .collect();
        let prefix = format!("space-{}", self.installation);
        for hierarchy in fs_err::read_dir("/sys/fs/cgroup").expect("mounted").flatten() {
            for parent in [hierarchy.path(), PathBuf::from("/sys/fs/cgroup")] {
                for child in fs_err::read_dir(parent.join(&prefix))
                    .into_iter()
                    .flatten()
                    .flatten()
                {
                    if child.path().is_dir() {
                        left.push(format!("group {}", child.path().display()));
                    }
                }
            }
        }
        for parent in ["run/s", "data/disks"] {
            for entry in fs_err::read_dir(self.directory().join(parent))
                .into_iter()
                .flatten()
                .flatten()
            {
                left.push(format!("file {}", entry.path().display()));
            }
        }
        left.sort();
        left.dedup();
        left
    }

    /// Checks that the sandboxes are gone, shuts down, and checks that everything is.
    pub(crate) async fn close(self) {
        let live: Vec<_> = self
            .node
            .list()
            .await
            .into_iter()
            .map(|status| status.id)
            .collect();
        if live.is_empty() && !self.pooled {
            assert_eq!(self.machines(), Vec::<String>::new());
        }
        within(self.node.shutdown()).await;
        let mut left = self.machines();
        let prefix = format!("space-{}-", self.installation);
        for entry in fs_err::read_dir("/run/netns").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                left.push(format!("namespace {}", entry.path().display()));
            }
        }
        let mounts = fs_err::read_to_string("/proc/self/mounts").expect("there");
        left.extend(
            mounts
                .lines()
                .filter(|mount| mount.contains(&prefix))
                .map(|mount| format!("mount {mount}")),
        );
        assert_eq!(left, Vec::<String>::new());
    }
}

/// Every process that has not ended, with the control groups it is in.
fn processes() -> Vec<(i32, String)> {
    let mut all = Vec::new();
    for entry in fs_err::read_dir("/proc").expect("mounted").flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let read = |name: &str| fs_err::read_to_string(entry.path().join(name));
        let (Ok(groups), Ok(status)) = (read("cgroup"), read("status")) else {
            continue;
        };
        // One that was killed and not yet reaped is still listed, in the groups it had.
        if !status
            .lines()
            .any(|line| line.starts_with("State:\tZ") || line.starts_with("State:\tX"))
        {
            all.push((pid, groups));
        }
    }
    all
}

pub(crate) fn request() -> CreateSandbox {
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

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future)
        .await
        .expect("it takes too long")
}

/// Waits until something holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON, "it never came to be: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
