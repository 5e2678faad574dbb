//! [`LocalPrivileges`]: the privileged acts, performed in this process.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::RangeInclusive,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use fs_err as fs;
use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    process::{WaitId, WaitIdOptions},
};
use tokio::{
    io::unix::AsyncFd,
    sync::watch,
    task::{JoinSet, spawn_blocking},
};

use crate::{
    Adopted, ExitStatus, Group, GroupLimits, GroupUsage, MachineMemory, Network, ObjectName, PrivilegeError,
    Privileges, ProcessIdentity, Spawned, SweepReport, VmmProcess,
    cgroup::Hierarchies,
    executable::Digests,
    failed, files, jail, network, process,
    spawn::{self, Walls},
};

/// How long a lock may be held by what is left of a node that was killed.
const LOCK_PATIENCE: std::time::Duration = std::time::Duration::from_secs(1);

/// How much a process is shut in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Confinement {
    /// Namespaces of its own and the filter of system calls.
    #[default]
    Full,
    /// Namespaces only: for tests that tell apart what stops a process.
    DangerUnfiltered,
    /// A process without views runs in the host's namespaces, unfiltered; any other as with `Full`. For tests.
    DangerNone,
}

/// What can be chosen about [`LocalPrivileges`].
#[derive(Debug, Clone)]
pub struct LocalOptions {
    /// User ids that files may be given to and processes run as.
    pub users: RangeInclusive<u32>,
    /// User id of the node, which owns what is not a monitor's.
    pub owner: u32,
    /// Group id of the node, which can read what is a monitor's.
    pub group: u32,
    /// How much a monitor is shut in.
    pub confinement: Confinement,
    /// A path on the disk whose traffic is limited by [`crate::IoLimits`].
    pub data_directory: Option<PathBuf>,
}

impl Default for LocalOptions {
    /// The caller is the node; any ordinary user may be a monitor's.
    fn default() -> Self {
        Self {
            users: 1..=u32::MAX - 1,
            owner: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            confinement: Confinement::Full,
            data_directory: None,
        }
    }
}

/// Performs the acts itself; the process must be root and the calls be made on a tokio runtime with I/O enabled.
///
/// Objects of one installation belong to one such value: a lock in its run directory keeps a second one away, which
/// would otherwise sweep the first one's machines. Dropping it ends nothing that it has made; only nobody learns any
/// more how a process ends.
#[derive(Debug)]
pub struct LocalPrivileges {
    /// `space-<installation>-`.
    prefix: String,
    options: LocalOptions,
    groups: Arc<Hierarchies>,
    digests: Arc<Digests>,
    empty: Arc<jail::Empty>,
    watchers: Mutex<Watchers>,
    /// Held for as long as this value lives.
    _lock: OwnedFd,
}

/// Who waits for the ends of processes.
#[derive(Debug, Default)]
struct Watchers {
    /// One task per living process, which reaps it: two would take the status from each other.
    tasks: JoinSet<()>,
    living: BTreeMap<ProcessIdentity, watch::Receiver<Option<ExitStatus>>>,
}

impl Drop for LocalPrivileges {
    /// The directories that hold the installation's groups go with the last group. While they are removed the lock is
    /// still held, so nobody makes a group in them.
    fn drop(&mut self) {
        self.groups.remove_parents();
    }
}

impl LocalPrivileges {
    /// [`Self::with`] the default options.
    ///
    /// # Errors
    /// As [`Self::with`].
    pub fn new(installation: &str, run_directory: impl Into<PathBuf>) -> Result<Self, PrivilegeError> {
        Self::with(installation, run_directory, LocalOptions::default())
    }

    /// Looks at the host and takes the installation's lock.
    ///
    /// `installation` is 1 to 16 characters of `[a-z0-9]` and names everything that is made. `run_directory` is
    /// created if need be.
    ///
    /// # Errors
    /// [`PrivilegeError::NotPermitted`] without root, [`PrivilegeError::BadName`],
    /// [`PrivilegeError::Refused`] if another one for this installation lives.
    pub fn with(
        installation: &str,
        run_directory: impl Into<PathBuf>,
        options: LocalOptions,
    ) -> Result<Self, PrivilegeError> {
        // Without a dash no installation's prefix can begin another's.
        let valid = (1..=16).contains(&installation.len())
            && installation
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !valid {
            return Err(PrivilegeError::BadName {
                name: installation.chars().take(64).collect(),
            });
        }
        if !rustix::process::geteuid().is_root() {
            return Err(PrivilegeError::NotPermitted {
                act: "managing machines".to_owned(),
            });
        }
        let run_directory = run_directory.into();
        fs::create_dir_all(&run_directory)
            .map_err(|e| failed(format!("making {}", run_directory.display()), e))?;
        let lock = lock(&run_directory.join(format!("node-manager-{installation}.lock")))?;
        network::prepare()?;
        Ok(Self {
            prefix: format!("space-{installation}-"),
            empty: jail::Empty::new()?.into(),
            groups: Hierarchies::detect(format!("space-{installation}"), options.data_directory.as_deref())?
                .into(),
            options,
            digests: Arc::default(),
            watchers: Mutex::default(),
            _lock: lock,
        })
    }

    /// Names of the groups and networks that there are.
    pub(crate) fn names(&self) -> Result<(BTreeSet<ObjectName>, BTreeSet<ObjectName>), PrivilegeError> {
        // A name of another form was not made here.
        let valid = |names: Vec<String>| {
            names
                .into_iter()
                .filter_map(|n| ObjectName::new(&n).ok())
                .collect()
        };
        Ok((valid(self.groups.list()?), valid(network::list(&self.prefix)?)))
    }

    /// Memory, pagemap and map of a process of this installation.
    pub(crate) fn open_memory_files(&self, process: ProcessIdentity) -> Result<[OwnedFd; 3], PrivilegeError> {
        self.require_own(process)?;
        process::open_memory(process)
    }

    /// Refuses a process that lives and is in no group of this installation.
    fn require_own(&self, process: ProcessIdentity) -> Result<(), PrivilegeError> {
        let lives = || process::start_ticks(process.pid) == Some(process.start_ticks);
        // In this order: who is gone in between is not told to be a stranger.
        if lives() && !self.groups.holds(process.pid).unwrap_or(false) && lives() {
            return Err(PrivilegeError::Refused {
                what: format!("process {} is in no group of this installation", process.pid),
            });
        }
        Ok(())
    }

    fn check_user(&self, uid: u32) -> Result<(), PrivilegeError> {
        spawn::check_uid(uid)?;
        if self.options.users.contains(&uid) {
            return Ok(());
        }
        let (first, last) = (self.options.users.start(), self.options.users.end());
        Err(PrivilegeError::Refused {
            what: format!("user {uid} is none of the installation's, which are {first} to {last}"),
        })
    }

    /// Has a task wait for the end of a process, unless one does already.
    fn watch(
        &self,
        process: ProcessIdentity,
        pidfd: OwnedFd,
    ) -> Result<watch::Receiver<Option<ExitStatus>>, PrivilegeError> {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        while watchers.tasks.try_join_next().is_some() {}
        watchers.living.retain(|_, exit| exit.borrow().is_none());
        if let Some(exit) = watchers.living.get(&process) {
            return Ok(exit.clone());
        }
        // SAFETY: an `OwnedFd` is the same open descriptor for as long as it lives. The safe constructor is deprecated.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, tokio::io::Interest::READABLE) }
            .map_err(|e| failed("watching a process", e))?;
        let (tell, exit) = watch::channel(None);
        watchers.living.insert(process, exit.clone());
        watchers.tasks.spawn(async move {
            let status = reap(&pidfd).await;
            tell.send_replace(Some(status));
        });
        Ok(exit)
    }

    fn namespace(&self, name: &ObjectName) -> String {
        format!("{}{name}", self.prefix)
    }
}

#[async_trait]
impl Privileges for LocalPrivileges {
    async fn create_network(&self, name: &ObjectName) -> Result<Network, PrivilegeError> {
        let name = self.namespace(name);
        blocking(move || network::create(&name)).await
    }

    async fn delete_network(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        let name = self.namespace(name);
        blocking(move || network::delete(&name)).await
    }

    async fn create_group(&self, name: &ObjectName, limits: &GroupLimits) -> Result<Group, PrivilegeError> {
        let (groups, of, limits) = (self.groups.clone(), name.clone(), limits.clone());
        blocking(move || groups.create(&of, &limits)).await?;
        Ok(Group { name: name.clone() })
    }

    async fn group_usage(&self, name: &ObjectName) -> Result<GroupUsage, PrivilegeError> {
        self.groups.usage(name)
    }

    async fn kill_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.groups.kill(name).await.map(drop)
    }

    async fn delete_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.groups.delete(name).await.map(drop)
    }

    async fn set_group_weight(&self, name: &ObjectName, cpu_weight: u64) -> Result<(), PrivilegeError> {
        self.groups.set_weight(name, cpu_weight)
    }

    async fn give_file(&self, file: OwnedFd, uid: u32) -> Result<(), PrivilegeError> {
        self.check_user(uid)?;
        let LocalOptions {
            users, owner, group, ..
        } = &self.options;
        files::give_file(&file, uid, *group, |of| of == *owner || users.contains(&of))
    }

    async fn spawn(&self, process: VmmProcess) -> Result<Spawned, PrivilegeError> {
        let membership = self.groups.membership_files(&process.name);
        if let Some(namespace) = &process.network_namespace
            && !network::holds(&self.prefix, namespace)?
        {
            return Err(PrivilegeError::Refused {
                what: format!("{} is not to run in a network of this installation", process.name),
            });
        }
        self.check_user(process.uid)?;
        let (digests, empty) = (self.digests.clone(), self.empty.clone());
        let (jailed, filter) = match self.options.confinement {
            Confinement::Full => (true, true),
            Confinement::DangerUnfiltered => (true, false),
            Confinement::DangerNone => (!process.views.is_empty(), !process.views.is_empty()),
        };
        let (started, executable) = blocking(move || {
            // Before it runs: afterwards it may be gone already.
            let executable = digests.of_file(&process.program)?;
            let walls = Walls {
                jail: jailed.then_some(&*empty),
                filter,
            };
            Ok((spawn::spawn(process, &membership, &walls)?, executable))
        })
        .await?;
        match self.watch(started.identity, started.pidfd) {
            Ok(exit) => Ok(Spawned {
                identity: started.identity,
                executable,
                exit,
            }),
            Err(error) => {
                process::kill(started.identity)?;
                Err(error)
            }
        }
    }

    async fn adopt(&self, process: ProcessIdentity) -> Result<Adopted, PrivilegeError> {
        let act = || format!("adopting process {}", process.pid);
        let pidfd = process::open(process)?.ok_or_else(|| process::gone(act()))?;
        self.require_own(process)?;
        let digests = self.digests.clone();
        let executable = blocking(move || digests.of_process(process.pid)).await?;
        // Still the same one, so all that was learnt is about it.
        if process::start_ticks(process.pid) != Some(process.start_ticks) {
            return Err(process::gone(act()));
        }
        Ok(Adopted {
            spawned: Spawned {
                identity: process,
                executable,
                exit: self.watch(process, pidfd)?,
            },
            executable,
        })
    }

    async fn open_kvm(&self) -> Result<OwnedFd, PrivilegeError> {
        rustix::fs::open("/dev/kvm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| failed("opening /dev/kvm", e))
    }

    async fn kill(&self, process: ProcessIdentity) -> Result<(), PrivilegeError> {
        self.require_own(process)?;
        process::kill(process)
    }

    async fn open_memory(&self, process: ProcessIdentity) -> Result<MachineMemory, PrivilegeError> {
        let [memory, pagemap, maps] = self.open_memory_files(process)?;
        let maps = process::read_maps(maps)
            .map_err(|e| failed(format!("reading the map of process {}", process.pid), e))?;
        Ok(MachineMemory {
            memory,
            pagemap,
            maps,
        })
    }

    async fn sweep(&self, keep: &BTreeSet<ObjectName>) -> Result<SweepReport, PrivilegeError> {
        let (groups, networks) = self.names()?;
        let mut report = SweepReport::default();
        for name in groups.difference(keep) {
            report.processes += self.groups.delete(name).await?;
            report.groups += 1;
        }
        for name in networks.difference(keep) {
            self.delete_network(name).await?;
            report.networks += 1;
        }
        self.groups.remove_parents();
        Ok(report)
    }
}

/// Waits for the end of a process and reaps it if it is a child.
async fn reap(pidfd: &AsyncFd<OwnedFd>) -> ExitStatus {
    loop {
        // A pidfd becomes readable when its process ends, and stays so. On an error of the reactor `waitid` decides.
        let ready = pidfd.readable().await;
        let wait = WaitId::PidFd(pidfd.get_ref().as_fd());
        match rustix::process::waitid(wait, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => {
                return match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => ExitStatus::Code(code),
                    (None, signal) => ExitStatus::Signal(signal.unwrap_or(0)),
                };
            }
            Ok(None) => {
                if let Ok(mut ready) = ready {
                    ready.clear_ready();
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            // Not a child of this process, or reaped by another watcher of it. It is gone once the descriptor says so.
            Err(rustix::io::Errno::CHILD) => match ready {
                Ok(mut ready) if !has_ended(pidfd.get_ref()) => ready.clear_ready(),
                _ => return ExitStatus::Unknown,
            },
            Err(error) => {
                tracing::error!(%error, "the end of a monitor could not be learnt");
                return ExitStatus::Unknown;
            }
        }
    }
}

/// Whether the process of a pidfd is gone.
fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut poll = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
    let none = rustix::time::Timespec::default();
    matches!(rustix::event::poll(&mut poll, Some(&none)), Ok(1))
}

fn lock(path: &Path) -> Result<OwnedFd, PrivilegeError> {
    let act = || format!("locking {}", path.display());
    let file = rustix::fs::open(
        path,
        OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::RUSR | Mode::WUSR,
    )
    .map_err(|e| failed(act(), e))?;
    // A child of a killed node holds a copy of its lock between `clone` and `execve`. Waiting for that also makes sure
    // that it is in its group by the time of the first sweep.
    let give_up = std::time::Instant::now() + LOCK_PATIENCE;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if std::time::Instant::now() < give_up => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(PrivilegeError::Refused {
                    what: format!(
                        "another node of this installation is running: it holds {}",
                        path.display()
                    ),
                });
            }
            Err(e) => return Err(failed(act(), e)),
        }
    }
}

/// Runs an act that blocks for up to a few milliseconds off the runtime's workers.
async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, PrivilegeError> + Send + 'static,
) -> Result<T, PrivilegeError> {
    match spawn_blocking(act).await {
        Ok(done) => done,
        Err(error) => Err(failed("running a privileged act", io::Error::other(error))),
    }
}
