//! Whether the host has room for another machine: memory, disk, process ids.

use std::{io, path::Path};

use fs_err as fs;

use crate::config::NodeConfig;

/// Process ids kept for everything else on the host.
const PID_RESERVE: u64 = 512;

/// Memory available on the host without swapping, bytes.
pub(crate) fn memory_available() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    field(&text, "MemAvailable:")
        .map(|kib| kib * 1024)
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// Bytes free for ordinary use on the file system of `path`.
fn disk_free(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Process ids that are neither in use nor beyond the kernel's bound.
fn pids_free() -> io::Result<u64> {
    let invalid = || io::Error::other("/proc/loadavg or pid_max has an unknown form");
    let load = fs::read_to_string("/proc/loadavg")?;
    let used = load
        .split_whitespace()
        .nth(3)
        .and_then(|tasks| tasks.split_once('/'))
        .and_then(|(_, all)| all.parse::<u64>().ok())
        .ok_or_else(invalid)?;
    let most: u64 = fs::read_to_string("/proc/sys/kernel/pid_max")?
        .trim()
        .parse()
        .map_err(|_| invalid())?;
    Ok(most.saturating_sub(used))
}

/// Says in words what has run out, if anything has. A figure that cannot be read counts as run out.
pub(crate) fn lacking(config: &NodeConfig) -> Option<String> {
    let mib = |bytes: u64| bytes >> 20;
    match memory_available() {
        Ok(free) if free < config.memory_reserve => {
            return Some(format!(
                "memory: {} MiB available on the host, {} MiB are kept in reserve",
                mib(free),
                mib(config.memory_reserve)
            ));
        }
        Ok(_) => {}
        Err(error) => return Some(format!("memory: cannot tell what is available: {error}")),
    }
    match disk_free(&config.data_directory) {
        Ok(free) if free < config.disk_reserve => {
            return Some(format!(
                "disk: {} MiB free, {} MiB are kept in reserve: free some space under the data directory",
                mib(free),
                mib(config.disk_reserve)
            ));
        }
        Ok(_) => {}
        Err(error) => return Some(format!("disk: cannot tell what is free: {error}")),
    }
    match pids_free() {
        Ok(free) if free < PID_RESERVE => Some(format!("process ids: {free} free")),
        Ok(_) => None,
        Err(error) => Some(format!("process ids: cannot tell how many are free: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserves_are_kept_and_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = NodeConfig::new(directory.path().to_owned(), directory.path().to_owned());
        config.memory_reserve = 0;
        config.disk_reserve = 0;
        assert_eq!(lacking(&config), None);
        config.disk_reserve = u64::MAX;
        assert!(lacking(&config).is_some_and(|what| what.starts_with("disk:")));
        config.memory_reserve = u64::MAX;
        assert!(lacking(&config).is_some_and(|what| what.starts_with("memory:")));
    }
}
