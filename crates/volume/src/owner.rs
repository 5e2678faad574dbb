//! Whose a template store is.
//!
//! Its directory belongs to the user that the node runs as; root filesystems are made by root. So when root has a store
//! of somebody else open, it touches the store as that user: what it makes is theirs, and no link that they could put
//! in its way leads it to what they may not reach themselves.

use std::{
    marker::PhantomData,
    os::{fd::AsFd, unix::fs::MetadataExt as _},
    path::Path,
};

use fs_err as fs;
use nix::unistd::{Gid, Uid, fchown, getegid, geteuid, setfsgid, setfsuid};

use crate::VolumeError;

/// The user to touch files as, if it is not the process's own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner(Option<(Uid, Gid)>);

impl Owner {
    /// The owner of a directory, as far as this process can be somebody else.
    pub(crate) fn of(directory: &Path) -> Result<Self, VolumeError> {
        let metadata =
            fs::metadata(directory).map_err(VolumeError::io("look whose the template store is"))?;
        let another = geteuid().is_root() && metadata.uid() != 0;
        Ok(Self(another.then(|| {
            (Uid::from_raw(metadata.uid()), Gid::from_raw(metadata.gid()))
        })))
    }

    /// Makes a file that was made for the owner this process's own, to give it to a machine's user.
    pub(crate) fn take_back(self, file: impl AsFd) -> Result<(), VolumeError> {
        match self.0 {
            Some(_) => fchown(file, Some(geteuid()), Some(getegid()))
                .map_err(|error| VolumeError::io("take a file from the store's owner")(error.into())),
            None => Ok(()),
        }
    }

    /// From here to the end of the scope this thread's access to files is the owner's.
    pub(crate) fn act(self) -> Acting {
        // The group first: it may be changed only by root.
        let before = self.0.map(|(uid, gid)| {
            let group = setfsgid(gid);
            (setfsuid(uid), group)
        });
        Acting {
            before,
            _thread: PhantomData,
        }
    }
}

/// See [`Owner::act`]. Bound to its thread, so it cannot be held over an `await`.
#[derive(Debug)]
#[must_use]
pub(crate) struct Acting {
    before: Option<(Uid, Gid)>,
    _thread: PhantomData<*const ()>,
}

impl Drop for Acting {
    fn drop(&mut self) {
        if let Some((uid, gid)) = self.before {
            setfsuid(uid);
            setfsgid(gid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_made_as_the_owner_and_what_is_roots_stays_closed() {
        if !geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (own, roots) = (directory.path().join("own"), directory.path().join("roots"));
        fs::create_dir(&own).unwrap();
        std::os::unix::fs::chown(&own, Some(40_430), Some(40_431)).unwrap();
        fs::set_permissions(
            directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        let owner = Owner::of(&own).unwrap();
        {
            let _acting = owner.act();
            fs::write(own.join("file"), "").unwrap();
            assert!(fs::write(&roots, "").is_err());
            // Nested, as functions that call each other do.
            drop(owner.act());
            assert!(fs::write(&roots, "").is_err());
        }
        let made = fs::metadata(own.join("file")).unwrap();
        assert_eq!((made.uid(), made.gid()), (40_430, 40_431));
        owner
            .take_back(fs::File::open(own.join("file")).unwrap())
            .unwrap();
        assert_eq!(fs::metadata(own.join("file")).unwrap().uid(), 0);
        fs::write(&roots, "").unwrap();
        assert_eq!(fs::metadata(&roots).unwrap().uid(), 0);
        // One's own directory needs nothing.
        assert!(Owner::of(directory.path()).unwrap().act().before.is_none());
    }
}
