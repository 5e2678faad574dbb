//! Processes that are told apart by more than their pid.

use std::{io, os::fd::OwnedFd};

use fs_err as fs;
use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, PidfdFlags, Signal},
};

use crate::{PrivilegeError, ProcessIdentity, failed, jail};

/// Start time of a process, clock ticks since boot; `None` if there is no such process.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may hold anything, so count from the last one.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// A pidfd, if the process is still the same.
pub(crate) fn open(process: ProcessIdentity) -> Result<Option<OwnedFd>, PrivilegeError> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else {
        return Ok(None);
    };
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(e) => return Err(failed(format!("opening process {}", process.pid), e)),
    };
    // In this order: if the start time is right now, then the pidfd opened before was of that process.
    Ok((start_ticks(process.pid) == Some(process.start_ticks)).then_some(pidfd))
}

/// Kills the process if it is still the same; a process that is gone counts as killed.
pub(crate) fn kill(process: ProcessIdentity) -> Result<(), PrivilegeError> {
    let Some(pidfd) = open(process)? else {
        return Ok(());
    };
    match rustix::process::pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(e) => Err(failed(format!("killing process {}", process.pid), e)),
    }
}

/// The error for a process that is no more.
pub(crate) fn gone(act: String) -> PrivilegeError {
    failed(act, io::Error::from_raw_os_error(libc::ESRCH))
}

/// Opens memory, pagemap and map of the process if it is still the same.
pub(crate) fn open_memory(process: ProcessIdentity) -> Result<[OwnedFd; 3], PrivilegeError> {
    let pid = process.pid;
    let gone = || gone(format!("opening the memory of process {pid}"));
    let pidfd = open(process)?.ok_or_else(gone)?;
    let open = |file: &str, flags| {
        rustix::fs::open(
            format!("/proc/{pid}/{file}"),
            flags | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| failed(format!("opening /proc/{pid}/{file}"), e))
    };
    let memory = open("mem", OFlags::RDWR)?;
    let pagemap = open("pagemap", OFlags::RDONLY)?;
    // Who may read it is decided now, so the reader need not be root.
    let maps = open("maps", OFlags::RDONLY)?;
    drop(pidfd);
    // Still the same: so the pid was not reused while the files were opened.
    if start_ticks(pid) == Some(process.start_ticks) {
        Ok([memory, pagemap, maps])
    } else {
        Err(gone())
    }
}

/// Reads a map; paths in it are as the process itself sees them.
pub(crate) fn read_maps(maps: OwnedFd) -> io::Result<String> {
    let text = io::read_to_string(std::fs::File::from(maps))?;
    // A reader outside of a jail sees also what the jail's root is mounted on.
    let root = format!(" {}/", jail::ROOT.to_string_lossy());
    let mut seen = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        match line.split_once(&root) {
            // Only the first: fields before the path hold none.
            Some((fields, path)) => seen.extend([fields, " /", path]),
            None => seen.push_str(line),
        }
    }
    Ok(seen)
}
