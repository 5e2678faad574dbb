//! Directories: making, listing, moving and removing.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use space_proto::filesystem::EntryInfo;

use crate::account::Names;

use super::FileError;
use super::entry::describe;

/// One listing holds at most so many entries; a larger one is refused, not cut.
const MAX_ENTRIES: usize = 100_000;
const MAX_DEPTH: u32 = 1000;
const DIRECTORY_MODE: u32 = 0o755;

/// Makes a directory and its missing parents. They belong to the account that asks.
pub(crate) fn make_parents(path: &Path) -> Result<(), FileError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
        .map_err(|source| FileError::from_io("make directory", path, source))
}

/// Makes a directory that must not exist yet.
pub(crate) fn make(path: &Path, names: &Names) -> Result<EntryInfo, FileError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            return Err(FileError::Exists {
                path: path.to_string_lossy().into_owned(),
            });
        }
        Ok(_) => {
            let path = path.to_string_lossy().into_owned();
            return Err(FileError::WrongKind {
                path,
                problem: "already exists and is not a directory",
            });
        }
        Err(_) => {}
    }
    make_parents(path)?;
    stat(path, names)
}

pub(crate) fn stat(path: &Path, names: &Names) -> Result<EntryInfo, FileError> {
    describe(path, names).map_err(|source| FileError::from_io("read", path, source))
}

/// Lists `root` down to `depth` levels, parents before children, by name. Links are not followed,
/// except `root` itself.
pub(crate) fn list(root: &Path, depth: u32, names: &Names) -> Result<Vec<EntryInfo>, FileError> {
    let found = std::fs::metadata(root).map_err(|source| FileError::from_io("list", root, source))?;
    if !found.is_dir() {
        let path = root.to_string_lossy().into_owned();
        return Err(FileError::WrongKind {
            path,
            problem: "is not a directory",
        });
    }
    let depth = depth.clamp(1, MAX_DEPTH);
    let mut entries = Vec::new();
    // Children are pushed in reverse, so that the stack yields them in order.
    let mut open = children(root, depth).map_err(|source| FileError::from_io("list", root, source))?;
    while let Some((path, levels)) = open.pop() {
        let entry = match describe(&path, names) {
            Ok(entry) => entry,
            // Gone since its directory was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(FileError::from_io("list", &path, source)),
        };
        if entries.len() >= MAX_ENTRIES {
            return Err(FileError::TooMany {
                what: "the directory has more than 100000 entries; list with a smaller depth",
            });
        }
        let descend = levels > 1 && entry.permissions.starts_with('d');
        entries.push(entry);
        if descend {
            match children(&path, levels - 1) {
                Ok(more) => open.extend(more),
                // The directory itself is listed; what is in it is not this account's to see.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound
                    ) => {}
                Err(source) => return Err(FileError::from_io("list", &path, source)),
            }
        }
    }
    Ok(entries)
}

fn children(directory: &Path, levels: u32) -> io::Result<Vec<(PathBuf, u32)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        found.push((entry?.path(), levels));
        if found.len() > MAX_ENTRIES {
            break;
        }
    }
    found.sort_unstable_by(|a, b| b.0.cmp(&a.0));
    Ok(found)
}

/// Renames, making the destination's parents.
pub(crate) fn rename(from: &Path, to: &Path, names: &Names) -> Result<EntryInfo, FileError> {
    std::fs::symlink_metadata(from).map_err(|source| FileError::from_io("move", from, source))?;
    if let Some(parent) = to.parent() {
        make_parents(parent)?;
    }
    match std::fs::rename(from, to) {
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => copy_across(from, to)?,
        moved => moved.map_err(|source| FileError::from_io("move", to, source))?,
    }
    stat(to, names)
}

/// A single file can move between file systems by copy; a tree cannot do so in one step.
fn copy_across(from: &Path, to: &Path) -> Result<(), FileError> {
    let is_file = std::fs::symlink_metadata(from).is_ok_and(|found| found.is_file());
    if !is_file {
        let source = io::Error::from_raw_os_error(libc::EXDEV);
        return Err(FileError::from_io("move", to, source));
    }
    std::fs::copy(from, to).map_err(|source| FileError::from_io("move", to, source))?;
    std::fs::remove_file(from).map_err(|source| FileError::from_io("move", from, source))
}

/// Removes whatever is there, with everything below; links are removed, not followed. Nothing
/// there is fine.
pub(crate) fn remove(path: &Path) -> Result<(), FileError> {
    if path.parent().is_none() {
        return Err(FileError::Invalid {
            what: "the root directory cannot be removed".to_owned(),
        });
    }
    let removed = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|source| FileError::from_io("remove", path, source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_by_depth_in_order_without_following_links() {
        let root = tempfile::tempdir().unwrap();
        let names = Names::default();
        make(&root.path().join("a/b/c"), &names).unwrap();
        std::fs::write(root.path().join("a/z"), "").unwrap();
        std::os::unix::fs::symlink(root.path(), root.path().join("loop")).unwrap();
        let listed = |depth| -> Vec<String> {
            let entries = list(root.path(), depth, &names).unwrap();
            let strip = |path: &str| path[root.path().as_os_str().len() + 1..].to_owned();
            entries.iter().map(|entry| strip(&entry.path)).collect()
        };
        assert_eq!(listed(0), ["a", "loop"]);
        assert_eq!(listed(2), ["a", "a/b", "a/z", "loop"]);
        assert_eq!(listed(9), ["a", "a/b", "a/b/c", "a/z", "loop"]);
        assert!(matches!(
            make(&root.path().join("a"), &names),
            Err(FileError::Exists { .. })
        ));
        assert!(matches!(
            list(&root.path().join("a/z"), 1, &names),
            Err(FileError::WrongKind { .. })
        ));

        remove(&root.path().join("loop")).unwrap();
        assert!(root.path().join("a/z").exists());
        rename(&root.path().join("a"), &root.path().join("new/place"), &names).unwrap();
        remove(&root.path().join("new")).unwrap();
        remove(&root.path().join("new")).unwrap();
        assert!(listed(1).is_empty());
    }
}
