//! What the tests of real acts share. They need root and skip loudly without it.

#![expect(unreachable_pub, reason = "included by several test programs")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use fs_err as fs;
use rustix::{
    event::{PollFd, PollFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use space_node_manager::{
    ExitStatus, GroupLimits, LocalOptions, LocalPrivileges, ObjectName, Privileges, ProcessIdentity,
    RemotePrivileges, Server, ServerConfig, VmmProcess,
};
use tempfile::TempDir;
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// The first user of a test's monitors.
pub const UID: u32 = 40_330;

/// Most machines of a test's server.
pub const MACHINES: usize = 8;

/// A program that is there everywhere and that nobody but root can change.
pub const SLEEP: &str = "/usr/bin/sleep";

/// How long anything may take that is waited for.
pub const LIMIT: Duration = Duration::from_secs(20);

/// An installation of its own for each test; sweeps itself.
pub struct Installation {
    pub name: String,
    pub directory: TempDir,
}

impl Installation {
    pub fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return None;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = tempfile::tempdir().unwrap();
        // Others pass through here, on the way to what is theirs.
        fs::set_permissions(
            directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o711),
        )
        .unwrap();
        Some(Self {
            name: format!("c{}x{number}", std::process::id()),
            directory,
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("manager.sock")
    }

    pub fn local(&self) -> LocalPrivileges {
        self.local_with(LocalOptions::default())
    }

    pub fn local_with(&self, options: LocalOptions) -> LocalPrivileges {
        LocalPrivileges::with(&self.name, self.directory.path(), options).unwrap()
    }

    /// A process that does nothing for long.
    pub fn sleeper(&self, name: &ObjectName) -> VmmProcess {
        VmmProcess {
            name: name.clone(),
            program: SLEEP.into(),
            arguments: vec!["1000".into()],
            uid: UID,
            network_namespace: None,
            descriptors: BTreeMap::new(),
            log: None,
            file_size_limit: 1 << 20,
            views: Vec::new(),
        }
    }
}

impl Drop for Installation {
    /// Also after a failed assertion nothing stays on the host.
    fn drop(&mut self) {
        let (name, directory) = (self.name.clone(), self.directory.path().to_owned());
        let sweep = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                if let Ok(privileges) = LocalPrivileges::new(&name, directory) {
                    privileges.sweep(&BTreeSet::new()).await.unwrap();
                }
            });
        });
        sweep.join().unwrap();
    }
}

/// A node manager in this process, and a node that is connected to it.
pub struct Remote {
    pub privileges: Arc<RemotePrivileges>,
    server: Serving,
}

/// A node manager in this process.
pub struct Serving {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Serving {
    pub async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(LIMIT, self.task).await.unwrap().unwrap();
    }
}

impl Remote {
    pub async fn start(installation: &Installation) -> Self {
        let server = Self::serve(installation);
        let privileges = Arc::new(RemotePrivileges::connect(installation.socket()).await.unwrap());
        Self { privileges, server }
    }

    pub fn serve(installation: &Installation) -> Serving {
        Self::serve_for(installation, 0)
    }

    pub fn serve_for(installation: &Installation, owner: u32) -> Serving {
        let mut config = ServerConfig::new(
            &installation.name,
            installation.directory.path(),
            UID..=UID + 20,
            (owner, owner),
        );
        config.programs = vec![SLEEP.into()];
        config.machines = MACHINES;
        let server = Server::bind(config, &installation.socket()).unwrap();
        let stop = CancellationToken::new();
        let task = tokio::spawn(server.serve(stop.clone()));
        Serving { stop, task }
    }

    pub async fn stop_server(self) {
        self.server.stop().await;
    }

    pub async fn stop(self) {
        drop(self.privileges);
        self.server.stop().await;
    }
}

pub async fn ended(mut exit: watch::Receiver<Option<ExitStatus>>) -> ExitStatus {
    let status = tokio::time::timeout(LIMIT, exit.wait_for(Option::is_some)).await;
    status.expect("it ends").unwrap().unwrap()
}

pub fn name(text: &str) -> ObjectName {
    ObjectName::new(text).unwrap()
}

pub fn limits() -> GroupLimits {
    GroupLimits {
        memory_bytes: 128 << 20,
        pids: 50,
        cpu_quota_micros: 150_000,
        cpu_weight: 200,
        io: None,
    }
}

pub fn opened(path: impl AsRef<Path>) -> OwnedFd {
    File::open(path.as_ref()).unwrap().into()
}

/// Who a process is.
pub fn identity(pid: u32) -> ProcessIdentity {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    ProcessIdentity {
        pid,
        start_ticks: rest.split_ascii_whitespace().nth(19).unwrap().parse().unwrap(),
    }
}
