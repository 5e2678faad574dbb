//! The files of a cgroup.
//!
//! Errors keep the number that the kernel gave: it tells what is missing from what is refused.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use rustix::process::Pid;

use crate::{PrivilegeError, failed};

/// The members of one directory, a pid a line; none if it is not there.
pub(super) fn members(directory: &Path) -> Result<String, PrivilegeError> {
    match fs::read_to_string(directory.join("cgroup.procs")) {
        // Removed while it was open.
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENODEV) => {
            Ok(String::new())
        }
        Err(e) => Err(failed(
            format!("reading the members of {}", directory.display()),
            e,
        )),
        members => Ok(members.unwrap_or_default()),
    }
}

/// Kills what is in one directory; answers how many members it still had.
pub(super) fn kill_members(directory: &Path) -> Result<usize, PrivilegeError> {
    let members = members(directory)?;
    if members.is_empty() {
        return Ok(0);
    }
    let at_once = directory.join("cgroup.kill");
    if !at_once.exists() || fs::write(&at_once, "1").is_err() {
        for pid in members
            .lines()
            .filter_map(|l| l.parse().ok())
            .filter_map(Pid::from_raw)
        {
            // By pid and not by pidfd: membership was read this instant, and what forks meanwhile is seen in the
            // next round.
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
        }
    }
    Ok(members.lines().count())
}

/// Enables controllers for the children of a v2 cgroup.
pub(super) fn enable(directory: &Path, controllers: &[&str]) -> Result<(), PrivilegeError> {
    let enabled = fs::read_to_string(directory.join("cgroup.subtree_control")).unwrap_or_default();
    for controller in controllers {
        if !enabled.split_ascii_whitespace().any(|e| e == *controller) {
            write(directory, "cgroup.subtree_control", &format!("+{controller}"))?;
        }
    }
    Ok(())
}

/// Makes a directory unless it is there.
pub(super) fn make_directory(path: &Path) -> Result<(), PrivilegeError> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed(format!("making the cgroup {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

pub(super) fn write(directory: &Path, file: &str, value: &str) -> Result<(), PrivilegeError> {
    let path = directory.join(file);
    // Never made: the kernel would refuse that with another error than that there is no such file.
    let written = fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut to| to.write_all(value.as_bytes()));
    written.map_err(|e| failed(format!("writing {value} to {}", path.display()), e))
}

pub(super) fn write_if_there(directory: &Path, file: &str, value: &str) -> Result<(), PrivilegeError> {
    if directory.join(file).exists() {
        write(directory, file, value)
    } else {
        Ok(())
    }
}

pub(super) fn read(directory: &Path, file: &str) -> Result<String, PrivilegeError> {
    let path = directory.join(file);
    fs::read_to_string(&path).map_err(|e| failed(format!("reading {}", path.display()), e))
}

pub(super) fn number(directory: &Path, file: &str) -> Result<u64, PrivilegeError> {
    Ok(read(directory, file)?.trim().parse().unwrap_or(0))
}

pub(super) fn field(directory: &Path, file: &str, key: &str) -> Result<u64, PrivilegeError> {
    let text = read(directory, file)?;
    let value = text
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok());
    Ok(value.unwrap_or(0))
}
