//! Gives a directory tree to a user, without ever following a link out of it.
//!
//! Each entry is opened by name relative to its open directory, looked at, and given away through that very descriptor,
//! so nothing can be put in its place in between. A file that has another name outside of the tree stays whose it is:
//! it could be one of the host's, linked into the tree by somebody who wants to own it.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid},
    io::Errno,
};

use super::installation::Account;

/// Deepest directory that is entered. The deepest we make has five levels.
const MAX_DEPTH: usize = 32;

/// Names that a file has within the tree.
type Names = BTreeMap<(u64, u64), u64>;

/// Opens a directory that is no link, to give it away or look at its owner.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(
        path,
        OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Whose it is.
pub(super) fn owner(directory: &OwnedFd) -> io::Result<u32> {
    Ok(rustix::fs::fstat(directory)?.st_uid)
}

/// Which entries change hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// All of them.
    Everyones,
    /// Those of root; what machines being built own stays theirs.
    Roots,
}

/// Gives what is in `directory` to `account`, the directory itself last: whether it is done shows in its owner.
/// Returns how many entries changed hands.
pub(super) fn give_tree(directory: &OwnedFd, account: Account, whose: Whose) -> io::Result<usize> {
    let mut names = Names::new();
    count(directory.as_fd(), &mut names, 0)?;
    let gift = Gift {
        account,
        whose,
        names,
    };
    let given = gift.below(directory.as_fd(), 0)?;
    Ok(given + gift.entry(directory.as_fd(), &rustix::fs::fstat(directory)?)?)
}

/// Counts the names of files that have several.
fn count(directory: BorrowedFd<'_>, names: &mut Names, depth: usize) -> io::Result<()> {
    for_each(directory, depth, |entry, status| {
        match FileType::from_raw_mode(status.st_mode) {
            FileType::Directory => count(enter(entry)?.as_fd(), names, depth + 1)?,
            _ if status.st_nlink > 1 => *names.entry((status.st_dev, status.st_ino)).or_default() += 1,
            _ => {}
        }
        Ok(())
    })
}

/// One walk through a tree.
struct Gift {
    account: Account,
    whose: Whose,
    names: Names,
}

impl Gift {
    fn below(&self, directory: BorrowedFd<'_>, depth: usize) -> io::Result<usize> {
        let mut given = 0;
        for_each(directory, depth, |entry, status| {
            let kind = FileType::from_raw_mode(status.st_mode);
            if kind == FileType::Directory {
                given += self.below(enter(entry)?.as_fd(), depth + 1)?;
            }
            let known = self
                .names
                .get(&(status.st_dev, status.st_ino))
                .copied()
                .unwrap_or(1);
            let ours = match kind {
                FileType::Directory => true,
                FileType::RegularFile | FileType::Symlink | FileType::Socket => known == status.st_nlink,
                // Nothing that we make.
                _ => false,
            };
            if ours {
                given += self.entry(entry, status)?;
            }
            Ok(())
        })?;
        Ok(given)
    }

    fn entry(&self, entry: BorrowedFd<'_>, status: &Stat) -> io::Result<usize> {
        let Account { uid, gid } = self.account;
        let stays = self.whose == Whose::Roots && status.st_uid != 0;
        if stays || (status.st_uid, status.st_gid) == (uid, gid) {
            return Ok(0);
        }
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::chownat(entry, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
        Ok(1)
    }
}

/// Calls `each` for every entry, opened without following it. One that goes away meanwhile is left out.
fn for_each(
    directory: BorrowedFd<'_>,
    depth: usize,
    mut each: impl FnMut(BorrowedFd<'_>, &Stat) -> io::Result<()>,
) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other(format!(
            "directories are nested more than {MAX_DEPTH} deep"
        )));
    }
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => continue,
            opened => opened?,
        };
        let status = rustix::fs::fstat(&opened)?;
        each(opened.as_fd(), &status)?;
    }
    Ok(())
}

/// Opens for reading a directory that is held by its place only.
fn enter(directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        directory,
        c".",
        OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Makes a directory, and those above it as root's, unless they are there.
pub(super) fn make(path: &Path) -> io::Result<OwnedFd> {
    if let Some(parent) = path.parent() {
        fs_err::create_dir_all(parent)?;
    }
    match rustix::fs::mkdirat(CWD, path, Mode::from_raw_mode(0o711)) {
        Ok(()) | Err(Errno::EXIST) => open(path),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use fs_err as fs;

    use super::*;

    /// Skipped, said loudly, without root: only root gives files away.
    fn tree() -> Option<tempfile::TempDir> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: not root");
            return None;
        }
        Some(tempfile::tempdir().expect("a directory"))
    }

    fn uid(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("there").uid()
    }

    #[test]
    fn a_tree_is_given_away_and_nothing_outside_of_it() {
        let Some(outside) = tree() else { return };
        let top = outside.path().join("data");
        fs::create_dir_all(top.join("a/b")).expect("made");
        fs::write(top.join("a/b/file"), "x").expect("made");
        fs::hard_link(top.join("a/b/file"), top.join("a/twin")).expect("linked");
        fs::write(outside.path().join("victim"), "x").expect("made");
        fs::create_dir(outside.path().join("elsewhere")).expect("made");
        fs::write(outside.path().join("elsewhere/file"), "x").expect("made");
        symlink("../victim", top.join("link")).expect("linked");
        symlink("../elsewhere", top.join("way out")).expect("linked");
        fs::hard_link(outside.path().join("victim"), top.join("a/hard")).expect("linked");

        let account = Account {
            uid: 65_534,
            gid: 65_534,
        };
        let directory = open(&top).expect("opened");
        std::os::unix::fs::chown(top.join("a/b"), Some(1), Some(1)).expect("given");
        assert_eq!(
            give_tree(&directory, account, Whose::Roots).expect("given"),
            5,
            "a file with two names counts once"
        );
        assert_eq!(uid(&top.join("a/b")), 1, "it was not root's");
        assert_eq!(
            give_tree(&directory, account, Whose::Everyones).expect("given"),
            1
        );
        for inside in ["", "a", "a/b", "a/b/file", "a/twin", "link", "way out"] {
            assert_eq!(uid(&top.join(inside)), 65_534, "{inside}");
        }
        for kept in ["victim", "elsewhere", "elsewhere/file", "data/a/hard"] {
            assert_eq!(uid(&outside.path().join(kept)), 0, "{kept}");
        }
        let again = give_tree(&directory, account, Whose::Everyones).expect("again");
        assert_eq!(again, 0, "it is idempotent");
    }

    #[test]
    fn a_link_is_no_directory() {
        let Some(outside) = tree() else { return };
        symlink("/etc", outside.path().join("data")).expect("linked");
        assert!(open(&outside.path().join("data")).is_err());
        assert!(make(&outside.path().join("data")).is_err());
    }
}
