//! What the tests of real acts share. They need root and skip loudly without it.

#![expect(unreachable_pub, reason = "included by several test programs")]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use fs_err as fs;
use space_node_manager::{
    ExitStatus, GroupLimits, LocalOptions, LocalPrivileges, ObjectName, Privileges, VmmProcess,
};
use tempfile::TempDir;
use tokio::sync::watch;

/// The first user of a test's monitors.
pub const UID: u32 = 40_330;

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
