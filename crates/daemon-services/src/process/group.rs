//! One cgroup per process, so that nothing it starts can get away.
//!
//! Groups are plain directories below the agent's cgroup. A few are made ahead of use, because
//! making one takes longer than starting a small program; they are made when a command has ended, so
//! that the making takes no time from one that has just begun.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::io::Interest;
use tokio::time::timeout;

use crate::descriptor;

/// Groups kept ready: for commands that begin before an earlier one has ended.
const SPARES: usize = 4;
/// The share of the agent's processes that no single command gets, so that a fork bomb leaves room
/// for the command that stops it: one part of so many, and at least so many processes.
const KEPT_PROCESSES: (u64, u64) = (8, 32);
/// A control file that answers more than this is not one of the kernel's.
const MAX_CONTROL_FILE: u64 = 1 << 20;
/// Groups below one that are looked into for members.
const MAX_NESTED: usize = 256;
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The parent of all groups.
#[derive(Debug)]
pub(crate) struct Groups {
    parent: PathBuf,
    /// Most processes and threads in one group, if the agent has a limit at all.
    most_processes: Option<u64>,
    next: AtomicU64,
    spares: Mutex<Vec<Group>>,
}

impl Groups {
    pub(crate) fn new(parent: PathBuf) -> Self {
        let limit = fs::read_to_string(parent.join("pids.max")).unwrap_or_default();
        let most_processes = limit.trim().parse().ok().map(|limit: u64| {
            let (part, least) = KEPT_PROCESSES;
            limit.saturating_sub((limit / part).max(least)).max(1)
        });
        Self {
            parent,
            most_processes,
            next: AtomicU64::new(1),
            spares: Mutex::default(),
        }
    }

    /// A new, empty group. Blocks for one `mkdir` at most.
    pub(crate) fn take(&self) -> io::Result<Group> {
        let spare = self.spares.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match spare {
            Some(group) => Ok(group),
            None => self.make(),
        }
    }

    /// Whether the next start would have to make its own.
    pub(crate) fn are_used_up(&self) -> bool {
        self.spares
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
    }

    /// Makes groups ahead of use.
    pub(crate) fn refill(&self) -> io::Result<()> {
        loop {
            if self.spares.lock().unwrap_or_else(PoisonError::into_inner).len() >= SPARES {
                return Ok(());
            }
            let group = self.make()?;
            self.spares
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(group);
        }
    }

    fn make(&self) -> io::Result<Group> {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let path = self.parent.join(format!("process-{number}"));
            match fs::create_dir(&path) {
                Ok(()) => {}
                // Left from an earlier life of this service; its members are not ours to kill.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            let directory = fs::File::open(&path)?.into();
            let group = Group { path, directory };
            // All or nothing: half a program is worse than none.
            group.set("memory.oom.group", "1");
            if let Some(most) = self.most_processes {
                group.set("pids.max", &most.to_string());
            }
            return Ok(group);
        }
    }
}

/// One group; removed when dropped, if it is empty by then.
#[derive(Debug)]
pub(crate) struct Group {
    path: PathBuf,
    directory: OwnedFd,
}

impl Group {
    pub(crate) fn descriptor(&self) -> RawFd {
        self.directory.as_raw_fd()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Kills every member at once, those in other sessions included.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.write("cgroup.kill", "1")
    }

    /// Pids of the members, those in groups that a member made below this one too.
    pub(crate) fn members(&self) -> Vec<i32> {
        let mut found = Vec::new();
        let mut below = vec![self.path.clone()];
        let mut looked_at = 0;
        while let Some(directory) = below.pop() {
            let text = read(&directory.join("cgroup.procs")).unwrap_or_default();
            found.extend(text.lines().filter_map(|line| line.trim().parse::<i32>().ok()));
            looked_at += 1;
            if looked_at < MAX_NESTED {
                let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
                let nested = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
                below.extend(nested.map(|entry| entry.path()).take(MAX_NESTED));
            }
        }
        found
    }

    /// Whether anything lives in the group or below it.
    pub(crate) fn is_populated(&self) -> bool {
        self.read("cgroup.events")
            .is_ok_and(|text| text.lines().any(|line| line == "populated 1"))
    }

    /// How many members the kernel has killed for want of memory.
    pub(crate) fn out_of_memory_kills(&self) -> u64 {
        let text = self.read("memory.events").unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or_default()
    }

    /// Waits until nothing lives in the group.
    pub(crate) async fn emptied(&self) -> io::Result<()> {
        if !self.is_populated() {
            return Ok(());
        }
        let file = fs::File::open(self.path.join("cgroup.events"))?;
        let events = descriptor::watch(file.into(), Interest::PRIORITY)?;
        let mut content = [0; 256];
        // Each reading through the same descriptor arms its next event.
        rustix::io::pread(&events, &mut content, 0)?;
        while self.is_populated() {
            // The kernel may fold several changes into one event: look again every now and then.
            if let Ok(ready) = timeout(LOOK_AGAIN, events.ready(Interest::PRIORITY)).await {
                ready?.clear_ready();
                rustix::io::pread(&events, &mut content, 0)?;
            }
        }
        Ok(())
    }

    fn read(&self, name: &str) -> io::Result<String> {
        read(&self.path.join(name))
    }

    /// Sets what only some kernels and hierarchies have.
    fn set(&self, name: &str, value: &str) {
        if let Err(error) = self.write(name, value)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "cannot set {name}");
        }
    }

    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        fs::OpenOptions::new()
            .write(true)
            .open(self.path.join(name))?
            .write_all(value.as_bytes())
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?
        .take(MAX_CONTROL_FILE)
        .read_to_string(&mut text)?;
    Ok(text)
}

impl Group {
    /// Removes the group. Its last members may still be leaving, so this tries for a while.
    pub(crate) async fn remove(&self) {
        for pause in [0, 1, 10, 100, 1000] {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            match fs::remove_dir(&self.path) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                _ => return,
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %self.path.display(), %error, "a process group outlives its record");
        }
    }
}
