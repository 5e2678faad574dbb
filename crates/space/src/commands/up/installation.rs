//! What tells the objects of one platform from those of others on this machine, and whose they are.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};

use clap::Args;
use nix::unistd::User;
use sha2::{Digest as _, Sha256};
use space_node::NodeConfig;

use crate::{cli::DATA_DIRECTORY, error::CliError};

/// Below it, each installation has its sockets and locks in a directory of its own.
pub(crate) const RUN_DIRECTORY: &str = "/run/space";
/// The installation of the usual data directory.
const LOCAL: &str = "local";
/// User that the node runs as, unless told otherwise: just below those of the machines.
pub(crate) const NODE_UID: u32 = 199_998;
/// User ids of one installation: one for each sandbox, the last for building machines.
const UIDS: u32 = 4096;
/// First user id of the first installation.
const FIRST_UID: u32 = 200_000;
/// Ranges of user ids that installations are spread over.
const UID_RANGES: u32 = 250;

/// Where an installation is; what every process of it is told.
#[derive(Debug, Clone, Args)]
pub(crate) struct Place {
    /// Directory for everything that is to stay
    #[arg(long, default_value = DATA_DIRECTORY, value_name = "DIRECTORY", env = "SPACE_DATA_DIR")]
    pub(crate) data_dir: PathBuf,
    /// Directory for sockets [default: one below /run/space]
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) run_dir: Option<PathBuf>,
}

impl Place {
    /// The installation whose data directory is there already.
    pub(crate) fn installation(&self) -> Result<Installation, CliError> {
        let data = fs_err::canonicalize(&self.data_dir).map_err(|error| {
            CliError::from(error)
                .with_hint("`space up` makes the data directory; name the right one with --data-dir")
        })?;
        Ok(Installation::of(data, self.run_dir.as_deref()))
    }
}

/// One data directory with what it owns on this machine.
#[derive(Debug, Clone)]
pub(crate) struct Installation {
    /// Part of every object's name.
    pub(crate) name: String,
    /// What is to stay; an absolute path without links.
    pub(crate) data_directory: PathBuf,
    /// Sockets and locks.
    pub(crate) run_directory: PathBuf,
    /// For sandboxes; the id after the last is for building machines.
    pub(crate) uids: Range<u32>,
}

impl Installation {
    /// The one of a data directory, given as an absolute path without links.
    pub(crate) fn of(data: PathBuf, run: Option<&Path>) -> Self {
        let default = data == Path::new(DATA_DIRECTORY);
        let digest = Sha256::digest(data.as_os_str().as_encoded_bytes());
        let name = if default {
            LOCAL.to_owned()
        } else {
            space_api::key::hex(&digest[..5])
        };
        let range = if default {
            0
        } else {
            1 + u32::from(digest[5]) % (UID_RANGES - 2)
        };
        let run_directory = run.map_or_else(|| Path::new(RUN_DIRECTORY).join(&name), Path::to_owned);
        Self::new(name, data, run_directory, range)
    }

    /// The one of `space template build`, so that it does not meet a platform that runs.
    pub(crate) fn builder(data: &Path, run: &Path) -> Self {
        Self::new(
            "build".to_owned(),
            data.to_owned(),
            run.join("build"),
            UID_RANGES - 1,
        )
    }

    fn new(name: String, data_directory: PathBuf, run_directory: PathBuf, range: u32) -> Self {
        let first = FIRST_UID + range * UIDS;
        Self {
            name,
            data_directory,
            run_directory,
            uids: first..first + UIDS - 1,
        }
    }

    /// User that template machines are built as, one at a time.
    pub(crate) fn build_uid(&self) -> u32 {
        self.uids.end
    }

    /// All its user ids, that of builds included.
    pub(crate) fn all_uids(&self) -> Range<u32> {
        self.uids.start..self.uids.end + 1
    }

    /// Says what is wrong with its directories before anything is made in them.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        let length = self.run_directory.as_os_str().len();
        if length > NodeConfig::MAX_RUN_DIRECTORY || !self.run_directory.is_absolute() {
            return Err(CliError::environment(format!(
                "the run directory {} cannot be used: it must be an absolute path of at most {} bytes",
                self.run_directory.display(),
                NodeConfig::MAX_RUN_DIRECTORY
            ))
            .with_hint("choose a shorter one with --run-dir"));
        }
        Ok(())
    }

    /// Where the node manager listens.
    pub(crate) fn manager_socket(&self) -> PathBuf {
        self.run_directory.join("manager.sock")
    }
}

/// An ordinary user, by name or number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Account {
    /// A number need not have an entry in the user database; then the group has the same number.
    fn numeric(uid: u32) -> Self {
        let known = User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten();
        Self {
            uid,
            gid: known.map_or(uid, |user| user.gid.as_raw()),
        }
    }
}

impl FromStr for Account {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let account = match given.parse::<u32>() {
            Ok(uid) => Self::numeric(uid),
            Err(_) => {
                let user = User::from_name(given).map_err(|error| error.to_string())?;
                let user = user.ok_or_else(|| format!("there is no user \"{given}\" on this machine"))?;
                Self {
                    uid: user.uid.as_raw(),
                    gid: user.gid.as_raw(),
                }
            }
        };
        let machines = FIRST_UID..FIRST_UID + UID_RANGES * UIDS;
        match account.uid {
            0 | u32::MAX => Err("the node never runs as root: name an ordinary user".to_owned()),
            uid if machines.contains(&uid) => Err(format!("user id {uid} is one that machines run as")),
            _ => Ok(account),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installations_have_names_directories_and_users_of_their_own() {
        let local = Installation::of(PathBuf::from(DATA_DIRECTORY), None);
        assert_eq!((local.name.as_str(), local.uids.start), ("local", FIRST_UID));
        assert_eq!(local.run_directory, Path::new("/run/space/local"));
        let other = Installation::of(PathBuf::from("/srv/space"), None);
        assert_ne!(other.name, local.name);
        assert!(other.run_directory.starts_with("/run/space"));
        let builder = Installation::builder(Path::new("/srv/space"), Path::new(RUN_DIRECTORY));
        for (a, b) in [(&local, &other), (&local, &builder), (&other, &builder)] {
            let (a, b) = (a.all_uids(), b.all_uids());
            assert!(a.end <= b.start || b.end <= a.start, "{a:?} meets {b:?}");
        }
        assert!(!other.uids.contains(&other.build_uid()));
        assert!(!local.all_uids().contains(&NODE_UID));
    }

    #[test]
    fn the_node_is_never_root_and_never_a_machine() {
        assert_eq!(
            "199998".parse(),
            Ok(Account {
                uid: 199_998,
                gid: 199_998
            })
        );
        assert_eq!("nobody".parse::<Account>().map(|account| account.uid), Ok(65_534));
        for bad in ["0", "root", "4294967295", "200000", "no-such-user-here"] {
            assert!(bad.parse::<Account>().is_err(), "{bad}");
        }
    }
}
