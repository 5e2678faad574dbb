//! What has to be there before the platform's processes start, made as root: directories that belong to the node's
//! user, and the template `base`.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, Mode};

use super::{
    installation::{Account, Installation},
    ownership::{self, Whose},
};
use crate::error::{CliError, Kind};

/// Held as long as the platform runs: nobody else runs one on this data directory, or takes what is left of one away.
#[derive(Debug)]
pub(crate) struct Claim {
    _directory: OwnedFd,
}

/// Makes the data directory and claims it.
pub(crate) fn claim(directory: &Path) -> Result<(PathBuf, Claim), CliError> {
    let absolute = std::path::absolute(directory)?;
    let doing = || format!("cannot use the data directory {}", absolute.display());
    // A link that an administrator has put there is theirs to put; below it none is followed.
    fs_err::create_dir_all(&absolute)?;
    let data = fs_err::canonicalize(&absolute)?;
    let opened = ownership::open(&data).map_err(|error| CliError::internal(doing(), error))?;
    match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(
                CliError::environment(format!("another `space up` runs on {}", data.display()))
                    .with_hint("stop that one first, or choose another directory with --data-dir"),
            );
        }
        Err(error) => return Err(CliError::internal(doing(), io::Error::from(error))),
    }
    Ok((data, Claim { _directory: opened }))
}

/// Gives the directories of the installation and the template store to the node's user.
pub(crate) fn directories(
    installation: &Installation,
    templates: &Path,
    account: Account,
) -> Result<(), CliError> {
    for directory in [&installation.data_directory, &installation.run_directory] {
        own(directory, account).map_err(|error| not_given(directory, account, error))?;
    }
    own_store(templates, account).map_err(|error| not_given(templates, account, error))
}

/// Makes a directory of the node's user. What is in it changes hands only as long as the directory itself is not theirs:
/// then it is what an earlier version or an interrupted change has left, and nobody but root can have put it there.
/// Afterwards it holds files of machines that may be running, which stay theirs.
fn own(path: &Path, account: Account) -> io::Result<()> {
    let directory = make(path)?;
    if ownership::owner(&directory)? == account.uid {
        return Ok(());
    }
    let given = ownership::give_tree(&directory, account, Whose::Everyones)?;
    if given > 1 {
        tracing::info!(path = %path.display(), entries = given, user = account.uid, "given to the node's user");
    }
    Ok(())
}

/// The template store may be shared with platforms of another user: then it stays theirs, and what is in it can be used.
/// Root may have built into it, and been interrupted.
fn own_store(path: &Path, account: Account) -> io::Result<()> {
    let directory = make(path)?;
    let owner = ownership::owner(&directory)?;
    if owner != 0 && owner != account.uid {
        tracing::warn!(
            store = %path.display(),
            owner,
            "the template store belongs to another user: no machine of a new size can be kept in it"
        );
        return Ok(());
    }
    ownership::give_tree(&directory, account, Whose::Roots).map(drop)
}

/// A directory that the users of machines may pass through, whatever the umask.
fn make(path: &Path) -> io::Result<OwnedFd> {
    let directory = ownership::make(path)?;
    let mode = rustix::fs::fstat(&directory)?.st_mode;
    rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode & 0o755 | 0o711))?;
    Ok(directory)
}

/// Gives what root has made in a template store to whom the store belongs.
pub(crate) fn settle_store(templates: &Path) -> Result<(), CliError> {
    let settle = || -> io::Result<()> {
        let directory = ownership::open(templates)?;
        let status = rustix::fs::fstat(&directory)?;
        let account = Account {
            uid: status.st_uid,
            gid: status.st_gid,
        };
        ownership::give_tree(&directory, account, Whose::Roots).map(drop)
    };
    let doing = || {
        format!(
            "cannot give what was built to the owner of {}",
            templates.display()
        )
    };
    settle().map_err(|error| CliError::internal(doing(), error))
}

fn not_given(path: &Path, account: Account, error: io::Error) -> CliError {
    let doing = format!(
        "cannot give {} to the node's user {}",
        path.display(),
        account.uid
    );
    CliError::new(Kind::Environment, anyhow::Error::new(error).context(doing))
        .with_hint("choose another directory")
}

/// Whether a template `base` is there, by its name only: the node looks at it more closely.
pub(crate) fn has_base(templates: &Path) -> bool {
    templates.join("names/base/latest").exists()
}
