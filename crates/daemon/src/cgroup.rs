//! The two control groups of the guest, and the freezer.
//!
//! `/daemon` holds the daemon alone, with memory that is never taken from it and the best weight; `/agent` holds all else,
//! kept below the machine's memory and process numbers so that a memory hog or fork bomb leaves the daemon answering.
//!
//! Only the daemon sees both, through a mount that has no place in the file system. What is mounted in the usual place
//! begins at `/agent`, and programs are started in a cgroup namespace that begins there too, which the kernel takes for
//! the border of a delegation: not even root in it can leave the group, thaw it, or lift its limits by mistake.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{IntoRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, fsconfig_create, fsconfig_set_flag, fsmount,
        fsopen, mount,
    },
    system::sysinfo,
    thread::{UnshareFlags, unshare_unsafe},
};
use space_channel::Activity;

/// Where programs find control groups.
pub const ROOT: &str = "/sys/fs/cgroup";
/// Memory that is never reclaimed from the daemon.
const DAEMON_MEMORY: u64 = 24 << 20;
/// Memory kept from the agent: the larger of this and a twentieth of all.
const RESERVED_MEMORY: u64 = 32 << 20;
/// Processes and threads the agent may have at most.
const MAX_PIDS: u64 = 4096;
/// Processes and threads kept from the agent when the kernel's own bound is low: the larger of this and a tenth.
const RESERVED_PIDS: u64 = 256;

/// The agent's group as the daemon reaches it.
#[derive(Debug)]
pub struct AgentHome {
    /// Its directory, in a mount that only this process names.
    pub directory: PathBuf,
    /// A namespace that begins at it.
    pub namespace: OwnedFd,
}

/// Makes both groups and moves the calling process into the daemon's. For the only thread of the first process.
pub fn set_up() -> io::Result<AgentHome> {
    let root = mount_unseen()?;
    let (daemon, agent) = (root.join("daemon"), root.join("agent"));
    fs::create_dir_all(&daemon)?;
    fs::create_dir_all(&agent)?;
    // A namespace begins where the thread that makes it is. It must be there before the group has controllers for groups
    // below it, since from then on it takes no process.
    set(&agent, "cgroup.procs", "0")?;
    let namespace = thread::spawn(agents_view)
        .join()
        .map_err(|_| io::Error::other("the thread for the agent's namespace ended"))??;
    set(&daemon, "cgroup.procs", "0")?;
    set(&root, "cgroup.subtree_control", "+cpu +memory +pids +io")?;
    set(&daemon, "memory.min", &DAEMON_MEMORY.to_string())?;
    set(&daemon, "memory.low", &(2 * DAEMON_MEMORY).to_string())?;
    set(&daemon, "cpu.weight", "10000")?;
    let info = sysinfo();
    let total = u64::from(info.mem_unit) * info.totalram;
    let free = available(&fs::read_to_string("/proc/meminfo")?).unwrap_or(total);
    set(&agent, "memory.max", &agent_memory(total, free).to_string())?;
    let pid_max = number("/proc/sys/kernel/pid_max")?;
    let threads_max = number("/proc/sys/kernel/threads-max")?;
    set(
        &agent,
        "pids.max",
        &agent_pids(pid_max.min(threads_max)).to_string(),
    )?;
    set(&agent, "cpu.weight", "100")?;
    // What the services set or read for each command; the agent may enable more below, and pays for it.
    set(&agent, "cgroup.subtree_control", "+cpu +memory +pids")?;
    // The first process is never chosen when memory runs out, so it needs no score for that, which every program would
    // inherit and have to set back.
    Ok(AgentHome {
        directory: agent,
        namespace,
    })
}

/// Mounts the whole hierarchy where no path of the file system leads; returns the path that this process has to it.
fn mount_unseen() -> io::Result<PathBuf> {
    let hierarchy = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for option in ["nsdelegate", "memory_recursiveprot"] {
        fsconfig_set_flag(&hierarchy, option)?;
    }
    fsconfig_create(&hierarchy)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mounted = fsmount(&hierarchy, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    // Open for the daemon's whole life: the path goes through it.
    Ok(PathBuf::from(format!("/proc/self/fd/{}", mounted.into_raw_fd())))
}

/// Puts the calling thread, which is to end soon, into a namespace that begins at its group, and mounts what is to be
/// seen from there. Returns the namespace.
fn agents_view() -> io::Result<OwnedFd> {
    // SAFETY: this takes away neither descriptors nor memory that others share, only what the thread sees of groups.
    unsafe { unshare_unsafe(UnshareFlags::NEWCGROUP) }?;
    let hardened = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("cgroup2", ROOT, "cgroup2", hardened, None)?;
    Ok(File::open("/proc/thread-self/ns/cgroup")?.into())
}

/// Bytes the agent may use of `total`, of which `available` are not taken by the kernel and the daemon already. A limit
/// that is not really there would never be met: the machine would search all its memory for room, for tens of seconds,
/// before it kills somebody.
fn agent_memory(total: u64, available: u64) -> u64 {
    available
        .min(total)
        .saturating_sub(RESERVED_MEMORY.max(total / 20))
        .max(total / 4)
}

/// Bytes that programs could have now, by the kernel's account.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes * 1024)
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
    pids_events: Option<File>,
    kill: File,
    cpu: Option<File>,
    io: Option<File>,
    tasks: Option<File>,
}

impl AgentGroup {
    /// Opens the group in `directory`, a cgroup v2 directory.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let open = |name: &str, write: bool| {
            let path = directory.join(name);
            File::options()
                .read(name != "cgroup.kill")
                .write(write)
                .open(&path)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
        };
        Ok(Self {
            freeze: open("cgroup.freeze", true)?,
            events: open("cgroup.events", false)?,
            memory_events: open("memory.events", false).ok(),
            pids_events: open("pids.events", false).ok(),
            kill: open("cgroup.kill", true)?,
            cpu: open("cpu.stat", false).ok(),
            io: open("io.stat", false).ok(),
            tasks: open("pids.current", false).ok(),
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

    /// The file that wakes a poll for priority events when processes stop or begin to stand still.
    pub fn freezes(&self) -> &File {
        &self.events
    }

    /// Freezes again if somebody has let the processes run; `true` if so.
    pub fn hold(&self) -> io::Result<bool> {
        let mut wanted = [0; 8];
        let length = self.freeze.read_at(&mut wanted, 0)?;
        let thawed = !wanted[..length].starts_with(b"1");
        if thawed {
            self.freeze.write_at(b"1", 0)?;
        }
        Ok(thawed)
    }

    /// The file that wakes a poll for priority events when the agent was refused a process.
    pub fn pids_events(&self) -> Option<&File> {
        self.pids_events.as_ref()
    }

    /// How many times the agent was refused a process.
    pub fn refused_processes(&self) -> u64 {
        keyed(self.pids_events.as_ref(), "max")
    }

    /// What the agent has used and has; a few short reads. What a kernel does not count is zero.
    pub fn activity(&self) -> Activity {
        let tasks = self.tasks.as_ref().map(whole).unwrap_or_default();
        Activity {
            cpu_micros: keyed(self.cpu.as_ref(), "usage_usec"),
            io_bytes: self.io.as_ref().map_or(0, |file| bytes_moved(&whole(file))),
            tasks: tasks.trim().parse().unwrap_or_default(),
            ..Activity::default()
        }
    }

    /// The file that wakes a poll for priority events when memory ran out in the group.
    pub fn memory_events(&self) -> Option<&File> {
        self.memory_events.as_ref()
    }

    /// How many processes were killed in the group because memory ran out.
    pub fn out_of_memory_kills(&self) -> u64 {
        keyed(self.memory_events.as_ref(), "oom_kill")
    }

    fn is_frozen(&self) -> io::Result<bool> {
        let mut text = [0; 128];
        let length = self.events.read_at(&mut text, 0)?;
        Ok(value_of(&text[..length], "frozen") == Some(1))
    }
}

/// The value of a key in a flat keyed file; zero if either is missing.
fn keyed(file: Option<&File>, key: &str) -> u64 {
    file.and_then(|file| value_of(whole(file).as_bytes(), key))
        .unwrap_or_default()
}

/// A control file's text, as far as it is of interest here.
fn whole(file: &File) -> String {
    let mut text = [0; 4096];
    let length = file.read_at(&mut text, 0).unwrap_or_default();
    String::from_utf8_lossy(&text[..length]).into_owned()
}

/// Bytes read and written on all devices, of an `io.stat` file.
fn bytes_moved(text: &str) -> u64 {
    let figures = text.split_whitespace().filter_map(|field| {
        let (name, value) = field.split_once('=')?;
        if matches!(name, "rbytes" | "wbytes") {
            value.parse().ok()
        } else {
            None
        }
    });
    figures.fold(0, u64::saturating_add)
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
        assert_eq!(agent_memory(512 << 20, 480 << 20), 448 << 20);
        assert_eq!(agent_memory(4 << 30, 4 << 30), (4 << 30) - (4 << 30) / 20);
        assert_eq!(agent_memory(40 << 20, 20 << 20), 10 << 20);
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:     2 kB\n"), Some(2048));
        assert_eq!(agent_pids(32768), 4096);
        assert_eq!(agent_pids(1800), 1544);
        assert_eq!(agent_pids(100), 64);
    }

    #[test]
    fn bytes_of_all_devices_are_added() {
        let text =
            "253:0 rbytes=10 wbytes=20 rios=3 wios=4 dbytes=99 dios=1\n253:16 rbytes=5 wbytes=0\n253:32\n";
        assert_eq!(bytes_moved(text), 35);
        assert_eq!(bytes_moved(""), 0);
    }

    #[test]
    fn flat_keyed_files_are_read_by_whole_keys() {
        let text = b"populated 1\nfrozen 1\noom 3\noom_kill 2\n";
        assert_eq!(value_of(text, "frozen"), Some(1));
        assert_eq!(value_of(text, "oom_kill"), Some(2));
        assert_eq!(value_of(text, "kill"), None);
    }
}
