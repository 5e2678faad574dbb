//! The unpacked root tree: gets its user, its defaults and the recipe's files, and loses what differs between builds.

use std::{
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use fs_err as fs;

use crate::{VolumeError, recipe::CopiedFile};

/// Uid and gid of the ordinary user `user` inside a sandbox.
const USER_ID: u32 = 1000;

/// Adds the user, the recipe's files and sane defaults, and removes what differs between two builds.
pub(crate) fn finish(tree: &Path, files: &[CopiedFile]) -> Result<(), VolumeError> {
    let step = "finish the root image";
    let io = |error| VolumeError::io(step)(error);
    let put = |path: &str, mode: u32, content: &str| -> Result<(), VolumeError> {
        let path = tree.join(path);
        // Never through a symlink that a package may have put there.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
        fs::write(&path, content).map_err(io)?;
        fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).map_err(io)
    };
    put("etc/hostname", 0o644, "sandbox\n")?;
    put(
        "etc/hosts",
        0o644,
        "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    )?;
    // Refused at once where nothing listens, instead of waiting for an answer that never comes.
    put("etc/resolv.conf", 0o644, "nameserver 127.0.0.1\n")?;
    put("etc/machine-id", 0o444, "")?;
    put("etc/fstab", 0o644, "")?;
    if tree.join("etc/sudoers.d").is_dir() {
        put("etc/sudoers.d/user", 0o440, "user ALL=(ALL:ALL) NOPASSWD: ALL\n")?;
    }
    // A sandbox is there to be changed: pip need not protect Debian's own packages from its user.
    put(
        "etc/pip.conf",
        0o644,
        "[global]\nbreak-system-packages = true\nroot-user-action = ignore\ndisable-pip-version-check = true\n",
    )?;
    add_user(tree)?;
    for file in files {
        copy_into(tree, file)?;
    }

    for empty in [
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "var/tmp",
        "var/lib/apt/lists",
        "var/cache/apt",
        "var/cache/ldconfig",
    ] {
        empty_directory(&tree.join(empty))?;
    }
    remove_files_below(&tree.join("var/log"))?;
    for leftover in [
        "etc/passwd-",
        "etc/shadow-",
        "etc/group-",
        "etc/gshadow-",
        "etc/subuid-",
        "etc/subgid-",
        "etc/.pwd.lock",
        "var/lib/dpkg/status-old",
        "var/lib/dpkg/available-old",
        "var/lib/dpkg/diversions-old",
        "var/lib/dpkg/statoverride-old",
        "var/lib/dpkg/lock",
        "var/lib/dpkg/lock-frontend",
        "var/cache/debconf/config.dat-old",
        "var/cache/debconf/templates.dat-old",
        "var/cache/debconf/passwords.dat",
        "var/lib/dbus/machine-id",
        "var/lib/systemd/random-seed",
    ] {
        match fs::remove_file(tree.join(leftover)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Writes the account files directly: `useradd` would leave today's date in them.
fn add_user(tree: &Path) -> Result<(), VolumeError> {
    let step = "add the user";
    let io = |error| VolumeError::io(step)(error);
    for (file, line) in [
        (
            "etc/passwd",
            format!("user:x:{USER_ID}:{USER_ID}::/home/user:/bin/bash\n"),
        ),
        ("etc/group", format!("user:x:{USER_ID}:\n")),
        ("etc/shadow", "user:*:19000:0:99999:7:::\n".to_owned()),
        ("etc/gshadow", "user:!::\n".to_owned()),
    ] {
        let path = tree.join(file);
        let mut text = match fs::read_to_string(&path) {
            Ok(text) => text,
            // Only the shadow files may be missing.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && file.contains("shadow") => continue,
            Err(error) => return Err(io(error)),
        };
        if !text.lines().any(|line| line.starts_with("user:")) {
            text.push_str(&line);
            fs::write(&path, text).map_err(io)?;
        }
    }
    let home = tree.join("home/user");
    fs::create_dir_all(&home).map_err(io)?;
    fs::set_permissions(&home, std::fs::Permissions::from_mode(0o755)).map_err(io)?;
    let skeleton = tree.join("etc/skel");
    if skeleton.is_dir() {
        for entry in fs::read_dir(&skeleton).map_err(io)? {
            let entry = entry.map_err(io)?;
            let to = home.join(entry.file_name());
            if entry.file_type().map_err(io)?.is_file() {
                fs::copy(entry.path(), &to).map_err(io)?;
                chown(&to, Some(USER_ID), Some(USER_ID)).map_err(io)?;
            }
        }
    }
    chown(&home, Some(USER_ID), Some(USER_ID)).map_err(io)
}

fn copy_into(tree: &Path, file: &CopiedFile) -> Result<(), VolumeError> {
    let step = "copy a file of the recipe";
    let io = |error| VolumeError::io(step)(error);
    let guest = file.guest.strip_prefix("/").unwrap_or(&file.guest);
    let target = tree.join(guest);
    // A symlink of the tree on the way (`/lib` is one) must not lead out of it.
    let parent = guest.parent().unwrap_or(Path::new(""));
    let mut at = tree.to_owned();
    for component in parent.components() {
        at.push(component);
        if fs::symlink_metadata(&at).is_ok_and(|metadata| metadata.is_symlink()) {
            return Err(VolumeError::BadRecipe {
                what: format!(
                    "{} passes through a symlink of the root: name its target",
                    file.guest.display()
                ),
            });
        }
    }
    fs::create_dir_all(tree.join(parent)).map_err(io)?;
    walk(&file.host, &mut |path, kind| {
        let relative = path.strip_prefix(&file.host).unwrap_or(Path::new(""));
        let to = if relative.as_os_str().is_empty() {
            target.clone()
        } else {
            target.join(relative)
        };
        // What a package put there gives way, and is never followed if it is a symlink.
        match fs::symlink_metadata(&to) {
            Ok(there) if there.is_dir() && kind.is_dir() => {}
            Ok(there) if there.is_dir() => {
                return Err(VolumeError::BadRecipe {
                    what: format!("{} is a directory in the root", file.guest.display()),
                });
            }
            Ok(_) => fs::remove_file(&to).map_err(io)?,
            Err(_) => {}
        }
        if kind.is_dir() {
            fs::create_dir_all(&to).map_err(io)?;
            fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).map_err(io)
        } else if kind.is_symlink() {
            fs::os::unix::fs::symlink(fs::read_link(path).map_err(io)?, &to).map_err(io)
        } else if kind.is_file() {
            fs::copy(path, &to).map_err(io)?;
            let executable = fs::metadata(path).map_err(io)?.permissions().mode() & 0o111 != 0;
            let mode = if executable { 0o755 } else { 0o644 };
            fs::set_permissions(&to, std::fs::Permissions::from_mode(mode)).map_err(io)?;
            chown(&to, Some(0), Some(0)).map_err(io)
        } else {
            Err(VolumeError::BadRecipe {
                what: format!("{} is neither a file, a directory nor a symlink", path.display()),
            })
        }
    })
}

/// The newest modification time within `tree` that is older than `start`, in seconds since 1970.
pub(crate) fn newest_before(tree: &Path, start: SystemTime) -> Result<u64, VolumeError> {
    let step = "read the times of the root image";
    let mut newest = UNIX_EPOCH;
    walk(tree, &mut |path, kind| {
        if !kind.is_dir() {
            let time = fs::symlink_metadata(path)
                .and_then(|metadata| metadata.modified())
                .map_err(VolumeError::io(step))?;
            if time < start {
                newest = newest.max(time);
            }
        }
        Ok(())
    })?;
    Ok(newest
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs()))
}

/// Visits `top` and everything below it, each directory before its content, in the order of names; follows no links.
pub(crate) fn walk(
    top: &Path,
    visit: &mut dyn FnMut(&Path, std::fs::FileType) -> Result<(), VolumeError>,
) -> Result<(), VolumeError> {
    let step = "look through a directory";
    let kind = fs::symlink_metadata(top)
        .map_err(VolumeError::io(step))?
        .file_type();
    visit(top, kind)?;
    if kind.is_dir() {
        let mut names = fs::read_dir(top)
            .and_then(|entries| {
                entries
                    .map(|entry| Ok(entry?.file_name()))
                    .collect::<Result<Vec<_>, _>>()
            })
            .map_err(VolumeError::io(step))?;
        names.sort();
        for name in names {
            walk(&top.join(name), visit)?;
        }
    }
    Ok(())
}

fn empty_directory(directory: &Path) -> Result<(), VolumeError> {
    let step = "empty a directory of the root image";
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(VolumeError::io(step)(error)),
    };
    for entry in entries {
        let entry = entry.map_err(VolumeError::io(step))?;
        if entry.file_type().map_err(VolumeError::io(step))?.is_dir() {
            fs::remove_dir_all(entry.path()).map_err(VolumeError::io(step))?;
        } else {
            fs::remove_file(entry.path()).map_err(VolumeError::io(step))?;
        }
    }
    Ok(())
}

/// Removes the files but keeps the directories, which packages expect to find.
fn remove_files_below(directory: &Path) -> Result<(), VolumeError> {
    walk(directory, &mut |path, kind| {
        if kind.is_dir() {
            Ok(())
        } else {
            fs::remove_file(path).map_err(VolumeError::io("remove a log of the root image"))
        }
    })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, time::Duration};

    use super::*;

    fn small_tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for directory in [
            "etc/sudoers.d",
            "etc/skel",
            "var/log/apt",
            "tmp",
            "usr/lib",
            "var/cache/ldconfig",
        ] {
            fs::create_dir_all(tree.path().join(directory)).unwrap();
        }
        for (path, content) in [
            ("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n"),
            ("etc/group", "root:x:0:\n"),
            ("etc/shadow", "root:*:19000:0:99999:7:::\n"),
            ("etc/passwd-", "old"),
            ("etc/skel/.bashrc", "# hi\n"),
            ("var/log/apt/history.log", "today"),
            ("var/cache/ldconfig/aux-cache", "random"),
            ("tmp/left", "over"),
        ] {
            fs::write(tree.path().join(path), content).unwrap();
        }
        symlink("usr/lib", tree.path().join("lib")).unwrap();
        tree
    }

    #[test]
    fn the_user_is_added_and_leftovers_go() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIPPED: changing owners needs root");
            return;
        }
        let tree = small_tree();
        finish(tree.path(), &[]).unwrap();
        finish(tree.path(), &[]).unwrap();
        let passwd = fs::read_to_string(tree.path().join("etc/passwd")).unwrap();
        assert_eq!(passwd.matches("user:x:1000:1000").count(), 1, "{passwd}");
        for gone in [
            "etc/passwd-",
            "var/log/apt/history.log",
            "var/cache/ldconfig/aux-cache",
            "tmp/left",
        ] {
            assert!(!tree.path().join(gone).exists(), "{gone}");
        }
        assert!(tree.path().join("var/log/apt").is_dir());
        assert_eq!(fs::metadata(tree.path().join("etc/machine-id")).unwrap().len(), 0);
        assert!(tree.path().join("home/user/.bashrc").is_file());
    }

    #[test]
    fn files_never_leave_the_tree_through_a_symlink() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIPPED: changing owners needs root");
            return;
        }
        let tree = small_tree();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("victim"), "untouched").unwrap();
        fs::write(outside.path().join("source"), "new").unwrap();
        symlink(outside.path(), tree.path().join("escape")).unwrap();
        symlink(outside.path().join("victim"), tree.path().join("etc/link")).unwrap();
        let copied = |guest: &str| CopiedFile {
            host: outside.path().join("source"),
            guest: guest.into(),
        };
        let through = copy_into(tree.path(), &copied("/escape/victim"));
        assert!(
            matches!(through, Err(VolumeError::BadRecipe { .. })),
            "{through:?}"
        );
        copy_into(tree.path(), &copied("/etc/link")).unwrap();
        assert_eq!(
            fs::read_to_string(outside.path().join("victim")).unwrap(),
            "untouched"
        );
        assert_eq!(fs::read_to_string(tree.path().join("etc/link")).unwrap(), "new");
        copy_into(tree.path(), &copied("/srv/deep/er/file")).unwrap();
        assert_eq!(
            fs::read_to_string(tree.path().join("srv/deep/er/file")).unwrap(),
            "new"
        );
    }

    #[test]
    fn only_times_from_before_the_build_count() {
        let tree = tempfile::tempdir().unwrap();
        let start = SystemTime::now();
        for (name, time) in [
            ("old", UNIX_EPOCH + Duration::from_secs(1_000)),
            ("packaged", UNIX_EPOCH + Duration::from_secs(5_000)),
            ("made", start + Duration::from_secs(5)),
        ] {
            let file = fs::File::create(tree.path().join(name)).unwrap();
            file.file().set_modified(time).unwrap();
        }
        assert_eq!(newest_before(tree.path(), start).unwrap(), 5_000);
    }
}
