//! What a node is configured with: directories, bounds and time limits.

use std::{ops::Range, path::PathBuf, time::Duration};

use space_node_manager::IoLimits;

use crate::{fault::FaultPoints, pool::PoolConfig};

/// Configuration of a [`crate::NodeManager`].
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Journal and disks. Locked: one manager at a time.
    pub data_directory: PathBuf,
    /// Sockets and logs of the machines; at most [`NodeConfig::MAX_RUN_DIRECTORY`] bytes long, since a socket's path
    /// is bounded by the kernel. Locked as well.
    pub run_directory: PathBuf,
    /// Most sandboxes at once.
    pub capacity: usize,
    /// Most sandboxes on their way to being usable at once; more are refused.
    pub max_creating: usize,
    /// Most machines being started at the same time; the others wait in order of arrival.
    pub concurrent_starts: usize,
    /// Most memory that sandboxes may be counted with, bytes. `None`: four fifths of what is available at the start.
    pub memory_budget: Option<u64>,
    /// Share of a guest's memory that is counted for it, percent; the rest is shared with the template or unused.
    pub memory_commit_percent: u64,
    /// No new sandbox when less than this is available on the host, bytes.
    pub memory_reserve: u64,
    /// No new sandbox when less than this is free on the file system of the data directory, bytes.
    pub disk_reserve: u64,
    /// Most traffic of one machine with the disk of the data directory; `None` is unlimited.
    pub disk_traffic: Option<IoLimits>,
    /// Ordinary user ids, one for each live machine. Nobody else may use them.
    pub uids: Range<u32>,
    /// Networks kept ready.
    pub networks_ahead: usize,
    /// Machines kept ready.
    pub pool: PoolConfig,
    /// Time limits.
    pub limits: Limits,
    /// For tests.
    pub faults: FaultPoints,
}

/// How long anything may take, and how often the periodic things happen.
#[derive(Debug, Clone)]
pub struct Limits {
    /// From the start of the machine's own steps to usable.
    pub create: Duration,
    /// Making a template's machine for a size that has none yet.
    pub template: Duration,
    /// Taking a sandbox apart; what is left then is retried in the background.
    pub stop: Duration,
    /// One question to the daemon (hello, identity, opening the data channel).
    pub ask: Duration,
    /// Between health questions.
    pub health_interval: Duration,
    /// For one health question.
    pub health_answer: Duration,
    /// Unanswered health questions in a row after which the guest counts as failed.
    pub health_misses: u32,
    /// Between background samples of use.
    pub usage_interval: Duration,
    /// Stopping the vCPUs of a machine; then it is let run on.
    pub pause: Duration,
    /// Letting them run again, and setting the clock; then the sandbox is ended.
    pub resume: Duration,
    /// Taking over one live machine of an earlier process; then it is ended.
    pub adopt: Duration,
    /// Ending all sandboxes at shutdown.
    pub shutdown: Duration,
}

impl NodeConfig {
    /// Longest run directory, bytes: what is below must fit into a socket address.
    pub const MAX_RUN_DIRECTORY: usize = 46;

    /// Sensible values for everything but the directories.
    pub fn new(data_directory: PathBuf, run_directory: PathBuf) -> Self {
        let cpus = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            data_directory,
            run_directory,
            capacity: 64,
            max_creating: 64,
            concurrent_starts: cpus * 2,
            memory_budget: None,
            memory_commit_percent: 50,
            memory_reserve: 512 << 20,
            disk_reserve: 1 << 30,
            disk_traffic: None,
            uids: 200_000..204_096,
            networks_ahead: 8,
            pool: PoolConfig::default(),
            limits: Limits::default(),
            faults: FaultPoints::default(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            create: Duration::from_secs(30),
            template: Duration::from_secs(300),
            stop: Duration::from_secs(10),
            ask: Duration::from_secs(10),
            health_interval: Duration::from_secs(10),
            health_answer: Duration::from_secs(15),
            health_misses: 4,
            usage_interval: Duration::from_secs(30),
            pause: Duration::from_secs(5),
            resume: Duration::from_secs(5),
            adopt: Duration::from_secs(30),
            shutdown: Duration::from_secs(30),
        }
    }
}

/// Memory a machine may use beside its guest's own: the monitor with its translated code. Bytes.
pub(crate) const MONITOR_MEMORY: u64 = 192 << 20;
/// Threads and processes of one machine's group beside its vCPUs.
pub(crate) const MONITOR_PIDS: u64 = 64;
/// What a machine is counted with beside the share of its guest's memory, bytes.
pub(crate) const MONITOR_COMMIT: u64 = 48 << 20;
