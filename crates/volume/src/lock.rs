//! File locks between processes. The kernel releases them when the holder dies, however it dies.

use std::{io, path::Path, time::Duration};

use fs_err::{File, OpenOptions, os::unix::fs::OpenOptionsExt as _};

use crate::VolumeError;

/// Between two tries for a lock that another process holds.
const RETRY: Duration = Duration::from_millis(50);

/// Opens (makes, if need be) a lock file.
pub(crate) fn open(path: &Path) -> Result<File, VolumeError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .open(path)
        .map_err(VolumeError::io("open a lock file"))
}

/// Takes the lock alone, if nobody else has it.
pub(crate) fn try_exclusive(file: &File) -> Result<bool, VolumeError> {
    outcome(file.file().try_lock())
}

/// Takes the lock beside others, if nobody has it alone.
pub(crate) fn try_shared(file: &File) -> Result<bool, VolumeError> {
    outcome(file.file().try_lock_shared())
}

/// Takes the lock alone, waiting for it without a limit: the caller has one. May be dropped at any point.
pub(crate) async fn exclusive(file: File) -> Result<File, VolumeError> {
    while !try_exclusive(&file)? {
        tokio::time::sleep(RETRY).await;
    }
    Ok(file)
}

fn outcome(tried: Result<(), std::fs::TryLockError>) -> Result<bool, VolumeError> {
    match tried {
        Ok(()) => Ok(true),
        Err(std::fs::TryLockError::WouldBlock) => Ok(false),
        Err(std::fs::TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(std::fs::TryLockError::Error(error)) => Err(VolumeError::io("lock a file")(error)),
    }
}
