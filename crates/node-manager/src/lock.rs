//! One node manager for an installation, whatever run directory it is told.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::{PrivilegeError, failed};

/// Where the locks lie. Not in a run directory: that is the node's, who could hold the lock or put another file in its
/// place.
const DIRECTORY: &str = "/run/space-locks";

/// How long a lock may be held by what is left of a node manager that was killed.
const PATIENCE: Duration = Duration::from_secs(1);

/// Pause between attempts.
const AGAIN: Duration = Duration::from_millis(5);

/// A lock that is held.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: OwnedFd,
}

impl Lock {
    /// Takes the lock of an installation.
    pub(crate) fn take(installation: &str) -> Result<Self, PrivilegeError> {
        Self::take_in(Path::new(DIRECTORY), installation)
    }

    fn take_in(directory: &Path, installation: &str) -> Result<Self, PrivilegeError> {
        let path = directory.join(format!("{installation}.lock"));
        let act = || format!("locking {}", path.display());
        match fs::DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(act(), error)),
            _ => {}
        }
        // A child of a killed node manager holds a copy of its lock between `clone` and `execve`. Waiting for that also
        // makes sure that it is in its group by the time of the first sweep.
        let give_up = Instant::now() + PATIENCE;
        loop {
            let file = rustix::fs::open(
                &path,
                OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW,
                Mode::RUSR | Mode::WUSR,
            )
            .map_err(|e| failed(act(), e))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if has_name(&file, &path) => return Ok(Self { path, _file: file }),
                // Its holder has just removed it.
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < give_up => std::thread::sleep(AGAIN),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(PrivilegeError::Refused {
                        what: format!(
                            "another node manager of this installation is running: it holds {}",
                            path.display()
                        ),
                    });
                }
                Err(e) => return Err(failed(act(), e)),
            }
        }
    }
}

impl Drop for Lock {
    /// While it is held, so nobody else's is removed.
    fn drop(&mut self) {
        fs::remove_file(&self.path).ok();
    }
}

/// Whether a file is still the one of its name.
fn has_name(file: &OwnedFd, path: &Path) -> bool {
    let id = |status: rustix::fs::Stat| (status.st_dev, status.st_ino);
    match (rustix::fs::fstat(file), rustix::fs::lstat(path)) {
        (Ok(held), Ok(named)) => id(held) == id(named),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_it_and_leaves_nothing() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("locks");
        let first = Lock::take_in(&directory, "a").unwrap();
        assert!(matches!(
            Lock::take_in(&directory, "a"),
            Err(PrivilegeError::Refused { .. })
        ));
        let other = Lock::take_in(&directory, "b").unwrap();
        // Somebody who waits gets it, though the file goes with its holder.
        let waiting = {
            let directory = directory.clone();
            std::thread::spawn(move || Lock::take_in(&directory, "a").map(drop))
        };
        drop(first);
        waiting.join().unwrap().unwrap();
        drop(other);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&directory).unwrap());
        assert_eq!(mode & 0o777, 0o700);
    }
}
