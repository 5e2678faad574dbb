//! What a monitor sees of the file system: a root of its own with the programs of the host, three devices and its views.
//!
//! ```text
//! once:       an empty mount namespace: one read-only tmpfs with the directory /m, nothing of the host
//! per start:  parent   a detached tmpfs with all mount points; detached, closed copies of what goes on them
//!             child    enters the empty namespace, makes a copy of it for itself, attaches the tmpfs at /m and the rest
//!                      on it, and makes /m its root
//! ```
//!
//! So a start neither copies nor takes apart the host's mount table, and the child makes few system calls. Below the
//! monitor's root is the empty tmpfs and nothing else; changing root needs a capability that it does not have.

use std::{
    collections::BTreeSet,
    ffi::{CStr, CString},
    io,
    mem::size_of,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path, PathBuf},
};

use fs_err as fs;
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
        UnmountFlags,
    },
    thread::UnshareFlags,
};

use crate::{PrivilegeError, View, failed};

/// Where the root is attached in the empty namespace.
pub(crate) const ROOT: &CStr = c"/m";

/// Most views of one monitor: a root image, memory, state and a chain of disk layers.
pub(crate) const MOST_VIEWS: usize = 64;

/// Longest path of a view, bytes.
const LONGEST_PATH: usize = 1024;

/// Programs and libraries of the host; symbolic links among them are links in the jail too.
const PROGRAMS: [&str; 6] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"];

/// Files without which many programs do not run.
const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/urandom"];

/// The table of shared libraries.
const LIBRARIES: &str = "/etc/ld.so.cache";

/// Nothing is mounted by a view on or in these.
const RESERVED: [&str; 10] = [
    "usr", "bin", "sbin", "lib", "lib32", "lib64", "dev", "etc", "proc", "sys",
];

/// The most that the tmpfs of a root may hold: it holds directories and links only.
const ROOT_SIZE: &str = "256k";
const ROOT_INODES: &str = "1024";

/// The empty mount namespace that every jail is a copy of.
#[derive(Debug)]
pub(crate) struct Empty {
    namespace: OwnedFd,
}

impl Empty {
    /// Makes it on a thread that ends right after, so that no other thread changes its namespace.
    pub(crate) fn new() -> Result<Self, PrivilegeError> {
        let make = || -> io::Result<OwnedFd> {
            #[expect(
                deprecated,
                reason = "the replacement is unsafe only because of CLONE_FILES, which is not used"
            )]
            rustix::thread::unshare(UnshareFlags::NEWNS)?;
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private)?;
            let namespace = rustix::fs::open(
                "/proc/thread-self/ns/mnt",
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            let root = tmpfs()?;
            rustix::fs::mkdirat(&root, "m", Mode::from_raw_mode(0o755))?;
            close(root.as_fd(), true)?;
            // Any directory will do: it is left at once.
            rustix::mount::move_mount(&root, "", CWD, "/usr", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
            rustix::process::fchdir(&root)?;
            rustix::process::pivot_root(".", ".")?;
            rustix::mount::unmount(".", UnmountFlags::DETACH)?;
            Ok(namespace)
        };
        let thread = std::thread::Builder::new()
            .name("space-mountns".to_owned())
            .stack_size(128 * 1024)
            .spawn(make)
            .map_err(|e| failed("starting a thread", e))?;
        let namespace = thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the helper thread panicked")))
            .map_err(|e| failed("making an empty mount namespace", e))?;
        Ok(Self { namespace })
    }
}

/// A jail, ready to be entered.
pub(crate) struct Jail {
    /// The empty namespace.
    pub(crate) namespace: OwnedFd,
    /// A detached, read-only tmpfs with every mount point.
    pub(crate) root: OwnedFd,
    /// What goes where, in order; paths relative to the root.
    pub(crate) mounts: Vec<(OwnedFd, CString)>,
}

impl Jail {
    /// Prepares a jail with these views; `owner` is whose directories may be among them.
    pub(crate) fn new(
        empty: &Empty,
        views: &[View],
        program: &Path,
        owner: u32,
    ) -> Result<Self, PrivilegeError> {
        let views = check(views, owner)?;
        let make = || -> io::Result<Self> {
            let root = tmpfs()?;
            let mut maker = Maker {
                root: &root,
                made: BTreeSet::new(),
                mounts: Vec::new(),
            };
            for path in PROGRAMS {
                maker.programs(Path::new(path))?;
            }
            for device in DEVICES {
                maker.host(Path::new(device), true, false)?;
            }
            if Path::new(LIBRARIES).exists() {
                maker.host(Path::new(LIBRARIES), false, false)?;
            }
            if !PROGRAMS.iter().any(|part| program.starts_with(part)) {
                maker.host(program, false, true)?;
            }
            let mut directories: Vec<&Path> = Vec::new();
            for View {
                path,
                source,
                writable,
            } in views
            {
                let tree = tree_of(source.as_fd())?;
                let is_directory = is_directory(source.as_fd())?;
                close(tree.as_fd(), !writable)?;
                // Inside another view its mount point is a file or directory of that view.
                let inside = directories.iter().any(|above| path.starts_with(above));
                maker.mount(path, tree, is_directory, inside)?;
                if is_directory {
                    directories.push(path);
                }
            }
            let mounts = maker.mounts;
            close(root.as_fd(), true)?;
            Ok(Self {
                namespace: empty.namespace.try_clone()?,
                root,
                mounts,
            })
        };
        make().map_err(|e| failed("preparing a monitor's view of the file system", e))
    }
}

/// A detached copy of the mount at `source`.
///
/// The kernel copies mounts of our own mount namespace only, and a node that its service manager has confined is in
/// another one. Then the file is looked for under its name here, and must be the very same: what is made of it can be no
/// more than the node has.
fn tree_of(source: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = copy() | OpenTreeFlags::AT_EMPTY_PATH;
    match rustix::mount::open_tree(source, "", flags) {
        Err(rustix::io::Errno::INVAL) => {}
        tree => return Ok(tree?),
    }
    let path = fs::read_link(format!("/proc/self/fd/{}", source.as_raw_fd()))?;
    let here = rustix::fs::openat2(
        CWD,
        &path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    let (given, found) = (rustix::fs::fstat(source)?, rustix::fs::fstat(&here)?);
    if (given.st_dev, given.st_ino, given.st_mode) != (found.st_dev, found.st_ino, found.st_mode) {
        let what = format!("{} is another file here than for the node", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(rustix::mount::open_tree(&here, "", flags)?)
}

/// Builds a root.
struct Maker<'a> {
    root: &'a OwnedFd,
    /// Directories that are there, relative.
    made: BTreeSet<PathBuf>,
    mounts: Vec<(OwnedFd, CString)>,
}

impl Maker<'_> {
    /// A directory of programs as the host has it: a link, a mount, or nothing.
    fn programs(&mut self, path: &Path) -> io::Result<()> {
        let Ok(status) = fs::symlink_metadata(path) else {
            return Ok(());
        };
        if status.is_symlink() {
            let target = fs::read_link(path)?;
            rustix::fs::symlinkat(&target, self.root, relative(path))?;
            return Ok(());
        }
        self.host(path, false, true)
    }

    /// A file or directory of the host at its own path, read-only.
    fn host(&mut self, path: &Path, device: bool, program: bool) -> io::Result<()> {
        let tree = rustix::mount::open_tree(CWD, path, copy() | OpenTreeFlags::AT_RECURSIVE)?;
        let attributes = if device {
            MountAttrFlags::MOUNT_ATTR_NOEXEC
        } else if program {
            MountAttrFlags::MOUNT_ATTR_NODEV
        } else {
            MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC
        };
        let attributes = attributes | MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOSUID;
        set_attributes(tree.as_fd(), attributes, true)?;
        let is_directory = is_directory(tree.as_fd())?;
        self.mount(path, tree, is_directory, false)
    }

    fn mount(&mut self, path: &Path, tree: OwnedFd, is_directory: bool, inside: bool) -> io::Result<()> {
        let path = relative(path);
        if !inside {
            self.parents(path)?;
            if is_directory {
                self.directory(path)?;
            } else {
                // Not opened: a monitor that is started meanwhile by another thread would hold a copy of the descriptor
                // for an instant, and a root that somebody may write to cannot be made read-only.
                rustix::fs::mknodat(
                    self.root,
                    path,
                    FileType::RegularFile,
                    Mode::from_raw_mode(0o444),
                    0,
                )?;
            }
        }
        let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
        self.mounts.push((tree, path));
        Ok(())
    }

    fn parents(&mut self, path: &Path) -> io::Result<()> {
        let mut above = path
            .ancestors()
            .skip(1)
            .filter(|p| !p.as_os_str().is_empty())
            .collect::<Vec<_>>();
        above.reverse();
        above.into_iter().try_for_each(|path| self.directory(path))
    }

    fn directory(&mut self, path: &Path) -> io::Result<()> {
        if self.made.insert(path.to_owned()) {
            rustix::fs::mkdirat(self.root, path, Mode::from_raw_mode(0o755))?;
        }
        Ok(())
    }
}

/// The views, each below those that contain it; or why they are refused.
///
/// A directory must be the node's: of anybody else's, such as one that only root may pass through, it would show what the
/// node itself cannot reach.
fn check(views: &[View], owner: u32) -> Result<Vec<&View>, PrivilegeError> {
    let refuse = |what: String| Err(PrivilegeError::Refused { what });
    if views.len() > MOST_VIEWS {
        return refuse(format!("{} views, more than {MOST_VIEWS}", views.len()));
    }
    for view in views {
        let mut parts = view.path.components();
        let first = (parts.next(), parts.next());
        let allowed = matches!(
            first,
            (Some(Component::RootDir), Some(Component::Normal(top))) if !RESERVED.iter().any(|r| top == *r)
        );
        // Taking it apart and putting it together changes whatever is not in its simplest form.
        let plain = parts.all(|part| matches!(part, Component::Normal(_)))
            && view.path.components().collect::<PathBuf>().as_os_str() == view.path.as_os_str();
        let bytes = view.path.as_os_str().as_bytes();
        if !allowed || !plain || bytes.len() > LONGEST_PATH || bytes.contains(&0) {
            return refuse(format!("nothing can be shown at {}", view.path.display()));
        }
        let status = rustix::fs::fstat(&view.source);
        match status.map(|s| (FileType::from_raw_mode(s.st_mode), s.st_uid)) {
            Ok((FileType::RegularFile, _)) => {}
            Ok((FileType::Directory, uid)) if uid == owner => {}
            Ok((FileType::Directory, uid)) => {
                return refuse(format!(
                    "the directory to be shown at {} belongs to user {uid}",
                    view.path.display()
                ));
            }
            _ => {
                return refuse(format!(
                    "what is to be shown at {} is no file or directory",
                    view.path.display()
                ));
            }
        }
    }
    let mut sorted = views.iter().collect::<Vec<_>>();
    sorted.sort_by(|a, b| a.path.cmp(&b.path));
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].path == pair[1].path) {
        return refuse(format!("two views at {}", pair[0].path.display()));
    }
    Ok(sorted)
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn is_directory(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::Directory)
}

fn copy() -> OpenTreeFlags {
    OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC
}

/// A new, detached tmpfs.
fn tmpfs() -> io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("size", ROOT_SIZE), ("nr_inodes", ROOT_INODES), ("mode", "0755")] {
        rustix::mount::fsconfig_set_string(context.as_fd(), key, value)?;
    }
    rustix::mount::fsconfig_create(context.as_fd())?;
    Ok(rustix::mount::fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?)
}

/// Takes from a detached mount whatever a monitor does not need of it.
fn close(mount: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, read_only);
    set_attributes(mount, attributes, false)
}

/// Adds attributes and cuts every tie to other mount namespaces.
fn set_attributes(mount: BorrowedFd<'_>, attributes: MountAttrFlags, recursive: bool) -> io::Result<()> {
    let change = libc::mount_attr {
        attr_set: attributes.bits().into(),
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    let mut flags = libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: reads the structure and the empty string, which live until after the call. rustix has no wrapper.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const change,
            size_of::<libc::mount_attr>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(path: &str, source: &str) -> View {
        View {
            path: path.into(),
            source: rustix::fs::open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap(),
            writable: false,
        }
    }

    #[test]
    fn views_are_refused_where_the_programs_are_and_by_crooked_paths() {
        for bad in [
            "relative",
            "/",
            "/usr",
            "/usr/share/x",
            "/proc/1",
            "/dev/mem",
            "/a/../b",
            "/a/./b",
            "/a//b",
            "/a/",
            "//a",
            "/../a",
        ] {
            assert!(check(&[view(bad, "/usr")], 0).is_err(), "{bad}");
        }
        assert!(check(&[view("/a", "/dev/null")], 0).is_err(), "a device");
        assert!(
            check(&[view("/a", "/usr"), view("/a", "/usr")], 0).is_err(),
            "twice"
        );
        let many = (0..=MOST_VIEWS).map(|n| view(&format!("/v/{n}"), "/usr"));
        assert!(check(&many.collect::<Vec<_>>(), 0).is_err(), "too many");
    }

    #[test]
    fn a_directory_is_shown_only_if_it_is_the_nodes() {
        assert!(check(&[view("/a", "/usr")], 0).is_ok());
        let views = [view("/a", "/usr")];
        let outcome = check(&views, 40_331);
        assert!(
            matches!(outcome, Err(PrivilegeError::Refused { .. })),
            "{outcome:?}"
        );
        // A file is no way to others.
        assert!(check(&[view("/a", "/usr/bin/env")], 40_331).is_ok());
    }

    #[test]
    fn a_view_comes_after_the_one_it_is_in() {
        let views = [
            view("/a/b/c", "/usr"),
            view("/a", "/usr"),
            view("/a-b", "/usr"),
            view("/a/b", "/usr"),
        ];
        let order = check(&views, 0).unwrap();
        let order = order.iter().map(|v| v.path.to_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(order, ["/a", "/a/b", "/a/b/c", "/a-b"]);
    }

    /// As it is for a node under `ProtectSystem=strict`.
    #[test]
    fn a_file_opened_in_another_mount_namespace_is_found_here() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: not root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        // The namespace lives as long as the thread, which waits for the end of the channel.
        let open = |path: PathBuf| {
            let (hand_over, opened) = std::sync::mpsc::channel();
            let (hold, held) = std::sync::mpsc::channel::<()>();
            std::thread::spawn(move || {
                #[expect(
                    deprecated,
                    reason = "the replacement is unsafe only because of CLONE_FILES, which is not used"
                )]
                rustix::thread::unshare(UnshareFlags::NEWNS | UnshareFlags::FS).unwrap();
                let file = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
                hand_over.send(file.unwrap()).unwrap();
                held.recv().ok();
            });
            (opened.recv().unwrap(), hold)
        };
        let (foreign, _hold) = open(directory.path().to_owned());
        let flags = copy() | OpenTreeFlags::AT_EMPTY_PATH;
        assert!(
            rustix::mount::open_tree(&foreign, "", flags).is_err(),
            "the kernel copies it itself"
        );
        let tree = tree_of(foreign.as_fd()).unwrap();
        let (given, found) = (
            rustix::fs::fstat(&foreign).unwrap(),
            rustix::fs::fstat(&tree).unwrap(),
        );
        assert_eq!((given.st_dev, given.st_ino), (found.st_dev, found.st_ino));

        // Another one has taken its place.
        let path = directory.path().join("file");
        std::fs::write(&path, "first").unwrap();
        let (first, _held) = open(path.clone());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "second").unwrap();
        assert!(tree_of(first.as_fd()).is_err());
    }
}
