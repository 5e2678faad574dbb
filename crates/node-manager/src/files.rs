//! Directories and files of machines: made for, and given to, the user that runs the monitor.

use std::{io, path::Path};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};

use crate::{PrivilegeError, failed};

/// Makes a directory (0700) owned by `uid`.
pub(crate) fn create_directory(path: &Path, uid: u32) -> Result<(), PrivilegeError> {
    let (owner, group) = ids(uid)?;
    let act = || format!("making the directory {}", path.display());
    rustix::fs::mkdir(path, Mode::RWXU).map_err(|e| failed(act(), e))?;
    let owned = rustix::fs::chownat(CWD, path, Some(owner), Some(group), AtFlags::SYMLINK_NOFOLLOW);
    if let Err(e) = owned {
        rustix::fs::rmdir(path).ok();
        return Err(failed(act(), e));
    }
    Ok(())
}

/// Gives a regular file to `uid` with mode 0600; a symlink, a second hard link or anything else is refused.
pub(crate) fn give_file(path: &Path, uid: u32) -> Result<(), PrivilegeError> {
    let (owner, group) = ids(uid)?;
    let act = || format!("giving {} to another user", path.display());
    let file = rustix::fs::open(
        path,
        // NONBLOCK: a FIFO put there must not hold us.
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .map_err(|e| failed(act(), e))?;
    let status = rustix::fs::fstat(&file).map_err(|e| failed(act(), e))?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile || status.st_nlink != 1 {
        let what = "it is not a regular file with one name";
        return Err(failed(act(), io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    rustix::fs::fchown(&file, Some(owner), Some(group)).map_err(|e| failed(act(), e))?;
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(|e| failed(act(), e))
}

fn ids(uid: u32) -> Result<(Uid, Gid), PrivilegeError> {
    crate::spawn::check_uid(uid)?;
    Ok((Uid::from_raw(uid), Gid::from_raw(uid)))
}
