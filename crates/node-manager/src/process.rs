//! Processes that are told apart by more than their pid.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, PidfdFlags, Signal},
};

use crate::{PrivilegeError, ProcessIdentity, failed, jail};

/// `PF_EXITING` of the kernel: it is on its way out and has left its groups.
const EXITING: u64 = 0x4;

/// What the kernel says of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stat {
    /// Start time, clock ticks since boot.
    pub(crate) start_ticks: u64,
    /// Whether it is ending, or has ended and waits to be reaped.
    pub(crate) exiting: bool,
}

/// Looks at a process; `None` if there is none of that number. An error says nothing about the process.
pub(crate) fn stat(pid: u32) -> io::Result<Option<Stat>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if is_absence(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    // The second field is the program's name in parentheses and may hold anything, so count from the last one.
    let field = |number: usize| {
        let (_, rest) = stat.rsplit_once(')')?;
        rest.split_ascii_whitespace().nth(number - 3)?.parse::<u64>().ok()
    };
    match (field(9), field(22)) {
        (Some(flags), Some(start_ticks)) => Ok(Some(Stat {
            start_ticks,
            exiting: flags & EXITING != 0,
        })),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("/proc/{pid}/stat is of an unknown form"),
        )),
    }
}

/// Start time of a process, clock ticks since boot; `None` if there is no such process.
pub(crate) fn start_ticks(pid: u32) -> io::Result<Option<u64>> {
    Ok(stat(pid)?.map(|stat| stat.start_ticks))
}

/// Whether an error of a file in `/proc/PID` says that the process is gone.
fn is_absence(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Whether `process` is still the same. An error is not taken for its end.
pub(crate) fn is_same(process: ProcessIdentity) -> Result<bool, PrivilegeError> {
    let found =
        start_ticks(process.pid).map_err(|e| failed(format!("looking at process {}", process.pid), e))?;
    Ok(found == Some(process.start_ticks))
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
    Ok(is_same(process)?.then_some(pidfd))
}

/// Kills the process of a pidfd; one that is gone counts as killed.
pub(crate) fn kill(process: ProcessIdentity, pidfd: impl AsFd) -> Result<(), PrivilegeError> {
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
///
/// Between its making and its program's start a monitor shares the memory of this process (see `spawn`). It has this
/// process's program for just as long: the kernel changes both in one step, and never back.
pub(crate) fn open_memory(process: ProcessIdentity) -> Result<[OwnedFd; 3], PrivilegeError> {
    let pid = process.pid;
    let act = || format!("opening the memory of process {pid}");
    refuse_own_program(pid)?;
    let open = |file: &str, flags| {
        rustix::fs::open(
            format!("/proc/{pid}/{file}"),
            flags | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| match io::Error::from(e) {
            error if is_absence(&error) => gone(act()),
            error => failed(format!("opening /proc/{pid}/{file}"), error),
        })
    };
    let memory = open("mem", OFlags::RDWR)?;
    let pagemap = open("pagemap", OFlags::RDONLY)?;
    // Who may read it is decided now, so the reader need not be root.
    let maps = open("maps", OFlags::RDONLY)?;
    // Still the same: so the pid was not reused while the files were opened, and it was of the program looked at.
    let same = is_same(process)?;
    refuse_own_program(pid)?;
    if same {
        Ok([memory, pagemap, maps])
    } else {
        Err(gone(act()))
    }
}

/// Refuses a process that runs this process's program, and with it perhaps in this process's memory.
fn refuse_own_program(pid: u32) -> Result<(), PrivilegeError> {
    let program = |of: String| {
        rustix::fs::stat(&of)
            .map_err(io::Error::from)
            .map(|s| (s.st_dev, s.st_ino))
    };
    let own =
        program("/proc/self/exe".to_owned()).map_err(|e| failed("looking at the program that runs", e))?;
    match program(format!("/proc/{pid}/exe")) {
        Ok(other) if other != own => Ok(()),
        Ok(_) => Err(PrivilegeError::Refused {
            what: format!("process {pid} does not run a monitor"),
        }),
        // One that is ending has no memory any more.
        Err(error) if is_absence(&error) => Err(gone(format!("opening the memory of process {pid}"))),
        Err(error) => Err(failed(format!("looking at the program of process {pid}"), error)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_there_ending_or_gone() {
        let own = stat(std::process::id()).unwrap().unwrap();
        assert!(!own.exiting && own.start_ticks > 0, "{own:?}");
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let wait = rustix::process::WaitId::Pid(Pid::from_child(&child));
        let keep = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(wait, keep).unwrap();
        let ended = stat(child.id()).unwrap().unwrap();
        assert!(ended.exiting, "{ended:?}");
        let identity = ProcessIdentity {
            pid: child.id(),
            start_ticks: ended.start_ticks,
        };
        assert!(is_same(identity).unwrap());
        child.wait().unwrap();
        assert!(stat(u32::MAX).unwrap().is_none());
    }

    #[test]
    fn the_memory_of_this_program_is_not_opened() {
        let pid = std::process::id();
        let start_ticks = start_ticks(pid).unwrap().unwrap();
        let outcome = open_memory(ProcessIdentity { pid, start_ticks });
        assert!(
            matches!(outcome, Err(PrivilegeError::Refused { .. })),
            "{outcome:?}"
        );
    }
}
