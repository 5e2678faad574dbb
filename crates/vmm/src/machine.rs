//! The `Vmm` trait: what every driver gives, in terms that fit QEMU and Firecracker alike.
//!
//! ```text
//!            Vmm::start(Boot)                      Vmm::start(Restore)
//!                  │                                       │
//!                  ▼                                       ▼
//!              running ◄───────── resume ────────────── paused
//!                  └──────────────── pause ───────────────►│ save_device_state, memory_delta, freeze_disk
//!                  │                                       │
//!                  └────────── kill / guest / crash ───────┴──► exited (ExitReason, once)
//! ```
//!
//! A machine that is dropped without [`Machine::kill`] is killed by its guard, unless it was detached before: then it goes
//! on by itself, in whatever state it was, and [`Vmm::adopt`] takes it over by its [`MachineRecord`].

use std::{
    fmt,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use space_node_manager::{ObjectName, PrivilegeError, ProcessIdentity};
use tokio::sync::watch;

use crate::MachineRecord;

/// What a driver can do on this host, found by trying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// `qemu` or `firecracker`.
    pub driver: &'static str,
    /// Exact version of the monitor; a snapshot starts only under the same one.
    pub version: String,
    /// `kvm` or `tcg`. Under `tcg` the monitor promises no security boundary.
    pub accelerator: &'static str,
    /// CPU model presented to guests.
    pub cpu_model: String,
    /// Whether the guest is behind a boundary meant for hostile code.
    pub isolates_hostile_code: bool,
    /// Whether disks may be layered (qcow2); otherwise they are raw files.
    pub layered_disks: bool,
}

/// Everything that makes up a machine besides its state. Files must be readable (the top disk layer: writable) by `uid`; the
/// monitor sees no others, and the directories they lie in only where it must.
#[derive(Debug)]
pub struct MachineSpec {
    /// Owning object: names the cgroup (already made) and the process.
    pub name: ObjectName,
    /// Ordinary user to run the monitor as.
    pub uid: u32,
    /// Directory of the machine for sockets and logs, the caller's own (0700) and never seen by the monitor; at most 80
    /// bytes long.
    pub directory: PathBuf,
    /// vCPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Read-only root image, shared by all machines.
    pub root: PathBuf,
    /// Writable disk: top layer first, then what it rests on. The last one is raw, any others are qcow2. The monitor sees
    /// the top layer's directory, where later layers are made.
    pub disk: Vec<DiskLayer>,
    /// Network namespace and tap.
    pub network_namespace: OwnedFd,
    /// The open tap.
    pub tap: OwnedFd,
    /// Kernel image, needed at boot; also part of the machine's description under QEMU afterwards.
    pub kernel: PathBuf,
    /// Initramfs.
    pub initramfs: PathBuf,
    /// Kernel command line. Holds nothing that differs between sandboxes.
    pub kernel_arguments: String,
}

/// One layer of a machine's writable disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskLayer {
    /// The file.
    pub path: PathBuf,
}

/// Saved state of a machine that any number of machines start from. All files are read-only for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineTemplate {
    /// Guest memory, raw, exactly `memory_mib` MiB, sparse; shared by all through the page cache.
    pub memory: PathBuf,
    /// Device state, in the driver's own format.
    pub state: PathBuf,
}

/// How a machine comes to life.
#[derive(Debug)]
pub enum StartMode {
    /// Cold boot; returns with the vCPUs running. `memory` is created and shared, to become a template's memory file.
    Boot {
        /// Memory file to make.
        memory: PathBuf,
    },
    /// From saved state; returns **paused**, state loaded, ports connectable.
    Restore {
        /// Base memory and device state.
        template: MachineTemplate,
        /// Pages that differ from the base, laid over it before the state is loaded.
        delta: Option<MemoryDelta>,
    },
}

/// Contiguous pages that differ from the base file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRun {
    /// Guest-physical offset within the memory file, bytes, page-aligned.
    pub offset: u64,
    /// Their content, a multiple of 4096 bytes.
    pub bytes: bytes::Bytes,
}

/// The pages of a machine that differ from its base.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryDelta {
    /// Sorted, not overlapping.
    pub runs: Vec<MemoryRun>,
}

impl MemoryDelta {
    /// Total bytes of page content.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes.len() as u64).sum()
    }

    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// The layer that was written until [`Machine::freeze_disk`]; immutable from then on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrozenLayer {
    /// The file, to be kept as long as anything rests on it.
    pub layer: DiskLayer,
}

/// Why a machine's monitor is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitReason {
    /// [`Machine::kill`] or the guard.
    Killed,
    /// The guest powered off or rebooted.
    GuestShutdown,
    /// The guest panicked; the end of its console.
    GuestPanicked {
        /// At most 2 KiB.
        console: String,
    },
    /// The host's OOM killer.
    OutOfMemory,
    /// Anything else.
    MonitorFailed {
        /// Code or signal in words, with the end of the monitor's log (at most 2 KiB).
        detail: String,
    },
}

/// What can go wrong with a machine.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// No usable monitor on this host.
    #[error("{what}")]
    Unavailable {
        /// What is missing or too old and how to mend it.
        what: String,
    },
    /// The request cannot be met by this driver.
    #[error("{what}")]
    Unsupported {
        /// Why.
        what: String,
    },
    /// A privileged act failed.
    #[error("cannot {step}")]
    Privilege {
        /// Which step.
        step: &'static str,
        /// Why.
        #[source]
        source: PrivilegeError,
    },
    /// A file or socket operation failed.
    #[error("cannot {step} {path}")]
    Io {
        /// Which step.
        step: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The monitor refused a command.
    #[error("the monitor refused {command}: {answer}")]
    Refused {
        /// Its name.
        command: String,
        /// Its words, at most 1 KiB.
        answer: String,
    },
    /// The monitor did not answer in time.
    #[error("the monitor did not answer {command} within {seconds} s")]
    TimedOut {
        /// What was asked.
        command: String,
        /// The limit.
        seconds: u64,
    },
    /// The monitor ended meanwhile.
    #[error("the machine ended while {step}: {reason:?}")]
    Exited {
        /// During what.
        step: &'static str,
        /// Why.
        reason: ExitReason,
    },
    /// What a record tells of is not what is there. Nothing was done to it.
    #[error("the machine cannot be adopted: {what}")]
    Unadoptable {
        /// What does not match.
        what: String,
    },
}

/// What the vCPUs of a machine do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// They run.
    Running,
    /// They stand still and can be resumed.
    Paused,
}

/// A byte stream to one port of the guest's space daemon.
#[derive(Debug)]
pub enum PortStream {
    /// A Unix socket, as both drivers give today.
    Unix(tokio::net::UnixStream),
}

/// One running or paused machine. Methods may be called from any task; each is safe to drop at any await point.
#[async_trait]
pub trait Machine: Send + Sync + fmt::Debug {
    /// The monitor's process.
    fn process(&self) -> ProcessIdentity;

    /// What another process needs to adopt the machine, as of now: it changes with [`Machine::freeze_disk`].
    fn record(&self) -> MachineRecord;

    /// `None` until the monitor is gone, then why. Closes without a reason when the machine is detached.
    fn exit(&self) -> watch::Receiver<Option<ExitReason>>;

    /// What the vCPUs do now.
    async fn status(&self) -> Result<RunState, VmmError>;

    /// Stops the vCPUs. Idempotent.
    async fn pause(&self) -> Result<(), VmmError>;

    /// Lets the vCPUs run. Idempotent.
    async fn resume(&self) -> Result<(), VmmError>;

    /// Writes the device state, without memory, to a new file. The machine must be paused.
    async fn save_device_state(&self, to: &Path) -> Result<(), VmmError>;

    /// Turns a machine started by [`StartMode::Boot`] into a template: device state to `state`; the memory file is
    /// the one given at boot. The machine must be paused, and is of no further use: kill it.
    async fn save_template(&self, state: &Path) -> Result<(), VmmError>;

    /// Copies out the pages that differ from the base file. The machine must be paused.
    async fn memory_delta(&self) -> Result<MemoryDelta, VmmError>;

    /// Makes the top disk layer immutable and lets the machine write to `new_top` from now on. Constant in time.
    /// The machine must be paused.
    async fn freeze_disk(&self, new_top: &Path) -> Result<FrozenLayer, VmmError>;

    /// Opens the control port. Opening it again ends the earlier stream.
    async fn control_port(&self) -> Result<PortStream, VmmError>;

    /// Opens the data port. Opening it again ends the earlier stream.
    async fn data_port(&self) -> Result<PortStream, VmmError>;

    /// The last of the guest's console, at most 16 KiB, lossy.
    async fn console(&self) -> String;

    /// Ends the machine and waits until its process is gone. Idempotent.
    async fn kill(&self) -> Result<(), VmmError>;

    /// Lets go of the machine: all connections to it are closed, dropping the handle no longer kills it, and every
    /// later call fails. The machine itself notices nothing. A machine that is being killed is not let go.
    fn detach(&self);
}

/// A driver.
#[async_trait]
pub trait Vmm: Send + Sync + fmt::Debug {
    /// What it can do here.
    fn capabilities(&self) -> &Capabilities;

    /// Makes an empty writable layer for a new machine on top of `base` (a template's frozen disk).
    /// Constant in time, no subprocess.
    async fn create_disk_layer(&self, base: &Path, layer: &Path) -> Result<(), VmmError>;

    /// Starts a machine.
    async fn start(&self, spec: MachineSpec, mode: StartMode) -> Result<Box<dyn Machine>, VmmError>;

    /// Takes over a machine that was detached, or whose earlier owner is gone.
    ///
    /// [`VmmError::Exited`] if it has ended meanwhile, with the reason as far as it can still be learnt;
    /// [`VmmError::Unadoptable`] if the process runs another program than the record says, which is then left alone;
    /// any other error leaves the machine as it was.
    async fn adopt(&self, record: MachineRecord) -> Result<Box<dyn Machine>, VmmError>;
}
