//! Two managers never run beside each other: an exclusive lock per directory, released by the kernel with the process.

use std::{
    io::{Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};
use tokio::time::Instant;

/// How long a lock may be held by what is left of a node that was killed.
const PATIENCE: Duration = Duration::from_secs(1);
/// Name of the lock file.
const LOCK: &str = "node.lock";

/// Why a directory could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another manager holds it.
    #[error(
        "{directory} is in use by another node (process {holder}): stop that one first or choose another directory"
    )]
    Held {
        /// Which directory.
        directory: PathBuf,
        /// Its process id as it wrote it, or `unknown`.
        holder: String,
    },
    /// The lock file cannot be made or locked.
    #[error("cannot lock {directory}")]
    Io {
        /// Which directory.
        directory: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Holds a directory until dropped.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _file: fs::File,
}

impl DirectoryLock {
    /// Takes the lock, waiting for a moment: a child of a killed node holds a copy of its lock until it has become the
    /// monitor it was made for.
    pub(crate) async fn take(directory: &Path) -> Result<Self, LockError> {
        let give_up = Instant::now() + PATIENCE;
        loop {
            match Self::try_take(directory) {
                Err(LockError::Held { .. }) if Instant::now() < give_up => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                taken => return taken,
            }
        }
    }

    /// Takes the lock or says at once who holds it.
    fn try_take(directory: &Path) -> Result<Self, LockError> {
        let failed = |source| LockError::Io {
            directory: directory.to_owned(),
            source,
        };
        let mut file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(directory.join(LOCK))
            .map_err(failed)?;
        match flock(file.file(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                let read = (&mut file).take(16).read_to_string(&mut holder).is_ok();
                let known = read && !holder.is_empty() && holder.bytes().all(|byte| byte.is_ascii_digit());
                let holder = if known { holder } else { "unknown".to_owned() };
                return Err(LockError::Held {
                    directory: directory.to_owned(),
                    holder,
                });
            }
            Err(error) => return Err(failed(error.into())),
        }
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        write!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_lock_names_the_holder_and_a_released_one_is_free() {
        let directory = tempfile::tempdir().expect("a directory");
        let first = DirectoryLock::take(directory.path()).await.expect("free");
        let refused = DirectoryLock::take(directory.path())
            .await
            .expect_err("held")
            .to_string();
        assert!(
            refused.contains(&format!("process {}", std::process::id())),
            "{refused}"
        );
        drop(first);
        DirectoryLock::take(directory.path()).await.expect("free again");
    }
}
