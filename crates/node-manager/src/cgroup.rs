//! Cgroups of machines, on hosts with cgroup v2, v1 or both.
//!
//! A controller is used in the v2 tree if it is there, else in its v1 hierarchy. Each machine has a directory
//! `space-<installation>/<name>` in every hierarchy that is used, and always in the v2 tree if one is mounted:
//! that gives `cgroup.kill` and a membership nothing can leave.

mod disk;
mod files;
mod mounts;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use fs_err as fs;

use files::{enable, field, kill_members, make_directory, members, number, write, write_if_there};
use mounts::{favour_moves, v1_mount, v2_mount};

use crate::{GroupLimits, GroupUsage, IoLimits, ObjectName, PrivilegeError, failed};

/// How long killed processes may take to be gone.
const EMPTY_WITHIN: Duration = Duration::from_secs(5);

/// Pauses between two looks at a group that is being killed.
const FIRST_LOOK: Duration = Duration::from_micros(300);
const NEXT_LOOK: Duration = Duration::from_millis(2);

/// Period of the CPU quota, microseconds.
const PERIOD_MICROS: u64 = 100_000;

/// The controller of disk traffic by its name of today; in v1 it is `blkio`. Hosts do without it.
pub(crate) const IO: &str = "io";

/// The controllers that limits need.
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// The name of a controller that was heard of.
pub(crate) fn controller(name: &str) -> &'static str {
    let known = CONTROLLERS.into_iter().chain(["cpuacct", IO]);
    known.into_iter().find(|c| *c == name).unwrap_or("asked for")
}

/// Where a controller is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// One mounted hierarchy that is used.
#[derive(Debug)]
struct Hierarchy {
    mount: PathBuf,
    version: Version,
    controllers: Vec<&'static str>,
}

impl Hierarchy {
    /// Whether a group that has no limit of its disk traffic does without it.
    fn is_for_io_only(&self) -> bool {
        self.controllers == [IO]
    }

    /// The controllers that every group needs.
    fn necessary(&self) -> Vec<&'static str> {
        let all = self.controllers.iter().copied();
        all.filter(|c| *c != IO).collect()
    }
}

/// The hierarchies of this host.
#[derive(Debug)]
pub(crate) struct Hierarchies {
    /// `space-<installation>`.
    parent: String,
    /// v2 first, if there is one.
    used: Vec<Hierarchy>,
    /// The disk whose traffic is limited, or why none is.
    disk: Result<disk::Disk, String>,
    /// Held while the directory that the groups lie in is made, prepared or removed.
    parents: Mutex<()>,
}

/// Where a controller is on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// `memory`, `pids`, `cpu` or `io`.
    pub name: &'static str,
    /// 1 or 2; `None` if this host does not have it.
    pub version: Option<u8>,
    /// Mount point of its hierarchy.
    pub mount: Option<PathBuf>,
}

/// Where the controllers are that machines are limited by.
///
/// # Errors
/// If the mount table cannot be read.
pub fn controllers() -> Result<Vec<Controller>, PrivilegeError> {
    let table =
        fs::read_to_string("/proc/self/mountinfo").map_err(|e| failed("reading the mount table", e))?;
    let two = v2_mount(&table);
    let available = match &two {
        Some(mount) => fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default(),
        None => String::new(),
    };
    let find = |name: &'static str| {
        if available.split_ascii_whitespace().any(|a| a == name) {
            return (Some(2), two.clone());
        }
        let one = match name {
            IO => disk::v1_mount(&table),
            name => v1_mount(&table, name),
        };
        (one.as_ref().map(|_| 1), one)
    };
    let all = CONTROLLERS.into_iter().chain([IO]);
    Ok(all
        .map(|name| {
            let (version, mount) = find(name);
            Controller { name, version, mount }
        })
        .collect())
}

impl Hierarchies {
    /// Finds out what this host has.
    /// `data` is a path on the disk whose traffic will be limited, if it will.
    pub(crate) fn detect(parent: String, data: Option<&Path>) -> Result<Self, PrivilegeError> {
        let disk = match data {
            Some(path) => disk::disk_of(path),
            None => Err("no data directory is configured".to_owned()),
        };
        let mounts =
            fs::read_to_string("/proc/self/mountinfo").map_err(|e| failed("reading the mount table", e))?;
        let mut used = Vec::new();
        if let Some(mount) = v2_mount(&mounts) {
            let available = fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
            let controllers = CONTROLLERS
                .into_iter()
                .chain(disk.is_ok().then_some(IO))
                .filter(|c| available.split_ascii_whitespace().any(|a| a == *c))
                .collect::<Vec<_>>();
            favour_moves(&mount, &mounts);
            used.push(Hierarchy {
                mount,
                version: Version::Two,
                controllers,
            });
        }
        for controller in CONTROLLERS.into_iter().chain(["cpuacct"]) {
            let have_already = used.iter().any(|h| {
                h.controllers.contains(&controller) || (controller == "cpuacct" && h.version == Version::Two)
            });
            let Some(mount) = v1_mount(&mounts, controller).filter(|_| !have_already) else {
                continue;
            };
            match used.iter_mut().find(|h| h.mount == mount) {
                Some(hierarchy) => hierarchy.controllers.push(controller),
                None => used.push(Hierarchy {
                    mount,
                    version: Version::One,
                    controllers: vec![controller],
                }),
            }
        }
        let two_has_io = used.iter().any(|h| h.controllers.contains(&IO));
        if let Some(mount) = disk::v1_mount(&mounts).filter(|_| disk.is_ok() && !two_has_io) {
            match used.iter_mut().find(|h| h.mount == mount) {
                Some(hierarchy) => hierarchy.controllers.push(IO),
                None => used.push(Hierarchy {
                    mount,
                    version: Version::One,
                    controllers: vec![IO],
                }),
            }
        }
        Ok(Self {
            parent,
            used,
            disk,
            parents: Mutex::default(),
        })
    }

    /// Makes the group in every hierarchy and sets its limits. A group of that name that exists is limited anew.
    pub(crate) fn create(&self, name: &ObjectName, limits: &GroupLimits) -> Result<(), PrivilegeError> {
        for controller in CONTROLLERS {
            self.of(controller)?;
        }
        for hierarchy in &self.used {
            if limits.io.is_none() && hierarchy.is_for_io_only() {
                // One that is limited anew may be in it.
                remove(&hierarchy.mount.join(&self.parent).join(name.as_str()));
                continue;
            }
            self.make(hierarchy, name, limits)?;
        }
        let memory = limits.memory_bytes.to_string();
        match self.directory("memory", name)? {
            (Version::Two, directory) => {
                write(&directory, "memory.max", &memory)?;
                write_if_there(&directory, "memory.swap.max", "0")?;
                write_if_there(&directory, "memory.oom.group", "1")?;
            }
            (Version::One, directory) => {
                // The limit with swap may never be below the one without: first open it, then close it.
                write_if_there(&directory, "memory.memsw.limit_in_bytes", "-1")?;
                write(&directory, "memory.limit_in_bytes", &memory)?;
                write_if_there(&directory, "memory.memsw.limit_in_bytes", &memory)?;
            }
        }
        let (_, directory) = self.directory("pids", name)?;
        write(&directory, "pids.max", &limits.pids.to_string())?;
        let quota = limits.cpu_quota_micros.max(1_000);
        match self.directory("cpu", name)? {
            (Version::Two, directory) => {
                write(&directory, "cpu.max", &format!("{quota} {PERIOD_MICROS}"))?;
            }
            (Version::One, directory) => {
                write(&directory, "cpu.cfs_period_us", &PERIOD_MICROS.to_string())?;
                write(&directory, "cpu.cfs_quota_us", &quota.to_string())?;
            }
        }
        self.set_weight(name, limits.cpu_weight)?;
        match &limits.io {
            Some(io) => self.limit_io(name, io),
            None => Ok(()),
        }
    }

    /// Makes the directory of a group. Controllers are enabled above it each time: whoever made the directories there may
    /// have been killed before it came to that, or have known fewer, and others take unused ones away.
    fn make(
        &self,
        hierarchy: &Hierarchy,
        name: &ObjectName,
        limits: &GroupLimits,
    ) -> Result<(), PrivilegeError> {
        let _alone = self.parents.lock().unwrap_or_else(PoisonError::into_inner);
        let parent = hierarchy.mount.join(&self.parent);
        make_directory(&parent)?;
        if hierarchy.version == Version::Two {
            for directory in [&hierarchy.mount, &parent] {
                enable(directory, &hierarchy.necessary())?;
                if limits.io.is_some() && hierarchy.controllers.contains(&IO) {
                    // If it cannot be, the limit is found missing when it is set, which is told.
                    enable(directory, &[IO]).ok();
                }
            }
        }
        make_directory(&parent.join(name.as_str()))
    }

    /// Limits disk traffic where that is possible; where it is not, the machine goes without, which is told once.
    fn limit_io(&self, name: &ObjectName, limits: &IoLimits) -> Result<(), PrivilegeError> {
        static TOLD: std::sync::Once = std::sync::Once::new();
        let without = |reason: &dyn std::fmt::Display| {
            TOLD.call_once(|| tracing::warn!(%reason, "disk traffic is not limited"));
            Ok(())
        };
        match (&self.disk, self.directory(IO, name)) {
            (Ok(disk), Ok((version, directory))) => match disk::limit(version, &directory, *disk, limits) {
                Err(PrivilegeError::System { act, source }) if disk::is_unable(&source) => {
                    without(&format!("{act}: {source}"))
                }
                limited => limited,
            },
            (Ok(_), Err(_)) => without(&"there is no controller for it"),
            (Err(reason), _) => without(reason),
        }
    }

    /// Sets the share of the CPU that the group gets when there is not enough.
    pub(crate) fn set_weight(&self, name: &ObjectName, weight: u64) -> Result<(), PrivilegeError> {
        let weight = weight.clamp(1, 10_000);
        match self.directory("cpu", name)? {
            (Version::Two, directory) => write(&directory, "cpu.weight", &weight.to_string()),
            (Version::One, directory) => {
                let shares = (weight * 1024 / 100).clamp(2, 262_144);
                write(&directory, "cpu.shares", &shares.to_string())
            }
        }
    }

    /// `cgroup.procs` of the group in every hierarchy: what a new process writes itself into.
    pub(crate) fn membership_files(&self, name: &ObjectName) -> Vec<PathBuf> {
        let made = |hierarchy: &&Hierarchy| {
            !hierarchy.is_for_io_only() || hierarchy.mount.join(&self.parent).join(name.as_str()).exists()
        };
        let used = self.used.iter().filter(made);
        used.map(|h| {
            h.mount
                .join(&self.parent)
                .join(name.as_str())
                .join("cgroup.procs")
        })
        .collect()
    }

    /// Whether a process is in the group.
    pub(crate) fn has_members(&self, name: &ObjectName) -> Result<bool, PrivilegeError> {
        // The same in all of them.
        match self.directories(name).next() {
            Some(directory) => Ok(!members(&directory)?.is_empty()),
            None => Ok(false),
        }
    }

    pub(crate) fn usage(&self, name: &ObjectName) -> Result<GroupUsage, PrivilegeError> {
        let (memory_bytes, oom_kills) = match self.directory("memory", name)? {
            (Version::Two, d) => (
                number(&d, "memory.current")?,
                field(&d, "memory.events", "oom_kill")?,
            ),
            (Version::One, d) => (
                number(&d, "memory.usage_in_bytes")?,
                field(&d, "memory.oom_control", "oom_kill")?,
            ),
        };
        // `cpu.stat` of v2 counts the time even where the controller itself is in a v1 hierarchy.
        let cpu_micros = match self.used.first().filter(|h| h.version == Version::Two) {
            Some(two) => field(
                &two.mount.join(&self.parent).join(name.as_str()),
                "cpu.stat",
                "usage_usec",
            )?,
            None => number(&self.directory("cpuacct", name)?.1, "cpuacct.usage")? / 1_000,
        };
        Ok(GroupUsage {
            cpu_micros,
            memory_bytes,
            oom_kills,
        })
    }

    /// Kills all members and waits until none is left. Answers how many there were. Blocks.
    pub(crate) fn kill(&self, name: &ObjectName) -> Result<usize, PrivilegeError> {
        let mut killed = 0;
        let give_up = Instant::now() + EMPTY_WITHIN;
        let mut pause = FIRST_LOOK;
        loop {
            // The most in any hierarchy, not the sum: it is the same processes everywhere.
            let mut left = 0;
            for directory in self.directories(name) {
                left = left.max(kill_members(&directory)?);
            }
            killed = killed.max(left);
            if left == 0 {
                return Ok(killed);
            }
            if Instant::now() > give_up {
                let act = format!("waiting until the cgroup {name} is empty");
                return Err(failed(act, io::Error::from(io::ErrorKind::TimedOut)));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(NEXT_LOOK);
        }
    }

    /// Kills what is left and removes the group everywhere. Answers how many processes there were. Blocks.
    pub(crate) fn delete(&self, name: &ObjectName) -> Result<usize, PrivilegeError> {
        let killed = self.kill(name)?;
        for directory in self.directories(name) {
            let give_up = Instant::now() + EMPTY_WITHIN;
            loop {
                match fs::remove_dir(&directory) {
                    Ok(()) => break,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                    // A dying process still counts for a moment after it has left the list of members.
                    Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < give_up => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(e) => return Err(failed(format!("removing the cgroup {}", directory.display()), e)),
                }
            }
        }
        Ok(killed)
    }

    /// Names of all groups of this installation, in whichever hierarchy.
    pub(crate) fn list(&self) -> Result<Vec<String>, PrivilegeError> {
        let mut names = Vec::new();
        for hierarchy in &self.used {
            let entries = match fs::read_dir(hierarchy.mount.join(&self.parent)) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(failed("listing cgroups", e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| failed("listing cgroups", e))?;
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    names.extend(entry.file_name().into_string());
                }
            }
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Whether process `pid` is in one of the installation's groups; no, if there is no such process.
    pub(crate) fn holds(&self, pid: u32) -> Result<bool, PrivilegeError> {
        let path = format!("/proc/{pid}/cgroup");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => {
                return Ok(false);
            }
            Err(e) => return Err(failed(format!("reading {path}"), e)),
        };
        // `ID:controllers:/path` a line; which hierarchy does not matter, for members cannot leave any.
        let parent = format!("/{}/", self.parent);
        Ok(text
            .lines()
            .filter_map(|line| line.splitn(3, ':').nth(2))
            .any(|group| group.starts_with(&parent)))
    }

    /// Removes the installation's own directories if no group is left in them.
    pub(crate) fn remove_parents(&self) {
        let _alone = self.parents.lock().unwrap_or_else(PoisonError::into_inner);
        for hierarchy in &self.used {
            // Fails, rightly, while a group is left.
            fs::remove_dir(hierarchy.mount.join(&self.parent)).ok();
        }
    }

    fn directories(&self, name: &ObjectName) -> impl Iterator<Item = PathBuf> {
        self.used
            .iter()
            .map(move |h| h.mount.join(&self.parent).join(name.as_str()))
    }

    fn of(&self, controller: &'static str) -> Result<&Hierarchy, PrivilegeError> {
        self.used
            .iter()
            .find(|h| h.controllers.contains(&controller))
            .ok_or(PrivilegeError::NoController { controller })
    }

    fn directory(
        &self,
        controller: &'static str,
        name: &ObjectName,
    ) -> Result<(Version, PathBuf), PrivilegeError> {
        let hierarchy = self.of(controller)?;
        Ok((
            hierarchy.version,
            hierarchy.mount.join(&self.parent).join(name.as_str()),
        ))
    }
}

/// Takes an empty group away; one that is not there, or not empty, stays as it is.
fn remove(directory: &Path) {
    fs::remove_dir(directory).ok();
}
