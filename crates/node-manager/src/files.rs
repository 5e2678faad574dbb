//! Files of machines, given to the user that runs the monitor.

use std::{io, os::fd::OwnedFd};

use rustix::fs::{FileType, Gid, Mode, Uid};

use crate::{PrivilegeError, failed};

/// Gives a regular file to `uid` and `gid`, mode 0660. Anything but a regular file with one name, or a file of an owner
/// for whom `may_own` says no, is refused.
pub(crate) fn give_file(
    file: &OwnedFd,
    uid: u32,
    gid: u32,
    may_own: impl Fn(u32) -> bool,
) -> Result<(), PrivilegeError> {
    crate::spawn::check_uid(uid)?;
    let act = || format!("giving a file to user {uid}");
    let status = rustix::fs::fstat(file).map_err(|e| failed(act(), e))?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile || status.st_nlink != 1 {
        let what = "it is not a regular file with one name";
        return Err(failed(act(), io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    if !may_own(status.st_uid) {
        return Err(PrivilegeError::Refused {
            what: format!("{}: it belongs to user {}", act(), status.st_uid),
        });
    }
    // The mode first: while the file is still its giver's, and no write of the new owner is cut off by it.
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP;
    rustix::fs::fchmod(file, mode).map_err(|e| failed(act(), e))?;
    rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).map_err(|e| failed(act(), e))
}
