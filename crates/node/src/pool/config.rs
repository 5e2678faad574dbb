//! What a pool is configured with.

use std::{path::PathBuf, time::Duration};

/// Configuration of the machines that are kept ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Most machines kept ready, over all templates and sizes. 0: none, each create starts a machine of its own.
    pub max_machines: usize,
    /// Most memory that they may take together, bytes, as the host counts it.
    pub max_memory_bytes: u64,
    /// Kept ready of each template and size that was asked for within `idle_drain_after`.
    pub min_per_key: usize,
    /// Templates of which machines of the default size are kept ready from the start and always.
    pub pinned: Vec<String>,
    /// Machines made ahead at the same time.
    pub concurrent_refills: usize,
    /// What has not been asked for this long is no longer kept ready.
    pub idle_drain_after: Duration,
    /// A machine that has waited this long is replaced.
    pub renew_after: Duration,
    /// For making and warming one.
    pub refill_limit: Duration,
    /// How often the host's memory, the templates' names and the machines' ages are looked at.
    pub look_every: Duration,
    /// Share of time that tasks wait for memory, percent, above which none is made ahead; above twice of it they are given
    /// up, half of them at each look.
    pub pressure_percent: u32,
    /// Where the kernel's accounts of memory are read.
    pub proc_directory: PathBuf,
}

impl PoolConfig {
    /// Machines at once at most, also those being made or removed.
    pub(crate) fn most_machines(&self) -> usize {
        match self.max_machines {
            0 => 0,
            ready => ready + self.concurrent_refills + super::REMOVALS,
        }
    }
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            max_machines: 8,
            max_memory_bytes: 2 << 30,
            min_per_key: 2,
            pinned: vec!["base".to_owned()],
            concurrent_refills: 1,
            idle_drain_after: Duration::from_secs(15 * 60),
            renew_after: Duration::from_secs(30 * 60),
            refill_limit: Duration::from_secs(120),
            look_every: Duration::from_secs(3),
            pressure_percent: 10,
            proc_directory: PathBuf::from("/proc"),
        }
    }
}
