//! Doing file work as somebody else.
//!
//! The daemon is root; a request acts for one account. The work runs on a blocking thread whose
//! file-system identity, groups and capabilities are that account's for the duration, so the
//! kernel itself decides what it may touch. Only that thread changes.

use std::io;

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups};

use crate::account::Account;

/// Runs `work` on a blocking thread as `account`. Once begun it runs to its end even if the
/// future is dropped.
pub(crate) async fn run_as<T: Send + 'static>(
    account: &Account,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let account = account.clone();
    let done = tokio::task::spawn_blocking(move || {
        let _borrowed = Borrowed::take(&account)?;
        Ok(work())
    });
    done.await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// The account's identity, held by the current thread until dropped.
struct Borrowed {
    /// Absent when there was nothing to change.
    original: Option<(CapabilitySets, Vec<rustix::fs::Gid>)>,
}

impl Borrowed {
    fn take(account: &Account) -> io::Result<Self> {
        let own = rustix::process::geteuid().as_raw();
        if account.uid == own {
            return Ok(Self { original: None });
        }
        if own != 0 {
            return Err(io::Error::from(io::ErrorKind::PermissionDenied));
        }
        let original = capabilities(None)?;
        // From here on `drop` restores everything, whichever step fails.
        let borrowed = Self {
            original: Some((original, rustix::process::getgroups()?)),
        };
        let groups: Vec<_> = account
            .groups
            .iter()
            .map(|gid| rustix::fs::Gid::from_raw(*gid))
            .collect();
        set_thread_groups(&groups)?;
        setfsgid(Gid::from_raw(account.gid));
        setfsuid(Uid::from_raw(account.uid));
        // Changing the user drops only the capabilities about files; with the others gone too,
        // nothing of root is left that a path could reach.
        let effective = CapabilitySet::empty();
        set_capabilities(
            None,
            CapabilitySets {
                effective,
                ..original
            },
        )?;
        // The two calls above report no failure: ask what is in force.
        if setfsuid(Uid::from_raw(u32::MAX)).as_raw() != account.uid
            || setfsgid(Gid::from_raw(u32::MAX)).as_raw() != account.gid
        {
            return Err(io::Error::from(io::ErrorKind::PermissionDenied));
        }
        Ok(borrowed)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let Some((original, groups)) = self.original.take() else {
            return;
        };
        let restored = set_capabilities(None, original);
        setfsuid(Uid::from_raw(0));
        setfsgid(Gid::from_raw(0));
        let groups = set_thread_groups(&groups);
        let is_root = setfsuid(Uid::from_raw(u32::MAX)).is_root();
        if restored.is_err() || groups.is_err() || !is_root {
            // A pool thread with a wrong identity would corrupt every later request.
            tracing::error!("cannot take the service's own identity back");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[tokio::test]
    async fn work_is_done_as_the_account_and_only_then() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: needs root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "root's").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        let account = Account {
            name: "nobody".into(),
            uid: 65534,
            gid: 65533,
            groups: vec![65533, 27],
            home: "/".into(),
        };
        let own = directory.path().join("own");
        let (read, status) = run_as(&account, {
            let (secret, own) = (secret.clone(), own.clone());
            move || {
                std::fs::write(&own, "x").unwrap();
                (
                    std::fs::read(secret),
                    std::fs::read_to_string("/proc/thread-self/status").unwrap(),
                )
            }
        })
        .await
        .unwrap();
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
        let metadata = std::fs::metadata(&own).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (65534, 65533));
        // The same pool thread serves the next request, as root.
        for _ in 0..8 {
            let secret = secret.clone();
            let root = Account {
                name: "root".into(),
                uid: 0,
                gid: 0,
                groups: vec![0],
                home: "/root".into(),
            };
            assert!(
                run_as(&root, move || std::fs::read(secret))
                    .await
                    .unwrap()
                    .is_ok()
            );
        }
    }
}
