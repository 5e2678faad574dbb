//! Before a node takes requests: directories, locks, and removing what an earlier process left behind.

use std::{
    collections::BTreeSet,
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use fs_err as fs;
use space_node_manager::{ObjectName, PrivilegeError, Privileges};

use crate::{
    config::NodeConfig,
    journal::JournalError,
    lock::{DirectoryLock, LockError},
};

/// Directory of the machines below the run directory; short, for the sake of socket addresses.
pub const MACHINES: &str = "s";
/// Directory of the writable disks below the data directory.
pub const DISKS: &str = "disks";

/// Why a node cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A bound of the configuration.
    #[error("{what}")]
    Config {
        /// What is wrong and what would be right.
        what: String,
    },
    /// A directory cannot be made, read or emptied.
    #[error("cannot {step} {path}")]
    Directory {
        /// What was attempted.
        step: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Machines run as ordinary users and could not reach their files.
    #[error(
        "{path} cannot be passed through by other users: run `chmod o+x {path}` or choose another directory"
    )]
    NotTraversable {
        /// The directory, the one asked for or one above it.
        path: PathBuf,
    },
    /// Another node, or no lock.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// What an earlier process left could not be removed.
    #[error("cannot remove what an earlier node left behind")]
    Sweep(#[source] PrivilegeError),
}

/// Both locks, held as long as the node lives.
#[derive(Debug)]
pub(crate) struct Locks {
    _data: DirectoryLock,
    _run: DirectoryLock,
}

/// Makes and locks the directories.
pub(crate) async fn directories(config: &NodeConfig) -> Result<Locks, OpenError> {
    let run = config.run_directory.as_os_str().len();
    let refuse = |what: String| Err(OpenError::Config { what });
    if run > NodeConfig::MAX_RUN_DIRECTORY {
        return refuse(format!(
            "the run directory {} is {run} bytes long, at most {} are possible: choose a shorter one",
            config.run_directory.display(),
            NodeConfig::MAX_RUN_DIRECTORY
        ));
    }
    if !config.run_directory.is_absolute() || !config.data_directory.is_absolute() {
        return refuse("the data and run directories must be absolute paths".to_owned());
    }
    let machines = config.capacity + config.pool.most_machines();
    if config.uids.start == 0 || config.uids.len() < machines {
        return refuse(format!(
            "there must be a user id other than 0 for each of {machines} machines, those kept ready included, got {:?}",
            config.uids
        ));
    }
    if config.capacity == 0 || config.max_creating == 0 || config.concurrent_starts == 0 {
        return refuse("capacity, max_creating and concurrent_starts must be at least 1".to_owned());
    }
    for directory in [&config.data_directory, &config.run_directory] {
        make(directory)?;
    }
    let data = DirectoryLock::take(&config.data_directory).await?;
    let run = DirectoryLock::take(&config.run_directory).await?;
    for directory in [
        config.run_directory.join(MACHINES),
        config.data_directory.join(DISKS),
    ] {
        make(&directory)?;
        traversable(&directory)?;
    }
    Ok(Locks {
        _data: data,
        _run: run,
    })
}

/// Makes a directory that others may pass through but not list.
fn make(directory: &Path) -> Result<(), OpenError> {
    let failed = |source| OpenError::Directory {
        step: "make",
        path: directory.to_owned(),
        source,
    };
    let mut builder = std::fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o711)
        .create(directory)
        .map_err(failed)?;
    let metadata = fs::metadata(directory).map_err(failed)?;
    let mode = metadata.permissions().mode() & 0o7777;
    let own = metadata.uid() == rustix::process::geteuid().as_raw();
    if own && mode & 0o001 == 0 {
        // Ours, or about to be: an umask must not lock the machines out.
        fs::set_permissions(directory, std::fs::Permissions::from_mode(mode | 0o011)).map_err(failed)?;
    }
    Ok(())
}

fn traversable(directory: &Path) -> Result<(), OpenError> {
    for ancestor in directory.ancestors() {
        let metadata = fs::metadata(ancestor).map_err(|source| OpenError::Directory {
            step: "look at",
            path: ancestor.to_owned(),
            source,
        })?;
        if metadata.permissions().mode() & 0o001 == 0 {
            return Err(OpenError::NotTraversable {
                path: ancestor.to_owned(),
            });
        }
    }
    Ok(())
}

/// Removes every object and file of this installation that is not called by a name in `keep`: the workers that live on and
/// their networks.
pub(crate) async fn sweep(
    config: &NodeConfig,
    privileges: &dyn Privileges,
    keep: &BTreeSet<ObjectName>,
) -> Result<(), OpenError> {
    let swept = privileges.sweep(keep).await.map_err(OpenError::Sweep)?;
    let mut directories = 0;
    for parent in [
        config.run_directory.join(MACHINES),
        config.data_directory.join(DISKS),
    ] {
        directories += empty(&parent, keep)?;
    }
    if swept != Default::default() || directories > 0 {
        tracing::info!(
            processes = swept.processes,
            networks = swept.networks,
            groups = swept.groups,
            directories,
            "removed what an earlier node left behind"
        );
    }
    Ok(())
}

fn empty(parent: &Path, keep: &BTreeSet<ObjectName>) -> Result<usize, OpenError> {
    let failed = |step, path: &Path| {
        let path = path.to_owned();
        move |source| OpenError::Directory { step, path, source }
    };
    let mut removed = 0;
    for entry in fs::read_dir(parent).map_err(failed("list", parent))? {
        let path = entry.map_err(failed("list", parent))?.path();
        let kept = |name: &std::ffi::OsStr| keep.iter().any(|keep| name == keep.as_str());
        if path.file_name().is_some_and(kept) {
            continue;
        }
        let is_directory = fs::symlink_metadata(&path)
            .map_err(failed("look at", &path))?
            .is_dir();
        let gone = if is_directory {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        gone.map_err(failed("remove", &path))?;
        removed += 1;
    }
    Ok(removed)
}
