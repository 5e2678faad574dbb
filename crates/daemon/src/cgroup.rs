//! The two control groups of the guest, and the freezer.
//!
//! `/daemon` holds the daemon alone, with memory that is never taken from it and the best weight; `/agent` holds all else,
//! kept below the machine's memory and process numbers so that a memory hog or fork bomb leaves the daemon answering.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    mount::{MountFlags, mount},
    system::sysinfo,
};

/// Where control groups are mounted.
pub const ROOT: &str = "/sys/fs/cgroup";
/// Memory that is never reclaimed from the daemon.
const DAEMON_MEMORY: u64 = 24 << 20;
/// Memory kept from the agent: the larger of this and a twentieth of all.
const RESERVED_MEMORY: u64 = 32 << 20;
/// Processes and threads the agent may have at most.
const MAX_PIDS: u64 = 4096;
/// Processes and threads kept from the agent when the kernel's own bound is low: the larger of this and a tenth.
const RESERVED_PIDS: u64 = 256;

/// Makes both groups and moves the calling process into the daemon's. Returns the agent's directory.
pub fn set_up() -> io::Result<PathBuf> {
    let root = Path::new(ROOT);
    let hardened = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount(
        "cgroup2",
        root,
        "cgroup2",
        hardened,
        c"nsdelegate,memory_recursiveprot",
    )?;
    let (daemon, agent) = (root.join("daemon"), root.join("agent"));
    fs::create_dir_all(&daemon)?;
    fs::create_dir_all(&agent)?;
    set(&daemon, "cgroup.procs", "0")?;
    set(root, "cgroup.subtree_control", "+cpu +memory +pids +io")?;
    set(&daemon, "memory.min", &DAEMON_MEMORY.to_string())?;
    set(&daemon, "memory.low", &(2 * DAEMON_MEMORY).to_string())?;
    set(&daemon, "cpu.weight", "10000")?;
    let info = sysinfo();
    let total = u64::from(info.mem_unit) * info.totalram;
    set(&agent, "memory.max", &agent_memory(total).to_string())?;
    let pid_max = number("/proc/sys/kernel/pid_max")?;
    let threads_max = number("/proc/sys/kernel/threads-max")?;
    set(
        &agent,
        "pids.max",
        &agent_pids(pid_max.min(threads_max)).to_string(),
    )?;
    set(&agent, "cpu.weight", "100")?;
    set(&agent, "cgroup.subtree_control", "+cpu +memory +pids +io")?;
    // Inherited by children: the services set it back for what they start.
    fs::write("/proc/self/oom_score_adj", "-1000")?;
    Ok(agent)
}

/// Bytes the agent may use of `total`.
fn agent_memory(total: u64) -> u64 {
    total
        .saturating_sub(RESERVED_MEMORY.max(total / 20))
        .max(total / 2)
}

/// Processes and threads the agent may have where the kernel allows `bound`.
fn agent_pids(bound: u64) -> u64 {
    bound
        .saturating_sub(RESERVED_PIDS.max(bound / 10))
        .clamp(64, MAX_PIDS)
}

fn set(group: &Path, name: &str, value: &str) -> io::Result<()> {
    let path = group.join(name);
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    File::options()
        .write(true)
        .open(&path)
        .map_err(named)?
        .write_all(value.as_bytes())
        .map_err(named)
}

fn number(path: &str) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("{path}: {text}")))
}

/// The agent's group while it runs. Files are opened once, so that a freeze is a few short calls.
#[derive(Debug)]
pub struct AgentGroup {
    freeze: File,
    events: File,
    memory_events: Option<File>,
    kill: File,
}

impl AgentGroup {
    /// Opens the group in `directory`, a cgroup v2 directory.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let open = |name: &str, write: bool| {
            let path = directory.join(name);
            File::options()
                .read(!write)
                .write(write)
                .open(&path)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
        };
        Ok(Self {
            freeze: open("cgroup.freeze", true)?,
            events: open("cgroup.events", false)?,
            memory_events: open("memory.events", false).ok(),
            kill: open("cgroup.kill", true)?,
        })
    }

    /// Freezes every process in the group. `false`: not all stood still within `limit`; those that do stay frozen.
    pub fn freeze(&self, limit: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + limit;
        self.freeze.write_at(b"1", 0)?;
        loop {
            if self.is_frozen()? {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
            match poll(&mut [PollFd::new(&self.events, PollFlags::PRI)], Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Lets them run on.
    pub fn thaw(&self) -> io::Result<()> {
        self.freeze.write_at(b"0", 0).map(drop)
    }

    /// Kills every process in the group.
    pub fn kill(&self) -> io::Result<()> {
        self.kill.write_at(b"1", 0).map(drop)
    }

    /// The file that wakes a poll for priority events when memory ran out in the group.
    pub fn memory_events(&self) -> Option<&File> {
        self.memory_events.as_ref()
    }

    /// How many processes were killed in the group because memory ran out.
    pub fn out_of_memory_kills(&self) -> u64 {
        let mut text = [0; 512];
        let Some(Ok(length)) = self.memory_events.as_ref().map(|file| file.read_at(&mut text, 0)) else {
            return 0;
        };
        value_of(&text[..length], "oom_kill").unwrap_or_default()
    }

    fn is_frozen(&self) -> io::Result<bool> {
        let mut text = [0; 128];
        let length = self.events.read_at(&mut text, 0)?;
        Ok(value_of(&text[..length], "frozen") == Some(1))
    }
}

/// The value of a key in a flat keyed file.
fn value_of(text: &[u8], key: &str) -> Option<u64> {
    std::str::from_utf8(text).ok()?.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        if name == key { value.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_share_is_kept_from_the_agent() {
        assert_eq!(agent_memory(512 << 20), 480 << 20);
        assert_eq!(agent_memory(4 << 30), (4 << 30) - (4 << 30) / 20);
        assert_eq!(agent_memory(40 << 20), 20 << 20);
        assert_eq!(agent_pids(32768), 4096);
        assert_eq!(agent_pids(1800), 1544);
        assert_eq!(agent_pids(100), 64);
    }

    #[test]
    fn flat_keyed_files_are_read_by_whole_keys() {
        let text = b"populated 1\nfrozen 1\noom 3\noom_kill 2\n";
        assert_eq!(value_of(text, "frozen"), Some(1));
        assert_eq!(value_of(text, "oom_kill"), Some(2));
        assert_eq!(value_of(text, "kill"), None);
    }
}
