//! The trait and its values.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt,
    os::fd::OwnedFd,
    path::PathBuf,
};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// The name of an owned object: 1 to 32 characters of `[a-z0-9-]`; equal to the sandbox id for a sandbox's objects.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectName(String);

impl TryFrom<String> for ObjectName {
    type Error = PrivilegeError;

    fn try_from(name: String) -> Result<Self, PrivilegeError> {
        Self::new(&name)
    }
}

impl From<ObjectName> for String {
    fn from(name: ObjectName) -> Self {
        name.0
    }
}

impl ObjectName {
    /// Checks the form.
    pub fn new(name: &str) -> Result<Self, PrivilegeError> {
        let valid = (1..=32).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if valid {
            Ok(Self(name.to_owned()))
        } else {
            Err(PrivilegeError::BadName {
                name: name.chars().take(64).collect(),
            })
        }
    }

    /// The bare name, without the installation's prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What can go wrong in a privileged act.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegeError {
    /// A name that is not of the allowed form.
    #[error("\"{name}\" is not a valid object name")]
    BadName {
        /// What was given, cut to 64 characters.
        name: String,
    },
    /// The process lacks a right it needs.
    #[error("{act} needs root")]
    NotPermitted {
        /// What was attempted.
        act: String,
    },
    /// An operating-system call failed.
    #[error("{act} failed")]
    System {
        /// What was attempted, with path or name.
        act: String,
        /// The error of the call.
        #[source]
        source: std::io::Error,
    },
    /// The act is possible, but is never done.
    #[error("refused: {what}")]
    Refused {
        /// What and why.
        what: String,
    },
    /// The node manager is not there, or was restarted during the call, which may or may not have been carried out.
    /// Asking again is right for every act that says it is idempotent.
    #[error("the node manager could not be reached while {act}")]
    Unreachable {
        /// What was asked.
        act: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The host has no cgroup hierarchy for a limit that was asked for.
    #[error("no cgroup hierarchy on this host has the {controller} controller")]
    NoController {
        /// Its name.
        controller: &'static str,
    },
}

/// A sandbox's network: its namespace and the tap inside, no address, no route, nothing that leads out.
#[derive(Debug)]
pub struct Network {
    /// The namespace, to run the VMM in and to create sockets in.
    pub namespace: OwnedFd,
    /// The open tap device (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`), up, to hand to the VMM.
    pub tap: OwnedFd,
}

/// Limits of one machine's cgroup, enforced by the host on the VMM process and all its threads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupLimits {
    /// Bytes of memory, page cache of private files included.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u64,
    /// CPU time per 100 ms period, in microseconds (200_000 = two CPUs).
    pub cpu_quota_micros: u64,
    /// Relative CPU weight, 1 to 10000; 100 is normal.
    pub cpu_weight: u64,
    /// Traffic with the disk that holds the installation's data, if it is to be limited.
    pub io: Option<IoLimits>,
}

/// Most traffic of one machine with one disk of the host; `None` is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoLimits {
    /// Bytes read in a second.
    pub read_bytes_per_second: Option<u64>,
    /// Bytes written in a second.
    pub write_bytes_per_second: Option<u64>,
    /// Read operations in a second.
    pub read_operations_per_second: Option<u64>,
    /// Write operations in a second.
    pub write_operations_per_second: Option<u64>,
}

/// Proof that a cgroup was made; its name is the object's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Name of the object.
    pub name: ObjectName,
}

/// What a cgroup has used so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupUsage {
    /// CPU time in microseconds.
    pub cpu_micros: u64,
    /// Memory now, bytes.
    pub memory_bytes: u64,
    /// Times the host's OOM killer struck inside the group.
    pub oom_kills: u64,
}

/// A file or directory that a VMM process sees in its own mount namespace.
#[derive(Debug)]
pub struct View {
    /// Where: absolute, without `.`, `..` or doubled slashes.
    pub path: PathBuf,
    /// What: opened with `O_PATH`.
    pub source: OwnedFd,
    /// Whether the mount may be written through. The ordinary permissions hold besides.
    pub writable: bool,
}

/// A VMM process to start.
#[derive(Debug)]
pub struct VmmProcess {
    /// Owning object; also chooses the cgroup (made before by [`Privileges::create_group`]).
    pub name: ObjectName,
    /// Absolute path of the program.
    pub program: PathBuf,
    /// Arguments after the program name. The process sees no other environment than `PATH` and `LANG=C`.
    pub arguments: Vec<OsString>,
    /// Ordinary user and group id to run as; 0 is refused.
    pub uid: u32,
    /// Network namespace to enter, if any.
    pub network_namespace: Option<OwnedFd>,
    /// Descriptors to pass: number inside the process (≥ 3) to descriptor. Nothing else is inherited.
    pub descriptors: BTreeMap<i32, OwnedFd>,
    /// Standard output and error go here (a file opened for appending), or nowhere.
    pub log: Option<OwnedFd>,
    /// Largest file the process may write, bytes (`RLIMIT_FSIZE`).
    pub file_size_limit: u64,
    /// What it sees of the file system, besides the programs of the host and three devices.
    pub views: Vec<View>,
}

/// Identifies a process for ever: a pid alone is never trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessIdentity {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot (`/proc/PID/stat` field 22).
    pub start_ticks: u64,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum ExitStatus {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// It is gone; how cannot be learnt, for it was not a child of the node manager that watched it.
    Unknown,
}

/// A started VMM.
#[derive(Debug)]
pub struct Spawned {
    /// Who it is.
    pub identity: ProcessIdentity,
    /// SHA-256 of the program it runs.
    pub executable: [u8; 32],
    /// `None` while it runs, then its end. The implementation reaps it.
    pub exit: watch::Receiver<Option<ExitStatus>>,
}

/// A VMM that was started earlier, and is watched again.
#[derive(Debug)]
pub struct Adopted {
    /// The process as [`Privileges::spawn`] would have told it, the digest of its program read anew.
    pub spawned: Spawned,
}

/// Descriptors of a running machine's memory, usable by an unprivileged process.
#[derive(Debug)]
pub struct MachineMemory {
    /// `/proc/PID/mem`, read and write.
    pub memory: OwnedFd,
    /// `/proc/PID/pagemap`, read.
    pub pagemap: OwnedFd,
    /// `/proc/PID/maps` as text at the time of the call.
    pub maps: String,
}

/// What [`Privileges::sweep`] removed, by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepReport {
    /// Processes killed.
    pub processes: usize,
    /// Network namespaces (each with its tap).
    pub networks: usize,
    /// Cgroups, counted once per name however many hierarchies hold it.
    pub groups: usize,
}

/// The privileged acts. Every removal is idempotent: removing what is not there succeeds.
#[async_trait]
pub trait Privileges: Send + Sync + fmt::Debug {
    /// Makes a namespace with one tap. Takes about 1 to 5 ms: make them ahead.
    async fn create_network(&self, name: &ObjectName) -> Result<Network, PrivilegeError>;

    /// Removes the namespace and what is in it.
    async fn delete_network(&self, name: &ObjectName) -> Result<(), PrivilegeError>;

    /// Makes the machine's cgroup in every hierarchy that has a controller it needs.
    async fn create_group(&self, name: &ObjectName, limits: &GroupLimits) -> Result<Group, PrivilegeError>;

    /// Reads what the group has used.
    async fn group_usage(&self, name: &ObjectName) -> Result<GroupUsage, PrivilegeError>;

    /// Kills every process in the group and waits until it is empty (at most 5 s).
    async fn kill_group(&self, name: &ObjectName) -> Result<(), PrivilegeError>;

    /// Kills what is left inside, then removes the group.
    async fn delete_group(&self, name: &ObjectName) -> Result<(), PrivilegeError>;

    /// Gives the group another CPU weight, 1 to 10000. Idempotent.
    async fn set_group_weight(&self, name: &ObjectName, cpu_weight: u64) -> Result<(), PrivilegeError>;

    /// Makes a regular file with one name belong to `uid`, with the node's group and mode 0660. Its owner must be the
    /// caller or one of the installation's users. Idempotent.
    async fn give_file(&self, file: OwnedFd, uid: u32) -> Result<(), PrivilegeError>;

    /// Starts the process in its group, namespace and identity, without new privileges and without capabilities. Refused
    /// while another process is in the group.
    async fn spawn(&self, process: VmmProcess) -> Result<Spawned, PrivilegeError>;

    /// Watches a process that was started earlier, perhaps by another node manager, if it is still the same one and
    /// is in a group of this installation. Idempotent.
    async fn adopt(&self, process: ProcessIdentity) -> Result<Adopted, PrivilegeError>;

    /// Opens `/dev/kvm`.
    async fn open_kvm(&self) -> Result<OwnedFd, PrivilegeError>;

    /// Kills one process if it is still the same one.
    async fn kill(&self, process: ProcessIdentity) -> Result<(), PrivilegeError>;

    /// Opens the machine's memory if it is still the same process.
    async fn open_memory(&self, process: ProcessIdentity) -> Result<MachineMemory, PrivilegeError>;

    /// Removes every object of this installation whose name is not in `keep`.
    async fn sweep(&self, keep: &BTreeSet<ObjectName>) -> Result<SweepReport, PrivilegeError>;
}
