//! [`LocalPrivileges`]: the privileged acts, performed in this process.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::RangeInclusive,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use fs_err as fs;
use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Signal, WaitId, WaitIdOptions},
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
    failed, files, jail, lock, network, process,
    spawn::{self, Walls},
};

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
/// Objects of one installation belong to one such value: a lock that only root can take keeps a second one away, which
/// would otherwise sweep the first one's machines. Dropping it ends nothing that it has made; only nobody learns any
/// more how a process ends.
#[derive(Debug)]
pub struct LocalPrivileges {
    options: LocalOptions,
    networks: Arc<network::Networks>,
    groups: Arc<Hierarchies>,
    digests: Arc<Digests>,
    empty: Arc<jail::Empty>,
    watchers: Mutex<Watchers>,
    /// Groups that a monitor is being started in.
    starting: Mutex<BTreeSet<ObjectName>>,
    /// Held for as long as this value lives.
    _lock: lock::Lock,
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
        let lock = lock::Lock::take(installation)?;
        let networks = network::Networks::new(format!("space-{installation}-"))?;
        Ok(Self {
            networks: networks.into(),
            empty: jail::Empty::new()?.into(),
            groups: Hierarchies::detect(format!("space-{installation}"), options.data_directory.as_deref())?
                .into(),
            options,
            digests: Arc::default(),
            watchers: Mutex::default(),
            starting: Mutex::default(),
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
        Ok((valid(self.groups.list()?), valid(self.networks.list()?)))
    }

    /// Memory, pagemap and map of a process of this installation.
    pub(crate) async fn open_memory_files(
        &self,
        process: ProcessIdentity,
    ) -> Result<[OwnedFd; 3], PrivilegeError> {
        let groups = self.groups.clone();
        blocking(move || match own(&groups, process)? {
            Some(_) => process::open_memory(process),
            None => Err(process::gone(format!(
                "opening the memory of process {}",
                process.pid
            ))),
        })
        .await
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

    /// Kills what is left in a group and removes it. Answers how many processes there were.
    async fn delete(&self, name: ObjectName) -> Result<usize, PrivilegeError> {
        let groups = self.groups.clone();
        blocking(move || groups.delete(&name)).await
    }
}

#[async_trait]
impl Privileges for LocalPrivileges {
    async fn create_network(&self, name: &ObjectName) -> Result<Network, PrivilegeError> {
        let (networks, name) = (self.networks.clone(), name.clone());
        blocking(move || networks.create(&name)).await
    }

    async fn delete_network(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        let (networks, name) = (self.networks.clone(), name.clone());
        blocking(move || networks.delete(&name)).await
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
        let (groups, name) = (self.groups.clone(), name.clone());
        blocking(move || groups.kill(&name).map(drop)).await
    }

    async fn delete_group(&self, name: &ObjectName) -> Result<(), PrivilegeError> {
        self.delete(name.clone()).await.map(drop)
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
        self.check_user(process.uid)?;
        let _starting = Starting::new(&self.starting, &process.name)?;
        let (digests, empty) = (self.digests.clone(), self.empty.clone());
        let (groups, networks) = (self.groups.clone(), self.networks.clone());
        let owner = self.options.owner;
        let (jailed, filter) = match self.options.confinement {
            Confinement::Full => (true, true),
            Confinement::DangerUnfiltered => (true, false),
            Confinement::DangerNone => (!process.views.is_empty(), !process.views.is_empty()),
        };
        let (started, executable) = blocking(move || {
            if let Some(namespace) = &process.network_namespace
                && !networks.holds(namespace)?
            {
                return Err(PrivilegeError::Refused {
                    what: format!("{} is not to run in a network of this installation", process.name),
                });
            }
            // A monitor that is being started shares this process's memory. If the group ran out of memory now, for what
            // another in it takes, the kernel would end them all, and this process with them.
            if groups.has_members(&process.name)? {
                return Err(PrivilegeError::Refused {
                    what: format!("a monitor runs in the group {} already", process.name),
                });
            }
            let membership = groups.membership_files(&process.name);
            // Before it runs: afterwards it may be gone already.
            let executable = digests.of_file(&process.program)?;
            let walls = Walls {
                jail: jailed.then_some(&*empty),
                filter,
                owner,
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
                // Nobody would know of it. A child that nobody has waited for keeps its number.
                if let Some(pid) = i32::try_from(started.identity.pid).ok().and_then(Pid::from_raw) {
                    rustix::process::kill_process(pid, Signal::KILL).ok();
                }
                Err(error)
            }
        }
    }

    async fn adopt(&self, process: ProcessIdentity) -> Result<Adopted, PrivilegeError> {
        let (groups, digests) = (self.groups.clone(), self.digests.clone());
        let (pidfd, executable) = blocking(move || {
            let gone = || process::gone(format!("adopting process {}", process.pid));
            let pidfd = own(&groups, process)?.ok_or_else(gone)?;
            let executable = digests.of_process(process.pid)?;
            // Still the same one, so all that was learnt is about it.
            if process::is_same(process)? {
                Ok((pidfd, executable))
            } else {
                Err(gone())
            }
        })
        .await?;
        Ok(Adopted {
            spawned: Spawned {
                identity: process,
                executable,
                exit: self.watch(process, pidfd)?,
            },
        })
    }

    async fn open_kvm(&self) -> Result<OwnedFd, PrivilegeError> {
        rustix::fs::open("/dev/kvm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| failed("opening /dev/kvm", e))
    }

    async fn kill(&self, process: ProcessIdentity) -> Result<(), PrivilegeError> {
        let groups = self.groups.clone();
        blocking(move || match own(&groups, process)? {
            Some(held) => process::kill(process, held),
            None => Ok(()),
        })
        .await
    }

    async fn open_memory(&self, process: ProcessIdentity) -> Result<MachineMemory, PrivilegeError> {
        let [memory, pagemap, maps] = self.open_memory_files(process).await?;
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
            report.processes += self.delete(name.clone()).await?;
            report.groups += 1;
        }
        for name in networks.difference(keep) {
            self.delete_network(name).await?;
            report.networks += 1;
        }
        let groups = self.groups.clone();
        blocking(move || {
            groups.remove_parents();
            Ok(report)
        })
        .await
    }
}

/// A pidfd of a process of this installation that lives; `None` if it is gone, and an error if it is somebody else's.
fn own(groups: &Hierarchies, process: ProcessIdentity) -> Result<Option<OwnedFd>, PrivilegeError> {
    let look =
        || process::stat(process.pid).map_err(|e| failed(format!("looking at process {}", process.pid), e));
    let Some(held) = process::open(process)? else {
        return Ok(None);
    };
    let is_ours = groups.holds(process.pid)?;
    match look()? {
        // Who is gone in between is not told to be a stranger; nor is who is going, and has left its groups.
        Some(stat) if stat.start_ticks == process.start_ticks && is_ours => Ok(Some(held)),
        Some(stat) if stat.start_ticks == process.start_ticks && !stat.exiting => {
            Err(PrivilegeError::Refused {
                what: format!("process {} is in no group of this installation", process.pid),
            })
        }
        _ => Ok(None),
    }
}

/// A group that a monitor is being started in: one at a time.
struct Starting<'a> {
    all: &'a Mutex<BTreeSet<ObjectName>>,
    name: ObjectName,
}

impl<'a> Starting<'a> {
    fn new(all: &'a Mutex<BTreeSet<ObjectName>>, name: &ObjectName) -> Result<Self, PrivilegeError> {
        let mut names = all.lock().unwrap_or_else(PoisonError::into_inner);
        if !names.insert(name.clone()) {
            return Err(PrivilegeError::Refused {
                what: format!("a monitor is being started in the group {name} already"),
            });
        }
        let name = name.clone();
        Ok(Self { all, name })
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let mut names = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        names.remove(&self.name);
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

/// Runs an act that blocks for up to a few milliseconds off the runtime's workers.
async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, PrivilegeError> + Send + 'static,
) -> Result<T, PrivilegeError> {
    match spawn_blocking(act).await {
        Ok(done) => done,
        Err(error) => Err(failed("running a privileged act", io::Error::other(error))),
    }
}
