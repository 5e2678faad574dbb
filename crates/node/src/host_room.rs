//! Whether the host has room for another machine: memory, disk, process ids, open files.
//!
//! Asked on the way of every create, and answered from what was found a quarter of a second ago: what a burst of creates
//! takes meanwhile is bounded by the registry.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use fs_err as fs;
use tokio::time::Instant;

use crate::{config::NodeConfig, locked};

/// Process ids kept for everything else on the host.
const PID_RESERVE: u64 = 512;
/// Open files kept for everything else on the host.
const FILE_RESERVE: u64 = 4096;
/// Open files of this process kept for what is under way: a machine takes some ten, a request two.
const OWN_FILE_RESERVE: u64 = 128;
/// How long an answer holds.
const FRESH: Duration = Duration::from_millis(250);

/// The last answer.
#[derive(Debug, Default)]
pub(crate) struct HostRoom(Mutex<Option<(Instant, Option<String>)>>);

impl HostRoom {
    /// Says in words what has run out, if anything has. `spare` bytes of memory would be free again if they were needed.
    pub(crate) fn lacking(&self, config: &NodeConfig, spare: u64) -> Option<String> {
        let mut last = locked(&self.0);
        if let Some((at, answer)) = &*last
            && at.elapsed() < FRESH
        {
            return answer.clone();
        }
        let answer = lacking(config, spare);
        *last = Some((Instant::now(), answer.clone()));
        answer
    }
}

/// Memory available on the host without swapping, bytes.
pub(crate) fn memory_available() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    field(&text, "MemAvailable:")
        .map(|kib| kib * 1024)
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}

pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
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

fn number(path: impl AsRef<Path>) -> io::Result<u64> {
    let path = path.as_ref();
    fs::read_to_string(path)?
        .trim()
        .parse()
        .map_err(|_| io::Error::other(format!("{} holds no number", path.display())))
}

/// Process ids that are neither in use nor beyond what the kernel or a group of this process allows.
fn pids_free() -> io::Result<u64> {
    let load = fs::read_to_string("/proc/loadavg")?;
    let used = load
        .split_whitespace()
        .nth(3)
        .and_then(|tasks| tasks.split_once('/'))
        .and_then(|(_, all)| all.parse::<u64>().ok())
        .ok_or_else(|| io::Error::other("/proc/loadavg has an unknown form"))?;
    let most = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let in_groups = groups.lines().filter_map(group).flat_map(|group| {
        // The bound of each group above holds as well.
        let above: Vec<_> = group.ancestors().map(Path::to_owned).collect();
        above.into_iter().filter_map(|group| free_in(&group))
    });
    Ok(in_groups.fold(most.saturating_sub(used), u64::min))
}

/// The directory of a group that may bound process ids, from a line of `/proc/self/cgroup`.
fn group(line: &str) -> Option<PathBuf> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let mounts: &[&str] = match controllers {
        "" => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
        list if list.split(',').any(|controller| controller == "pids") => &["/sys/fs/cgroup/pids"],
        _ => return None,
    };
    let relative = path.strip_prefix('/')?;
    mounts
        .iter()
        .map(|mount| Path::new(mount).join(relative))
        .find(|group| group.join("pids.max").exists())
}

fn free_in(group: &Path) -> Option<u64> {
    // `max` is no number: no bound.
    let most = number(group.join("pids.max")).ok()?;
    Some(most.saturating_sub(number(group.join("pids.current")).ok()?))
}

/// Files that the host can still open.
fn files_free() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/sys/fs/file-nr")?;
    let mut numbers = text.split_whitespace().map(str::parse::<u64>);
    match (numbers.next(), numbers.nth(1)) {
        (Some(Ok(used)), Some(Ok(most))) => Ok(most.saturating_sub(used)),
        _ => Err(io::Error::other("/proc/sys/fs/file-nr has an unknown form")),
    }
}

/// Files that this process can still open.
fn own_files_free() -> io::Result<u64> {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let used = fs::read_dir("/proc/self/fd")?.count() as u64;
    Ok(most.unwrap_or(u64::MAX).saturating_sub(used))
}

/// What, how much is left, how much is kept in reserve, how to say an amount, and what to do about it.
type Mark<'a> = (&'a str, io::Result<u64>, u64, &'a dyn Fn(u64) -> String, &'a str);

/// A figure that cannot be read counts as run out.
fn lacking(config: &NodeConfig, spare: u64) -> Option<String> {
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let count = |count: u64| count.to_string();
    let memory = memory_available().map(|free| free.saturating_add(spare));
    let marks: [Mark<'_>; 5] = [
        (
            "memory",
            memory,
            config.memory_reserve,
            &mib,
            "end some sandboxes",
        ),
        (
            "disk",
            disk_free(&config.data_directory),
            config.disk_reserve,
            &mib,
            "free some space under the data directory",
        ),
        (
            "process ids",
            pids_free(),
            PID_RESERVE,
            &count,
            "end some processes",
        ),
        (
            "open files",
            files_free(),
            FILE_RESERVE,
            &count,
            "raise fs.file-max",
        ),
        (
            "open files of the node",
            own_files_free(),
            OWN_FILE_RESERVE,
            &count,
            "raise its limit (LimitNOFILE)",
        ),
    ];
    marks
        .into_iter()
        .find_map(|(name, free, reserve, words, remedy)| match free {
            Ok(free) if free >= reserve => None,
            Ok(free) => Some(format!(
                "{name}: {} left on the host, {} are kept in reserve: {remedy}",
                words(free),
                words(reserve)
            )),
            Err(error) => Some(format!("{name}: cannot tell what is left: {error}")),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(directory: &Path) -> NodeConfig {
        let mut config = NodeConfig::new(directory.to_owned(), directory.to_owned());
        config.memory_reserve = 0;
        config.disk_reserve = 0;
        config
    }

    #[test]
    fn reserves_are_kept_and_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = config(directory.path());
        assert_eq!(lacking(&config, 0), None);
        config.disk_reserve = u64::MAX;
        assert!(lacking(&config, 0).is_some_and(|what| what.starts_with("disk:")));
        config.memory_reserve = u64::MAX;
        assert!(lacking(&config, 0).is_some_and(|what| what.starts_with("memory:")));
        assert!(lacking(&config, u64::MAX).is_some_and(|what| what.starts_with("disk:")));
        let spared = lacking(&config, u64::MAX);
        assert!(
            spared.is_some_and(|what| what.starts_with("disk:")),
            "what can be had counts"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_holds_for_a_moment() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut config = config(directory.path());
        let room = HostRoom::default();
        assert_eq!(room.lacking(&config, 0), None);
        config.disk_reserve = u64::MAX;
        assert_eq!(room.lacking(&config, 0), None);
        tokio::time::advance(FRESH).await;
        assert!(room.lacking(&config, 0).is_some());
    }

    #[test]
    fn groups_are_found_by_their_lines() {
        assert_eq!(group("3:cpu,cpuacct:/x"), None);
        assert_eq!(group("nonsense"), None);
        assert_eq!(group("0::/no/such/group"), None);
        assert_eq!(free_in(Path::new("/no/such/group")), None);
        assert!(pids_free().is_ok() && files_free().is_ok() && own_files_free().is_ok());
    }
}
